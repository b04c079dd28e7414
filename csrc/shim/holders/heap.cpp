#include "shim/holders/heap.h"

#include <algorithm>
#include <cstring>
#include <new>

#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "shim/torch/nodes.h"
#include "shim/torch/python.h"
#include "shim/work/targets.h"

namespace zbp {

namespace {

constexpr int64_t OURS = 1;  // the heap's own reference to what is libtorch's

/// The core's statuses: there is no memory left, or not room enough for so many.
void check(int status) {
  if (status != ZBP_OK) {
    throw std::bad_alloc();
  }
}

}  // namespace

Heap::Heap(zbp_group_access groups, PyTypeObject* work, PyTypeObject* array)
    : groups_(groups), array_(array), types_(groups.type, work, array) {
  zbp_heap_init(&graph_, nullptr);
}

bool Heap::is_torchs(PyObject* object) const {
  const Type type = types_.of(object);
  return type == Type::tensor || type == Type::storage || type == Type::cpp_node ||
         type == Type::py_node;
}

/// False if the object is of no interest.
bool Heap::resolve(PyObject* object, Thing* thing, const void** key) const {
  const Type type = types_.of(object);
  *thing = Thing::python;
  *key = object;
  switch (type) {
    case Type::skipped:
      return false;
    case Type::tensor: {
      const at::Tensor& tensor = THPVariable_Unpack(object);
      if (tensor.defined()) {
        *thing = Thing::tensor;
        *key = tensor.unsafeGetTensorImpl();
      }
      return true;
    }
    case Type::storage:
      if (const auto& storage = THPStorage_Unpack(object)) {
        *thing = Thing::storage;
        *key = storage.unsafeGetStorageImpl();
      }
      return true;
    case Type::cpp_node:
      if (const auto& node = reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata) {
        *thing = Thing::node;
        *key = node.get();
      }
      return true;
    case Type::py_node:
      if (const auto node = lock_py_node(reinterpret_cast<THPFunction*>(object)->cdata)) {
        *thing = Thing::node;
        *key = &original_of(*node);
      }
      return true;
    case Type::group:
      *thing = Thing::group;
      return true;
    case Type::work:
    case Type::saved:
    case Type::array:
    case Type::capsule:
    case Type::script:
      return true;
    case Type::script_module:
    case Type::plain:
      break;
  }
  return PyObject_IS_GC(object) != 0;
}

bool Heap::resolve(const Reference& reference, Thing* thing, const void** key) const {
  *thing = reference.thing;
  *key = reference.key;
  return !reference.counts_python ||
         resolve(static_cast<PyObject*>(const_cast<void*>(reference.key)), thing, key);
}

void Heap::ignore(PyObject* object) {
  check(zbp_heap_ignore(&graph_, object));
}

namespace {

/// Null if the object is being destroyed: its last reference has gone, and the thread that let it go waits for the
/// GIL, to let go of the Python object.
template <class Ref, class Weak, class Object>
Ref lock(Object* object) {
  Weak weak = Weak::reclaim(object);
  Ref strong = weak.lock();
  weak.release();
  return strong;
}

}  // namespace

/// Sees to it that the object lives as long as this heap; false if it is dying.
bool Heap::own(Thing thing, const void* key) {
  void* const object = const_cast<void*>(key);
  switch (thing) {
    case Thing::tensor: {
      auto ref =
          lock<TensorRef, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>>(
              static_cast<c10::TensorImpl*>(object));
      return ref && (tensors_.push_back(std::move(ref)), true);
    }
    case Thing::storage: {
      auto ref = lock<StorageRef, c10::weak_intrusive_ptr<c10::StorageImpl>>(
          static_cast<c10::StorageImpl*>(object));
      return ref && (storages_.push_back(std::move(ref)), true);
    }
    case Thing::node: {
      auto ref = lock_node(*static_cast<Node*>(object));
      return ref && (nodes_.push_back(std::move(ref)), true);
    }
    case Thing::python:
    case Thing::group:
      break;
  }
  return true;
}

uint32_t Heap::meet(const Reference& reference, uint32_t parent) {
  Thing thing{};
  const void* key = nullptr;
  if (!resolve(reference, &thing, &key)) {
    return none;
  }
  const bool is_to_be_owned = thing != Thing::python && thing != Thing::group;
  if (is_to_be_owned && !zbp_heap_knows(&graph_, key) && !own(thing, key)) {
    return none;
  }
  uint32_t v = none;
  bool added = false;
  check(zbp_heap_meet(&graph_, key, static_cast<uint8_t>(thing), parent, reference.counts_python,
                      &v, &added));
  if (added && thing == Thing::python &&
      types_.of(static_cast<PyObject*>(const_cast<void*>(key))) == Type::work) {
    works_.push_back(v);
  }
  return v;
}

uint32_t Heap::add_root(PyObject* object) {
  return meet({Thing::python, object, nullptr, -1, true}, none);
}

void Heap::add_script_of(PyObject* module) {
  const auto add = [this](PyObject* object) {
    if (types_.of(object) == Type::script) {
      add_root(object);
    }
  };
  python_references(module, [&](const Reference& reference) {
    auto* const held = static_cast<PyObject*>(const_cast<void*>(reference.key));
    add(held);
    PyObject* value = nullptr;
    for (Py_ssize_t at = 0; PyDict_CheckExact(held) && PyDict_Next(held, &at, nullptr, &value);) {
      add(value);
    }
  });
}

void Heap::add_held(uint32_t vertex, PyObject* held) {
  held_[vertex].push_back(held);
}

uint32_t Heap::find(const Reference& reference) const {
  Thing thing{};
  const void* key = nullptr;
  return resolve(reference, &thing, &key) ? zbp_heap_find(&graph_, key) : none;
}

void Heap::explore() {
  for (uint32_t v = none; zbp_heap_next(&graph_, &v);) {
    for_each_reference(v, [&](const Reference& reference) { meet(reference, v); });
  }
}

/// What nobody can see into goes: it may hold tensors, or memory that is not torch's. Numbers and words, and what is
/// torch's of the kind (a dtype, a device) do not.
void Heap::note_opaque(PyObject* object) {
  const bool is_atom = PyLong_Check(object) || PyUnicode_Check(object) || PyFloat_Check(object) ||
                       PyComplex_Check(object) || PyCode_Check(object) ||
                       std::strncmp(Py_TYPE(object)->tp_name, "torch.", std::strlen("torch.")) == 0;
  if (!is_atom && Py_REFCNT(object) == 1) {
    note_unseen(std::string("what objects of type ") + Py_TYPE(object)->tp_name + " hold");
  }
}

void Heap::let_go(std::vector<uint32_t> dying, c10::function_ref<void(uint32_t)> visit) {
  std::vector<bool> goes(size());
  for (const uint32_t v : dying) {
    goes[v] = true;
  }
  std::vector<uint32_t> met;
  std::vector<PyObject*> skipped;
  while (!dying.empty()) {
    const uint32_t v = dying.back();
    dying.pop_back();
    visit(v);
    met.clear();
    skipped.clear();
    for_each_reference(v, [&](const Reference& reference) {
      if (const uint32_t to = meet(reference, v); to != none) {
        met.push_back(to);
      } else if (reference.counts_python) {
        skipped.push_back(static_cast<PyObject*>(const_cast<void*>(reference.key)));
      }
    });
    // Not before: who tells of references may hold some of its own meanwhile.
    std::for_each(skipped.begin(), skipped.end(), [this](PyObject* one) { note_opaque(one); });
    if (PyObject* object = thing(v) == Thing::python ? object_of(v) : nullptr;
        object && types_.of(object) == Type::array) {
      note_opaque(object);
    }
    goes.resize(size());
    for (const uint32_t to : met) {
      if (!goes[to] && unexplained(to, /*listed=*/false) <= 0) {
        goes[to] = true;
        dying.push_back(to);
      }
    }
  }
}

void Heap::explore_autograd() {
  for (uint32_t v = none; zbp_heap_next(&graph_, &v);) {
    if (thing(v) == Thing::python && types_.of(object_of(v)) != Type::script) {
      continue;
    }
    for_each_reference(v, [&](const Reference& reference) {
      if (!reference.counts_python) {
        meet(reference, v);
      }
    });
  }
}

void Heap::for_each_reference(uint32_t v, Visit visit) {
  void* const key = const_cast<void*>(this->key(v));
  switch (thing(v)) {
    case Thing::python:
#if PY_VERSION_HEX < 0x030B0000
      // A running frame: only here it tells its variables to who traverses it, those too that are left out of held_.
      if (held_.count(v)) {
        break;
      }
#endif
      python_references(static_cast<PyObject*>(key), visit);
      break;
    case Thing::tensor:
      tensor_references(*static_cast<c10::TensorImpl*>(key), visit);
      break;
    case Thing::node:
      node_references(*static_cast<Node*>(key), visit);
      break;
    case Thing::group:
      group_references(static_cast<PyObject*>(key), visit);
      break;
    case Thing::storage:
      break;
  }
  if (!held_.empty()) {
    if (const auto held = held_.find(v); held != held_.end()) {
      for (PyObject* object : held->second) {
        visit({Thing::python, object, nullptr, -1, true});
      }
    }
  }
}

PyObject* Heap::object_of(uint32_t v) const {
  void* const key = const_cast<void*>(this->key(v));
  switch (thing(v)) {
    case Thing::tensor:
      return static_cast<c10::TensorImpl*>(key)->pyobj_slot()->load_pyobj();
    case Thing::storage:
      return static_cast<c10::StorageImpl*>(key)->pyobj_slot()->load_pyobj();
    case Thing::node:
      return nullptr;
    case Thing::python:
    case Thing::group:
      break;
  }
  return static_cast<PyObject*>(key);
}

/// Without the heap's own reference to what is libtorch's.
zbp_counts Heap::counts(uint32_t v) const {
  void* const key = const_cast<void*>(this->key(v));
  zbp_counts counts{};
  PyObject* object = object_of(v);
  counts.has_native = counts.python_owns = counts.native_owns = true;
  switch (thing(v)) {
    case Thing::tensor:
      counts.native = static_cast<int64_t>(
          c10::raw::intrusive_ptr::use_count(static_cast<c10::TensorImpl*>(key)));
      break;
    case Thing::storage:
      counts.native = static_cast<int64_t>(
          c10::raw::intrusive_ptr::use_count(static_cast<c10::StorageImpl*>(key)));
      break;
    case Thing::node: {
      Node& node = *static_cast<Node*>(key);
      object = python_object_of(node);
      counts.native = static_cast<int64_t>(ref_of(node).use_count()) - 1;  // without this one
      if (!NODES_KEEP_PYTHON_OBJECTS) {
        counts.native_owns = is_python_function(node);
        counts.python_owns = !counts.native_owns;
      }
      break;
    }
    case Thing::python:
    case Thing::group:
      counts.has_native = false;
      break;
  }
  counts.native -= OURS;
  counts.has_python = object != nullptr;
  counts.python = object ? static_cast<int64_t>(Py_REFCNT(object)) : 0;
  return counts;
}

int64_t Heap::unexplained(uint32_t v, bool listed, bool native_only) const {
  zbp_counts of_v = counts(v);
  of_v.python -= listed ? 1 : 0;
  return zbp_heap_unexplained(&graph_, v, of_v, native_only);
}

}  // namespace zbp
