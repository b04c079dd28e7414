// The storages of a moment, each watched, and those of given tensors.
#include <memory>
#include <vector>

#include "instruments/shim/handle.h"
#include "instruments/shim/zbp_tap.h"
#include "shim/torch/python.h"
#include "shim/torch/zbp_tensor.h"

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

void add(PyObject* set, THPObjectPtr value) {
  if (!value || PySet_Add(set, value) < 0) {
    throw python_error();
  }
}

THPObjectPtr new_set() {
  THPObjectPtr set(PySet_New(nullptr));
  if (!set) {
    throw python_error();
  }
  return set;
}

/// Calls `visit` with each storage of what `tensor` is made of.
void for_each_storage(const c10::TensorImpl& tensor,
                      c10::function_ref<void(c10::StorageImpl&)> visit) {
  if (auto* storage =
          tensor.has_storage() ? tensor.unsafe_storage().unsafeGetStorageImpl() : nullptr) {
    visit(*storage);
  }
  for_each_component(tensor, [&](const at::Tensor& component, const char*) {
    for_each_storage(*component.unsafeGetTensorImpl(), visit);
  });
}

/// New set of `number` of each storage of the tensors.
template <class Number>
PyObject* set_of(PyObject* tensors, zbp_error* error, const Number& number) {
  return guarded_object(error, [&] {
    THPObjectPtr set = new_set();
    THPObjectPtr sequence(PySequence_Fast(tensors, "expected a list of tensors"));
    if (!sequence) {
      throw python_error();
    }
    for (Py_ssize_t i = 0; i < size_of(sequence); ++i) {
      if (const void* tensor = zbp_tensor_key(item(sequence, i))) {
        for_each_storage(
            *static_cast<const c10::TensorImpl*>(tensor),
            [&](c10::StorageImpl& storage) { add(set, THPObjectPtr(number(storage))); });
      }
    }
    return set.release();
  });
}

}  // namespace

}  // namespace zbp

using namespace zbp;

PyObject* zbp_watch_storages(PyObject* handles, zbp_error* error) {
  return guarded_object(error, [&] {
    THPObjectPtr sequence(PySequence_Fast(handles, "expected a list of handles"));
    if (!sequence) {
      throw python_error();
    }
    auto watched = std::make_unique<std::vector<Watch>>();
    for (Py_ssize_t i = 0; i < size_of(sequence); ++i) {
      const Handle* const handle = as_handle(item(sequence, i));
      if (handle && handle->storage()) {
        zbp_tap_adopt_storage(handle->storage());
        watched->emplace_back(std::get<StorageRef>(handle->thing));
      }
    }
    THPObjectPtr capsule(PyCapsule_New(watched.get(), capsule_name, free_watched));
    if (!capsule) {
      throw python_error();
    }
    watched.release();
    return capsule.release();
  });
}

PyObject* zbp_storages_gone(PyObject* capsule, zbp_error* error) {
  return guarded_object(error, [&] {
    THPObjectPtr set = new_set();
    for (const Watch& watch : watched_in(capsule)) {
      if (watch.expired()) {
        add(set, THPObjectPtr(identity_of(watch._unsafe_get_target())));
      }
    }
    return set.release();
  });
}

PyObject* zbp_storage_spans(PyObject* capsule, zbp_error* error) {
  return guarded_object(error, [&] {
    THPObjectPtr list = new_list();
    for (const Watch& watch : watched_in(capsule)) {
      if (const StorageRef storage = watch.lock()) {
        THPObjectPtr memory(memory_of(*storage));
        if (!memory) {
          throw python_error();
        }
        append(list,
               PyTuple_Pack(4, PyTuple_GET_ITEM(memory.get(), 2), PyTuple_GET_ITEM(memory.get(), 0),
                            PyTuple_GET_ITEM(memory.get(), 1),
                            THPObjectPtr(identity_of(storage.get())).get()));
      }
    }
    return list.release();
  });
}

PyObject* zbp_storages_of(PyObject* tensors, zbp_error* error) {
  return set_of(tensors, error, [](c10::StorageImpl& storage) { return identity_of(&storage); });
}

PyObject* zbp_addresses_of(PyObject* tensors, zbp_error* error) {
  return set_of(tensors, error, [](c10::StorageImpl& storage) {
    return PyLong_FromVoidPtr(storage._mutable_data_ptr_no_checks().get());
  });
}
