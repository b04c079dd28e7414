#include "shim/holders/things.h"

#include <new>
#include <utility>

#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "shim/memory/zbp_tap.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"
#include "shim/engine/stand_in.h"

namespace zbp {

namespace {

constexpr int64_t OURS = 1;  // the reference by which what is libtorch's is owned

PyObject* as_object(const void* key) {
  return static_cast<PyObject*>(const_cast<void*>(key));
}

/// The barrier of what can only run out of memory.
template <class Body>
int in_memory(const Body& body) noexcept {
  try {
    body();
    return ZBP_OK;
  } catch (const std::bad_alloc&) {
    return ZBP_ENOMEM;
  }
}

/// A visitor of C's, in frames of C++.
struct Visitor {
  zbp_visit visit;
  void* arg;
  int* status;

  void operator()(const zbp_reference& reference) const {
    const int ended = visit(arg, &reference);
    if (ended != ZBP_OK) {
      *status = ended;
      throw std::bad_alloc();  // it is over; see outcome()
    }
  }
};

/// What a visit comes to: the status that ended it, else the barrier's.
int outcome(int ended, int status, zbp_error* error) {
  if (ended == ZBP_OK) {
    return status;
  }
  zbp_error_clear(error);
  return ended;
}

/// Null if the object is being destroyed: its last reference has gone, and the thread that let it go waits for the
/// GIL, to let go of the Python object.
template <class Object, class Null = c10::detail::intrusive_target_default_null_type<Object>>
c10::intrusive_ptr<Object, Null> lock(const void* key) {
  auto weak =
      c10::weak_intrusive_ptr<Object, Null>::reclaim(static_cast<Object*>(const_cast<void*>(key)));
  auto strong = weak.lock();
  weak.release();
  return strong;
}

/// Keeps it, if it is there.
template <class Refs, class Ref>
bool keep(Refs& refs, Ref ref) {
  return ref && (refs.push_back(std::move(ref)), true);
}

}  // namespace

PyObject* object_of(uint8_t thing, const void* key) {
  switch (thing) {
    case ZBP_THING_TENSOR:
      return static_cast<c10::TensorImpl*>(const_cast<void*>(key))->pyobj_slot()->load_pyobj();
    case ZBP_THING_STORAGE:
      return static_cast<c10::StorageImpl*>(const_cast<void*>(key))->pyobj_slot()->load_pyobj();
    case ZBP_THING_NODE:
      return nullptr;
    default:
      return as_object(key);
  }
}

}  // namespace zbp

using namespace zbp;

zbp_thing zbp_things::resolve(PyObject* object) {
  const Type type = types_.of(object);
  zbp_thing found{ZBP_THING_PYTHON, ZBP_TYPE_OTHER, object};
  switch (type) {
    case Type::skipped:
      found.key = nullptr;
      break;
    case Type::tensor: {
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (tensor.defined()) {
        found = {ZBP_THING_TENSOR, ZBP_TYPE_OTHER, tensor.unsafeGetTensorImpl()};
      }
      break;
    }
    case Type::storage:
      if (const auto& storage = THPStorage_Unpack(object)) {
        found = {ZBP_THING_STORAGE, ZBP_TYPE_OTHER, storage.unsafeGetStorageImpl()};
      }
      break;
    case Type::cpp_node:
      if (const auto& node = reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata) {
        found = {ZBP_THING_NODE, ZBP_TYPE_OTHER, node.get()};
      }
      break;
    case Type::py_node:
      if (const auto node = lock_py_node(reinterpret_cast<THPFunction*>(object)->cdata)) {
        found = {ZBP_THING_NODE, ZBP_TYPE_OTHER, &original_of(*node)};
      }
      break;
    case Type::group:
      found.thing = ZBP_THING_GROUP;
      break;
    case Type::work:
      found.type = ZBP_TYPE_WORK;
      break;
    case Type::script:
      found.type = ZBP_TYPE_SCRIPT;
      break;
    case Type::saved:
    case Type::array:
    case Type::capsule:
      break;
    case Type::script_module:
      found.type = ZBP_TYPE_SCRIPT_MODULE;
      [[fallthrough]];
    case Type::plain:
      found.key = PyObject_IS_GC(object) ? object : nullptr;
      break;
  }
  return found;
}

bool zbp_things::own(const zbp_thing& thing) {
  switch (thing.thing) {
    case ZBP_THING_TENSOR:
      return keep(tensors_, lock<c10::TensorImpl, c10::UndefinedTensorImpl>(thing.key));
    case ZBP_THING_STORAGE:
      return keep(storages_, lock<c10::StorageImpl>(thing.key));
    case ZBP_THING_NODE:
      return keep(nodes_, lock_node(*static_cast<Node*>(const_cast<void*>(thing.key))));
    default:
      return true;
  }
}

void zbp_things::visit(uint8_t thing, const void* key, Visit visit) {
  void* const object = const_cast<void*>(key);
  switch (thing) {
    case ZBP_THING_PYTHON:
#if PY_VERSION_HEX < 0x030B0000
      // A running frame: only here it tells its variables to who traverses it, those too that are left out of held_.
      if (held_.count(key)) {
        break;
      }
#endif
      python_references(as_object(key), visit);
      break;
    case ZBP_THING_TENSOR:
      tensor_references(*static_cast<c10::TensorImpl*>(object), visit);
      break;
    case ZBP_THING_NODE:
      node_references(*static_cast<Node*>(object), visit);
      break;
    case ZBP_THING_GROUP:
      group_references(as_object(key), visit);
      break;
    default:
      break;
  }
  if (held_.empty()) {
    return;
  }
  if (const auto held = held_.find(key); held != held_.end()) {
    for (PyObject* one : held->second) {
      visit({ZBP_THING_PYTHON, one, nullptr, -1, true});
    }
  }
}

void zbp_things::visit_scripts(PyObject* module, Visit visit) {
  const auto look = [&](PyObject* object) {
    if (types_.of(object) == Type::script) {
      visit({ZBP_THING_PYTHON, object, nullptr, -1, true});
    }
  };
  python_references(module, [&](const zbp_reference& reference) {
    PyObject* const held = as_object(reference.key);
    look(held);
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_CheckExact(held) && PyDict_Next(held, &at, nullptr, &value);) {
      look(value);
    }
  });
}

void zbp_things_free(zbp_things* things) {
  delete things;
}

int zbp_things_resolve(zbp_things* things, const void* object, zbp_thing* thing_out) {
  return in_memory([&] { *thing_out = things->resolve(as_object(object)); });
}

int zbp_things_own(zbp_things* things, zbp_thing thing, bool* lives_out) {
  return in_memory([&] { *lives_out = things->own(thing); });
}

int zbp_things_visit(zbp_things* things, uint8_t thing, const void* key, zbp_visit visit, void* arg,
                     zbp_error* error) {
  int ended = ZBP_OK;
  const int status =
      kept_in(error, [&] { things->visit(thing, key, Visitor{visit, arg, &ended}); });
  return outcome(ended, status, error);
}

int zbp_things_add_held(zbp_things* things, const void* key, const void* held) {
  return in_memory([&] { things->add_held(key, as_object(held)); });
}

int zbp_things_visit_scripts(zbp_things* things, const void* module, zbp_visit visit, void* arg,
                             zbp_error* error) {
  int ended = ZBP_OK;
  const int status = kept_in(
      error, [&] { things->visit_scripts(as_object(module), Visitor{visit, arg, &ended}); });
  return outcome(ended, status, error);
}

zbp_counts zbp_things_count(uint8_t thing, const void* key) {
  void* const of = const_cast<void*>(key);
  PyObject* object = object_of(thing, key);
  zbp_counts counts{};
  counts.has_native = counts.python_owns = counts.native_owns = true;
  switch (thing) {
    case ZBP_THING_TENSOR:
      counts.native = static_cast<int64_t>(
          c10::raw::intrusive_ptr::use_count(static_cast<c10::TensorImpl*>(of)));
      break;
    case ZBP_THING_STORAGE:
      counts.native = static_cast<int64_t>(
          c10::raw::intrusive_ptr::use_count(static_cast<c10::StorageImpl*>(of)));
      break;
    case ZBP_THING_NODE: {
      Node& node = *static_cast<Node*>(of);
      object = python_object_of(node);
      counts.native = static_cast<int64_t>(ref_of(node).use_count()) - 1;  // without this one
      if (!NODES_KEEP_PYTHON_OBJECTS) {
        counts.native_owns = is_python_function(node);
        counts.python_owns = !counts.native_owns;
      }
      break;
    }
    default:
      counts.has_native = false;
      break;
  }
  counts.native -= OURS;
  counts.has_python = object != nullptr;
  counts.python = object ? static_cast<int64_t>(Py_REFCNT(object)) : 0;
  return counts;
}

uint8_t zbp_things_blame(uint8_t thing, const void* key) {
  PyObject* const object = object_of(thing, key);
  if (thing == ZBP_THING_NODE && is_python_function(*static_cast<const Node*>(key))) {
    return 0;
  }
  if (thing != ZBP_THING_PYTHON) {
    return object ? 3 : 4;
  }
  if (PyTuple_CheckExact(object) || PyCell_Check(object) || PyDict_CheckExact(object)) {
    return 2;
  }
  return PyFunction_Check(object) || PyFrame_Check(object) ||
                 PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_HEAPTYPE)
             ? 0
             : 1;
}

int zbp_things_list(zbp_things* things, const void* const** object_out, size_t* count_out,
                    const void** list_out, zbp_error* error) {
  return kept_in(error, [&] {
    THPObjectPtr gc(PyImport_ImportModule("gc"));
    THPObjectPtr list(gc ? PyObject_CallMethod(gc, "get_objects", nullptr) : nullptr);
    if (!list) {
      throw python_error();
    }
    *object_out = const_cast<const void* const*>(
        reinterpret_cast<void**>(reinterpret_cast<PyListObject*>(list.get())->ob_item));
    *count_out = static_cast<size_t>(PyList_GET_SIZE(list.get()));
    *list_out = list.get();
    things->collected = std::move(list);
  });
}

void zbp_things_unlist(zbp_things* things) {
  things->collected = nullptr;
}

const void* zbp_tensor_storage(const void* tensor) {
  const auto& impl = *static_cast<const c10::TensorImpl*>(tensor);
  return impl.has_storage() ? impl.unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

bool zbp_storage_look(const void* storage, zbp_memory* memory_out) {
  const auto living = lock<c10::StorageImpl>(storage);
  if (!living) {
    return false;
  }
  const void* const data = living->_mutable_data_ptr_no_checks().get();
  // Memory of the CPU allocator that the tap does not know is older than the tap: a storage that came
  // to be seen. But one that Python made goes past the tap (torch.UntypedStorage(n), and so
  // copy.deepcopy, torch.load), and has an object of Python's: an old one is watched.
  const bool is_the_taps = living->device_type() == c10::kCPU &&
                           zbp_tap_feeds(living->allocator()) &&
                           living->pyobj_slot()->load_pyobj() == nullptr;
  memory_out->address = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(data));
  const bool has_memory =
      data || living->device_type() == c10::kMeta;  // else it was given up: release.cpp
  memory_out->bytes =
      has_memory ? static_cast<uint64_t>(living->sym_nbytes().maybe_as_int().value_or(0)) : 0;
  memory_out->device_type = static_cast<int8_t>(living->device().type());
  memory_out->device_index = living->device().index();
  memory_out->is_foreign = living->device_type() != c10::kMeta && !is_the_taps;
  return true;
}

void zbp_storage_watch(const void* storage) {
  auto* const impl = static_cast<c10::StorageImpl*>(const_cast<void*>(storage));
  zbp_tap_adopt_storage(impl);
  c10::raw::weak_intrusive_ptr::incref(impl);
}

void zbp_storage_unwatch(const void* storage) {
  c10::raw::weak_intrusive_ptr::decref(static_cast<c10::StorageImpl*>(const_cast<void*>(storage)));
}
