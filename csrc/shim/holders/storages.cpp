#include "shim/holders/storages.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>

#include <torch/csrc/autograd/python_variable.h>

#include "shim/torch/python.h"
#include "shim/memory/zbp_tap.h"

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

namespace zbp {

const c10::StorageImpl* storage_key(const c10::TensorImpl& tensor) {
  return tensor.has_storage() ? tensor.unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

const c10::TensorImpl& tensor_at(const Heap& heap, uint32_t v) {
  return *static_cast<const c10::TensorImpl*>(heap.key(v));
}

const c10::StorageImpl& storage_at(const Heap& heap, uint32_t v) {
  return *static_cast<const c10::StorageImpl*>(heap.key(v));
}

uint64_t address_of(const c10::StorageImpl& storage) {
  const void* data = const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks().get();
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(data));
}

size_t bytes_of(const c10::StorageImpl& storage) {
  return static_cast<size_t>(storage.sym_nbytes().maybe_as_int().value_or(0));
}

THPObjectPtr collectors_list() {
  THPObjectPtr gc(PyImport_ImportModule("gc"));
  THPObjectPtr list(gc ? PyObject_CallMethod(gc, "get_objects", nullptr) : nullptr);
  if (!list) {
    throw python_error();
  }
  return list;
}

/// As zbp_search's roots: adds them to `heap`.
void add_roots_to(Heap& heap, PyObject* roots) {
  heap.ignore(roots);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(roots); ++i) {
    heap.ignore(PyList_GET_ITEM(roots, i));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(roots); ++i) {
    PyObject* const root = PyList_GET_ITEM(roots, i);
    PyObject* const held = PyTuple_GET_ITEM(root, 1);
    const uint32_t v = heap.add_root(PyTuple_GET_ITEM(root, 0));
    if (held == Py_None || v == Heap::none) {
      continue;
    }
    heap.ignore(held);
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(held); ++k) {
      heap.add_held(v, PyList_GET_ITEM(held, k));
    }
  }
}

Blocks blocks_between(uint64_t since, uint64_t until, std::unordered_set<uint64_t>& others_out) {
  zbp_block* blocks = nullptr;
  size_t count = 0;
  if (zbp_tap_blocks(0, &blocks, &count) != ZBP_OK) {
    throw std::bad_alloc();
  }
  const std::unique_ptr<zbp_block, decltype(&std::free)> owned(blocks, &std::free);
  Blocks result;
  for (size_t i = 0; i < count; ++i) {
    if (blocks[i].serial >= since && blocks[i].serial < until) {
      result.emplace(blocks[i].address, Block{blocks[i].bytes});
    } else {
      others_out.insert(blocks[i].address);
    }
  }
  return result;
}

bool is_foreign(const c10::StorageImpl& storage, const zbp_storages& older,
                const std::unordered_set<uint64_t>& tapped) {
  // Memory of the CPU allocator that the tap does not know is older than the tap: a storage that came
  // to be seen. But one that Python made goes past the tap (torch.UntypedStorage(n), and so
  // copy.deepcopy, torch.load), and has an object of Python's: an old one is among `older`.
  const bool is_older = storage.device_type() == c10::kCPU && zbp_tap_feeds(storage.allocator()) &&
                        storage.pyobj_slot()->load_pyobj() == nullptr;
  return bytes_of(storage) > 0 && storage.device_type() != c10::kMeta && !is_older &&
         older.storage.count(&storage) == 0 && tapped.count(address_of(storage)) == 0;
}

}  // namespace zbp

namespace {

using namespace zbp;

std::unique_ptr<zbp_storages> storages_now(zbp_group_access groups, PyObject* roots) {
  const NoCollection no_collection;
  auto storages = std::make_unique<zbp_storages>();
  THPObjectPtr list = collectors_list();
  Heap heap(groups);
  heap.ignore(list);
  const bool is_whole = PyList_GET_SIZE(roots) > 0;
  add_roots_to(heap, roots);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); ++i) {
    PyObject* object = PyList_GET_ITEM(list.get(), i);
    if (is_whole || heap.is_torchs(object) || heap.is_group(object)) {
      heap.add_root(object);
    } else if (heap.is_script_module(object)) {
      heap.add_script_of(object);
    }
  }
  if (is_whole) {
    heap.explore();
  } else {
    heap.explore_autograd();
  }
  for (uint32_t v = 0; v < heap.size(); ++v) {
    if (heap.thing(v) == Thing::storage) {
      auto* storage = const_cast<c10::StorageImpl*>(&storage_at(heap, v));
      zbp_tap_adopt_storage(storage);
      storages->storage.emplace(
          storage, WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)));
    }
  }
  return storages;
}

/// Calls `visit` with each storage of what `tensor` is made of.
void for_each_storage(const c10::TensorImpl& tensor,
                      c10::function_ref<void(const c10::StorageImpl&)> visit) {
  if (const auto* storage = storage_key(tensor)) {
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
    THPObjectPtr set(PySet_New(nullptr));
    THPObjectPtr sequence(PySequence_Fast(tensors, "expected a list of tensors"));
    if (!set || !sequence) {
      throw python_error();
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.get()); ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(sequence.get(), i);
      if (!PyType_IsSubtype(Py_TYPE(item), reinterpret_cast<PyTypeObject*>(THPVariableClass)) ||
          !THPVariable_Unpack(item).defined()) {
        continue;
      }
      for_each_storage(*THPVariable_Unpack(item).unsafeGetTensorImpl(),
                       [&](const c10::StorageImpl& storage) {
                         THPObjectPtr value(number(storage));
                         if (!value || PySet_Add(set, value) < 0) {
                           throw python_error();
                         }
                       });
    }
    return set.release();
  });
}

}  // namespace

int zbp_storages_new(zbp_group_access groups, PyObject* roots, zbp_storages** storages_out,
                     zbp_error* error) {
  std::unique_ptr<zbp_storages> storages;
  const int status = guarded(error, [&] { storages = storages_now(groups, roots); });
  if (status == ZBP_OK) {
    *storages_out = storages.release();
  }
  return status;
}

void zbp_storages_free(zbp_storages* storages) {
  delete storages;
}

int zbp_storages_since(zbp_group_access groups, PyObject* roots, const zbp_storages* older,
                       size_t* count_out, zbp_error* error) {
  return guarded(error, [&] {
    std::unordered_set<uint64_t> tapped;
    blocks_between(UINT64_MAX, UINT64_MAX, tapped);
    const auto now = storages_now(groups, roots);
    *count_out = static_cast<size_t>(
        std::count_if(now->storage.begin(), now->storage.end(), [&](const auto& entry) {
          return !entry.second.expired() && is_foreign(*entry.first, *older, tapped);
        }));
  });
}

PyObject* zbp_storages_gone(const zbp_storages* storages, zbp_error* error) {
  return guarded_object(error, [&] {
    THPObjectPtr set(PySet_New(nullptr));
    for (const auto& [storage, weak] : storages->storage) {
      THPObjectPtr id(weak.expired() ? PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(storage))
                                     : Py_NewRef(Py_None));
      if (!set || !id || (id != Py_None && PySet_Add(set, id) < 0)) {
        throw python_error();
      }
    }
    return set.release();
  });
}

PyObject* zbp_storages_spans(const zbp_storages* storages, zbp_error* error) {
  return guarded_object(error, [&] {
    THPObjectPtr list = new_list();
    for (const auto& [storage, weak] : storages->storage) {
      if (const auto living = weak.lock()) {
        append(list, Py_BuildValue("(sKKN)", living->device().str().c_str(),
                                   static_cast<unsigned long long>(address_of(*living)),
                                   static_cast<unsigned long long>(bytes_of(*living)),
                                   PyLong_FromVoidPtr(living.get())));
      }
    }
    return list.release();
  });
}

PyObject* zbp_storages_of(PyObject* tensors, zbp_error* error) {
  return set_of(tensors, error, [](const c10::StorageImpl& storage) {
    return PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(&storage));
  });
}

PyObject* zbp_addresses_of(PyObject* tensors, zbp_error* error) {
  return set_of(tensors, error, [](const c10::StorageImpl& storage) {
    return PyLong_FromUnsignedLongLong(address_of(storage));
  });
}
