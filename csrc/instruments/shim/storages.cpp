// The storages of a moment, each watched, and those of given tensors.
#include <memory>
#include <vector>

#include "instruments/shim/handle.h"
#include "instruments/shim/zbp_tap.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

using Watch = c10::weak_intrusive_ptr<c10::StorageImpl>;

constexpr const char* capsule_name = "zbpipe.storages";

std::vector<Watch>& watched_in(PyObject* capsule) {
  void* const watched = PyCapsule_GetPointer(capsule, capsule_name);
  if (!watched) {
    throw python_error();
  }
  return *static_cast<std::vector<Watch>*>(watched);
}

void free_watched(PyObject* capsule) {
  delete static_cast<std::vector<Watch>*>(PyCapsule_GetPointer(capsule, capsule_name));
}

PyObject* identity_of(const c10::StorageImpl* storage) {
  return PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(storage));
}

/// Takes over `value`.
void add(PyObject* set, PyObject* value) {
  if (PySet_Add(set, checked(value)) < 0) {
    throw python_error();
  }
}

/// Calls `visit` with each item.
template <class Visit>
void for_each_item(PyObject* sequence, const Visit& visit) {
  THPObjectPtr items = checked(PySequence_Fast(sequence, "expected a list"));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i) {
    visit(PySequence_Fast_GET_ITEM(items.get(), i));
  }
}

/// Calls `visit` with each storage of what `tensor` is made of.
void for_each_storage(const c10::TensorImpl& tensor,
                      c10::function_ref<void(c10::StorageImpl&)> visit) {
  if (auto* storage = storage_in(tensor)) {
    visit(*storage);
  }
  for_each_component(tensor, [&](const at::Tensor& component, const char*) {
    for_each_storage(*component.unsafeGetTensorImpl(), visit);
  });
}

/// New set of `number` of each storage of the tensors.
template <class Number>
PyObject* set_of(PyObject* tensors, const Number& number) {
  return answer_of([&] {
    THPObjectPtr set = checked(PySet_New(nullptr));
    for_each_item(tensors, [&](PyObject* item) {
      if (const auto* tensor = tensor_in(item)) {
        for_each_storage(*tensor, [&](c10::StorageImpl& storage) { add(set, number(storage)); });
      }
    });
    return set.release();
  });
}

PyObject* watch_storages(PyObject* /*module*/, PyObject* handles) {
  return answer_of([&] {
    auto watched = std::make_unique<std::vector<Watch>>();
    for_each_item(handles, [&](PyObject* item) {
      if (const Handle* handle = as_handle(item); handle && handle->storage()) {
        zbp_tap_adopt_storage(handle->storage());
        watched->emplace_back(std::get<StorageRef>(handle->thing));
      }
    });
    THPObjectPtr capsule = checked(PyCapsule_New(watched.get(), capsule_name, free_watched));
    watched.release();
    return capsule.release();
  });
}

PyObject* storages_gone(PyObject* /*module*/, PyObject* capsule) {
  return answer_of([&] {
    THPObjectPtr set = checked(PySet_New(nullptr));
    for (const Watch& watch : watched_in(capsule)) {
      if (watch.expired()) {
        add(set, identity_of(watch._unsafe_get_target()));
      }
    }
    return set.release();
  });
}

PyObject* storage_spans(PyObject* /*module*/, PyObject* capsule) {
  return answer_of([&] {
    THPObjectPtr list = checked(PyList_New(0));
    for (const Watch& watch : watched_in(capsule)) {
      if (const StorageRef storage = watch.lock()) {
        THPObjectPtr memory = checked(memory_of(*storage));
        append(list,
               PyTuple_Pack(4, PyTuple_GET_ITEM(memory.get(), 2), PyTuple_GET_ITEM(memory.get(), 0),
                            PyTuple_GET_ITEM(memory.get(), 1),
                            THPObjectPtr(identity_of(storage.get())).get()));
      }
    }
    return list.release();
  });
}

PyObject* storages_of(PyObject* /*module*/, PyObject* tensors) {
  return set_of(tensors, [](c10::StorageImpl& storage) { return identity_of(&storage); });
}

PyObject* addresses_of(PyObject* /*module*/, PyObject* tensors) {
  return set_of(tensors, [](c10::StorageImpl& storage) {
    return PyLong_FromVoidPtr(storage._mutable_data_ptr_no_checks().get());
  });
}

PyMethodDef functions_of_storages[] = {
    {"watch_storages", watch_storages, METH_O,
     "watch_storages(handles, /)\n--\n\n"
     "The storages among the handles, referred to weakly: their identities are given to no "
     "others,\n"
     "and their memory may go. Their growth is seen from now on."},
    {"storages_gone", storages_gone, METH_O,
     "storages_gone(watched, /)\n--\n\n"
     "The identities of those that have been freed since, as a set."},
    {"storage_spans", storage_spans, METH_O,
     "storage_spans(watched, /)\n--\n\n"
     "List of (device, address, bytes, identity) of those that still live."},
    {"storages_of", storages_of, METH_O,
     "storages_of(tensors, /)\n--\n\n"
     "The identities of the tensors' storages, as a set of ints; of a sparse, nested or quantized\n"
     "one those of what it is made of. What is no tensor adds nothing."},
    {"addresses_of", addresses_of, METH_O,
     "addresses_of(tensors, /)\n--\n\n"
     "Likewise, the addresses of the tensors' memory."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

}  // namespace zbp

int zbp_add_storages(PyObject* module) {
  return PyModule_AddFunctions(module, zbp::functions_of_storages);
}
