#include "shim/heap.h"

#include <cstring>
#include <string_view>
#include <typeinfo>

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include "shim/group.h"
#include "shim/kinds.h"
#include "shim/python.h"

namespace zbp {

using torch::autograd::SavedVariable;

namespace {

constexpr uint32_t IGNORED = UINT32_MAX;

struct NodeAccess : Node {
  static const torch::autograd::AnomalyMetadata* anomaly_of(const Node& node) {
    return (node.*(&NodeAccess::anomaly_metadata_)).get();
  }
};

/// libtorch_python hides the type information of its hooks: they are told by name.
bool is_named(const std::type_info& type, const char* name) {
  return std::strcmp(type.name(), name) == 0;
}

/// Ours hold nothing.
bool is_ours(const std::type_info& type) {
  return std::strstr(type.name(), "3zbp") != nullptr;
}

/// The dictionary of a Python hook; null for a C++ hook.
PyObject* dict_of(const torch::autograd::FunctionPreHook& hook) {
  using torch::autograd::PyFunctionPreHook;
  using torch::autograd::PyFunctionTensorPreHook;
  if (is_named(typeid(hook), "N5torch8autograd23PyFunctionTensorPreHookE")) {
    return static_cast<const PyFunctionTensorPreHook&>(hook).dict;
  }
  if (is_named(typeid(hook), "N5torch8autograd17PyFunctionPreHookE")) {
    return static_cast<const PyFunctionPreHook&>(hook).dict;
  }
  return nullptr;
}

PyObject* dict_of(const torch::autograd::FunctionPostHook& hook) {
  return is_named(typeid(hook), "N5torch8autograd18PyFunctionPostHookE")
             ? static_cast<const torch::autograd::PyFunctionPostHook&>(hook).dict
             : nullptr;
}

PyObject* dict_of(const torch::autograd::PostAccumulateGradHook& hook) {
  return is_named(typeid(hook), "N5torch8autograd32PyFunctionTensorPostAccGradHooksE")
             ? static_cast<const torch::autograd::PyFunctionTensorPostAccGradHooks&>(hook).dict
             : nullptr;
}

bool is_compressed(c10::Layout layout) {
  return layout == c10::kSparseCsr || layout == c10::kSparseCsc || layout == c10::kSparseBsr ||
         layout == c10::kSparseBsc;
}

struct Traversal {
  Visit visit;
};

int visit_referent(PyObject* object, void* traversal) {
  static_cast<Traversal*>(traversal)->visit({Thing::python, object, nullptr, -1, true});
  return 0;
}

void visit_tensor(const at::Tensor& tensor, const char* label, int32_t index, Visit visit) {
  if (tensor.defined()) {
    visit({Thing::tensor, tensor.unsafeGetTensorImpl(), label, index, false});
  }
}

void visit_node(const Node* node, const char* label, int32_t index, Visit visit) {
  if (node) {
    visit({Thing::node, node, label, index, false});
  }
}

template <class Hooks>
bool visit_hooks(const Hooks& hooks, const char* label, Visit visit) {
  bool all = true;
  int32_t index = 0;
  for (const auto& hook : hooks) {
    if (PyObject* dict = hook ? dict_of(*hook) : nullptr) {
      visit({Thing::python, dict, label, index, true});
    } else if (hook && !is_ours(typeid(*hook))) {
      all = false;
    }
    ++index;
  }
  return all;
}

PyTypeObject* as_type(PyObject* object) {
  return reinterpret_cast<PyTypeObject*>(object);
}

}  // namespace

Heap::Heap(zbp_group_access groups, PyTypeObject* work) : groups_(groups), work_(work) {
  zbp_map_init(&map_, nullptr);
}

Heap::Type Heap::type_of(PyObject* object) const {
  PyTypeObject* const type = Py_TYPE(object);
  constexpr unsigned long atoms =
      Py_TPFLAGS_UNICODE_SUBCLASS | Py_TPFLAGS_LONG_SUBCLASS | Py_TPFLAGS_BYTES_SUBCLASS;
  if ((type->tp_flags & (atoms | Py_TPFLAGS_HAVE_GC)) != Py_TPFLAGS_HAVE_GC &&
      (type->tp_flags & atoms)) {
    return Type::skipped;
  }
  const auto known = types_.find(type);
  if (known != types_.end()) {
    return known->second;
  }
  const auto is = [&](PyTypeObject* base) { return base && PyType_IsSubtype(type, base); };
  Type result = type->tp_flags & Py_TPFLAGS_HAVE_GC ? Type::plain : Type::skipped;
  if (is(as_type(THPVariableClass))) {
    result = Type::tensor;
  } else if (is(THPStorageClass)) {
    result = Type::storage;
  } else if (is(&THPFunctionType)) {
    result = Type::py_node;
  } else if (torch::autograd::THPCppFunction_Check(object)) {
    result = Type::cpp_node;
  } else if (type == groups_.type) {
    result = Type::group;
  } else if (is(work_)) {
    result = Type::work;
  }
  types_.emplace(type, result);
  return result;
}

bool Heap::is_torchs(PyObject* object) const {
  const Type type = type_of(object);
  return type != Type::skipped && type != Type::plain && type != Type::group && type != Type::work;
}

/// False if the object is of no interest.
bool Heap::resolve(PyObject* object, Thing* thing, const void** key) const {
  const Type type = type_of(object);
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
        *key = static_cast<const Node*>(node.get());
      }
      return true;
    case Type::group:
      *thing = Thing::group;
      return true;
    case Type::work:
      return true;
    case Type::plain:
      break;
  }
  return PyObject_IS_GC(object) != 0;
}

void Heap::ignore(PyObject* object) {
  uint32_t value = 0;
  if (zbp_map_add(&map_, object, IGNORED, &value, nullptr) != ZBP_OK) {
    throw std::bad_alloc();
  }
}

uint32_t Heap::meet(const Reference& reference, uint32_t parent) {
  Thing thing = reference.thing;
  const void* key = reference.key;
  if (reference.counts_python &&
      !resolve(static_cast<PyObject*>(const_cast<void*>(reference.key)), &thing, &key)) {
    return none;
  }
  uint32_t v = 0;
  bool added = false;
  if (zbp_map_add(&map_, key, size(), &v, &added) != ZBP_OK) {
    throw std::bad_alloc();
  }
  if (v == IGNORED) {
    return none;
  }
  if (added) {
    vertex_.push_back({key, parent, 0, 0, thing});
    if (work_ && thing == Thing::python &&
        type_of(static_cast<PyObject*>(const_cast<void*>(key))) == Type::work) {
      works_.push_back(v);
    }
  }
  if (parent != none) {
    ++(reference.counts_python ? vertex_[v].python_refs : vertex_[v].native_refs);
  }
  return v;
}

uint32_t Heap::add_root(PyObject* object) {
  return meet({Thing::python, object, nullptr, -1, true}, none);
}

void Heap::add_held(uint32_t vertex, PyObject* held) {
  held_[vertex].push_back(held);
}

uint32_t Heap::find(Thing /*thing*/, const void* key) const {
  uint32_t v = 0;
  return zbp_map_find(&map_, key, &v) ? v : none;
}

uint32_t Heap::find(PyObject* object) const {
  Thing thing{};
  const void* key = nullptr;
  return resolve(object, &thing, &key) ? find(thing, key) : none;
}

void Heap::explore(std::vector<std::pair<uint32_t, uint32_t>>* edges) {
  for (; explored_ < size(); ++explored_) {
    const uint32_t v = explored_;
    for_each_reference(v, [&](const Reference& reference) {
      const uint32_t to = meet(reference, v);
      if (edges && to != none) {
        edges->emplace_back(v, to);
      }
    });
  }
}

void Heap::explore_autograd() {
  for (; explored_ < size(); ++explored_) {
    const uint32_t v = explored_;
    if (at(v).thing == Thing::python) {
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
  const Vertex vertex = vertex_[v];
  void* const key = const_cast<void*>(vertex.key);
  switch (vertex.thing) {
    case Thing::python:
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

void Heap::python_references(PyObject* object, Visit visit) {
  if (PyObject_IS_GC(object) && Py_TYPE(object)->tp_traverse) {
    Traversal traversal{visit};
    Py_TYPE(object)->tp_traverse(object, &visit_referent, &traversal);
  }
  if (type_of(object) == Type::py_node) {
    int32_t index = 0;
    for (const SavedVariable& saved : reinterpret_cast<THPFunction*>(object)->saved_variables) {
      saved_reference(saved, "saved tensor", index++, visit);
    }
  }
}

void Heap::tensor_references(const c10::TensorImpl& tensor, Visit visit) {
  if (tensor.has_storage()) {
    if (c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl()) {
      visit({Thing::storage, storage, "storage", -1, false});
    }
  } else if (tensor.layout() == c10::kSparse) {
    const auto& sparse = static_cast<const at::SparseTensorImpl&>(tensor);
    visit_tensor(sparse.indices(), "indices", -1, visit);
    visit_tensor(sparse.values(), "values", -1, visit);
  } else if (is_compressed(tensor.layout())) {
    const auto& sparse = static_cast<const at::SparseCsrTensorImpl&>(tensor);
    visit_tensor(sparse.compressed_indices(), "compressed indices", -1, visit);
    visit_tensor(sparse.plain_indices(), "plain indices", -1, visit);
    visit_tensor(sparse.values(), "values", -1, visit);
  } else if (!tensor.key_set().has(c10::DispatchKey::Python)) {
    note_unseen("tensors of an opaque kind (functorch wrappers, oneDNN)");
  }
  if (PyObject* object = tensor.pyobj_slot()->load_pyobj()) {
    python_references(object, visit);
  }
  const auto* meta = static_cast<torch::autograd::AutogradMeta*>(tensor.autograd_meta());
  if (!meta) {
    return;
  }
  visit_node(meta->grad_fn_.get(), "grad_fn", -1, visit);
  visit_tensor(meta->grad_, "grad", -1, visit);
  if (!visit_hooks(meta->hooks_, "tensor hooks", visit) || meta->cpp_hooks_list_) {
    note_unseen("tensors with C++ hooks");
  }
  if (const auto& hook = meta->post_acc_grad_hooks_) {
    if (PyObject* dict = dict_of(*hook)) {
      visit({Thing::python, dict, "post-accumulate hooks", -1, true});
    } else {
      note_unseen("tensors with C++ hooks");
    }
  }
  if (meta->is_view_) {
    const auto& view = static_cast<const torch::autograd::DifferentiableViewMeta&>(*meta);
    if (view.has_bw_view()) {
      visit_tensor(view.get_backward_view().base_, "base of the view", -1, visit);
    }
    if (view.has_fw_view() && !view.shared_view_info()) {
      visit_tensor(view.get_forward_view().base_, "base of the view", -1, visit);
    }
  }
  if (meta->fw_grad_ && meta->fw_grad_->contains(0)) {
    visit_tensor(meta->fw_grad_->value(0), "forward gradient", -1, visit);
  }
}

void Heap::saved_reference(const SavedVariable& saved, const char* name, int32_t index,
                           Visit visit) {
  if (!saved.has_hooks()) {
    if (const auto data = saved.get_raw_data()) {
      visit_tensor(*data, name, index, visit);
    }
    return;
  }
  // What Python hooks have packed; the hooks are not run.
  const auto packed = saved.retrieve_unpack_hook_data();
  if (!packed) {
    note_unseen("saved tensors that C++ hooks have packed");
    return;
  }
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  visit({Thing::python, packed->second.ptr(interpreter), name, index, true});
  visit({Thing::python, packed->first.ptr(interpreter), name, index, true});
}

/// By the getters that libtorch gives nodes for Python. They are called on a stand-in for the Python object:
/// a real one, once made, would stay with the node.
const Heap::Getters& Heap::getters_of(const Node& node) {
  const auto [it, added] = getters_.try_emplace(typeid(node).name());
  Getters& getters = it->second;
  if (!added || !is_generated(node)) {
    return getters;
  }
  THPObjectPtr module(PyImport_ImportModule("torch._C"));
  THPObjectPtr functions(module ? PyObject_GetAttrString(module, "_functions") : nullptr);
  THPObjectPtr type(functions ? PyObject_GetAttrString(functions, node.name().c_str()) : nullptr);
  if (!type || !PyType_Check(type.get())) {
    PyErr_Clear();
    note_unseen("what nodes of type " + node.name() + " have saved");
    return getters;
  }
  getters.type = as_type(type.get());  // static: lives as long as the process
  for (const PyGetSetDef* def = getters.type->tp_getset; def && def->name; ++def) {
    if (std::string_view(def->name).substr(0, 11) == "_raw_saved_") {
      getters.saved.push_back(def);
    }
  }
  return getters;
}

void Heap::node_references(Node& node, Visit visit) {
  int32_t index = 0;
  for (const Edge& edge : node.next_edges()) {
    visit_node(edge.function.get(), "next node", index++, visit);
  }
  bool all_hooks = visit_hooks(node.pre_hooks(), "pre hooks", visit);
  all_hooks = visit_hooks(node.tensor_pre_hooks(), "tensor hooks", visit) && all_hooks;
  all_hooks = visit_hooks(node.post_hooks(), "post hooks", visit) && all_hooks;
  if (!all_hooks) {
    note_unseen("nodes with C++ hooks");
  }
  if (const auto* anomaly = NodeAccess::anomaly_of(node);
      anomaly && is_named(typeid(*anomaly), "N5torch8autograd17PyAnomalyMetadataE")) {
    auto* python = static_cast<torch::autograd::PyAnomalyMetadata*>(
        const_cast<torch::autograd::AnomalyMetadata*>(anomaly));
    visit({Thing::python, python->dict(), "metadata", -1, true});
  }
  // Held by a thread that runs the node.
  const std::unique_lock<std::mutex> lock(NodeParts::mutex_of(node), std::try_to_lock);
  if (!lock.owns_lock()) {
    note_unseen("nodes that were running");
    return;
  }
  if (auto* accumulator = as<torch::autograd::AccumulateGrad>(node)) {
    visit_tensor(accumulator->variable, "its leaf", -1, visit);
    return;
  }
  if (auto* slices = as<torch::autograd::CopySlices>(node)) {
    visit_node(slices->fn.get(), "inner node", -1, visit);
    return;
  }
  if (is_python_function(node)) {
    THPObjectPtr object(torch::autograd::functionToPyObject(ref_of(node)));
    if (object) {
      python_references(object, visit);
    }
    PyErr_Clear();
    return;
  }
  if (std::strstr(typeid(node).name(), "CppNode")) {
    note_unseen("what nodes of C++ Functions have saved");
    return;
  }
  const Getters& getters = getters_of(node);
  if (getters.saved.empty()) {
    return;
  }
  torch::autograd::THPCppFunction stand_in{};
  stand_in.ob_base.ob_refcnt = 1;
  stand_in.ob_base.ob_type = getters.type;
  stand_in.cdata = ref_of(node);
  for (const PyGetSetDef* def : getters.saved) {
    THPObjectPtr value(def->get(reinterpret_cast<PyObject*>(&stand_in), def->closure));
    if (!value) {  // a list that a backward has released
      PyErr_Clear();
      continue;
    }
    const char* name = def->name + 5;  // without "_raw_"
    const auto visit_saved = [&](PyObject* item, int32_t i) {
      if (item != Py_None) {
        saved_reference(*py::cast<SavedVariable*>(py::handle(item)), name, i, visit);
      }
    };
    if (!PyTuple_Check(value.get())) {
      visit_saved(value, -1);
      continue;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value.get()); ++i) {
      visit_saved(PyTuple_GET_ITEM(value.get(), i), static_cast<int32_t>(i));
    }
  }
}

void Heap::group_references(PyObject* object, Visit visit) {
  const zbp_group* handle = groups_.get(object);
  if (handle->running) {
    note_unseen("parameter groups whose weight pass was running");
    return;
  }
  const Group& group = *handle->group;
  int32_t index = 0;
  for (const Task& task : group.tasks) {
    visit_node(task.node.get(), "weight task", index, visit);
    for (const Face& face : task.face) {
      visit_node(face.edge.function.get(), "weight face of task", index, visit);
    }
    visit_tensor(task.other.tensor(), "matrix of weight task", index, visit);
    for (const Watched& grad : task.output_grads) {
      visit_tensor(grad.tensor(), "output gradient of weight task", index, visit);
    }
    for (const Watched& kept : task.kept) {
      visit_tensor(kept.tensor(), "kept gradient of weight task", index, visit);
    }
    for (const Watched& saved : task.saved) {
      visit_tensor(saved.tensor(), "saved tensor of weight task", index, visit);
    }
    if (task.packed) {
      c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
      visit({Thing::python, task.packed->data.ptr(interpreter), "packed matrix of weight task",
             index, true});
      visit({Thing::python, task.packed->unpack_hook.ptr(interpreter),
             "packed matrix of weight task", index, true});
    }
    ++index;
  }
  index = 0;
  for (const Weight& weight : group.weights) {
    visit_node(weight.accumulator.get(), "accumulator", index, visit);
    visit_tensor(weight.grad, "waiting gradient", index, visit);
    visit_tensor(weight.main_grad, "main gradient", index, visit);
    ++index;
  }
}

PyObject* Heap::object_of(uint32_t v) const {
  const Vertex& vertex = vertex_[v];
  void* const key = const_cast<void*>(vertex.key);
  switch (vertex.thing) {
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

namespace {

/// Of a libtorch object and its Python object, which owns it once; it owns the Python object once as long
/// as others hold it too.
int64_t unexplained_of(int64_t native, int64_t native_refs, PyObject* object, int64_t python_refs,
                       int64_t listed) {
  if (!object) {
    return native - native_refs;
  }
  const int64_t python = Py_REFCNT(object) - (native > 1 ? 1 : 0);
  return std::max<int64_t>(native - 1 - native_refs, 0) +
         std::max<int64_t>(python - python_refs - listed, 0);
}

int64_t unexplained_of_node(Node& node, const Heap::Vertex& vertex, bool listed) {
  const int64_t count = static_cast<int64_t>(ref_of(node).use_count()) - 1;  // without this one
  PyObject* const object = python_object_of(node);
  if (NODES_KEEP_PYTHON_OBJECTS || !object) {
    return unexplained_of(count, vertex.native_refs, object, vertex.python_refs, listed);
  }
  const int64_t python = Py_REFCNT(object) - vertex.python_refs - (listed ? 1 : 0);
  const bool owned = is_python_function(node);
  return std::max<int64_t>(count - vertex.native_refs - (owned ? 0 : 1), 0) +
         std::max<int64_t>(python - (owned ? 1 : 0), 0);
}

}  // namespace

int64_t Heap::unexplained(uint32_t v, bool listed) const {
  const Vertex& vertex = vertex_[v];
  void* const key = const_cast<void*>(vertex.key);
  switch (vertex.thing) {
    case Thing::tensor: {
      const auto* tensor = static_cast<c10::TensorImpl*>(key);
      const auto count = c10::raw::intrusive_ptr::use_count(const_cast<c10::TensorImpl*>(tensor));
      return unexplained_of(static_cast<int64_t>(count), vertex.native_refs, object_of(v),
                            vertex.python_refs, listed);
    }
    case Thing::storage: {
      const auto count = c10::raw::intrusive_ptr::use_count(static_cast<c10::StorageImpl*>(key));
      return unexplained_of(static_cast<int64_t>(count), vertex.native_refs, object_of(v),
                            vertex.python_refs, 0);
    }
    case Thing::node:
      return unexplained_of_node(*static_cast<Node*>(key), vertex, listed);
    case Thing::python:
    case Thing::group:
      break;
  }
  return Py_REFCNT(static_cast<PyObject*>(key)) - vertex.python_refs - (listed ? 1 : 0);
}

}  // namespace zbp
