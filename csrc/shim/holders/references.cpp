#include "shim/holders/things.h"

#include <cstring>
#include <exception>
#include <mutex>
#include <typeinfo>

#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <torch/csrc/PyInterpreter.h>
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

#include "shim/holders/arrays.h"
#include "shim/holders/freed.h"
#include "shim/holders/scripts.h"
#include "shim/group/group.h"
#include "shim/torch/dlpack.h"
#include "shim/torch/nodes.h"
#include "shim/torch/saved_parts.h"
#include "shim/torch/python.h"

// What a vertex of the heap holds.

namespace {

using namespace zbp;

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

/// A traversal by CPython, through whose frames nothing may be thrown.
struct Traversal {
  Visit visit;
  std::exception_ptr error;
};

int visit_referent(PyObject* object, void* argument) noexcept {
  auto* traversal = static_cast<Traversal*>(argument);
  try {
    traversal->visit({ZBP_THING_PYTHON, object, nullptr, -1, true});
    return 0;
  } catch (...) {
    traversal->error = std::current_exception();
    return -1;  // ends it
  }
}

void visit_tensor(const at::Tensor& tensor, const char* label, int32_t index, Visit visit) {
  if (tensor.defined()) {
    visit({ZBP_THING_TENSOR, tensor.unsafeGetTensorImpl(), label, index, false});
  }
}

void visit_node(const Node* node, const char* label, int32_t index, Visit visit) {
  if (node) {
    visit({ZBP_THING_NODE, node, label, index, false});
  }
}

template <class Hooks>
bool visit_hooks(const Hooks& hooks, const char* label, Visit visit) {
  bool all = true;
  int32_t index = 0;
  for (const auto& hook : hooks) {
    if (PyObject* dict = hook ? dict_of(*hook) : nullptr) {
      visit({ZBP_THING_PYTHON, dict, label, index, true});
    } else if (hook && !is_ours(typeid(*hook))) {
      all = false;
    }
    ++index;
  }
  return all;
}

}  // namespace

void zbp_things::python_references(PyObject* object, Visit visit) {
  if (PyObject_IS_GC(object) && Py_TYPE(object)->tp_traverse) {
    Traversal traversal{visit, nullptr};
    Py_TYPE(object)->tp_traverse(object, &visit_referent, &traversal);
    if (traversal.error) {
      std::rethrow_exception(traversal.error);
    }
  }
  const Type type = types_.of(object);
  if (type == Type::saved) {
    saved_reference(*py::cast<SavedVariable*>(py::handle(object)), "saved tensor", -1, visit);
  } else if (type == Type::array) {
    visit_array(object, array_,
                [&](PyObject* held) { visit({ZBP_THING_PYTHON, held, nullptr, -1, true}); });
  } else if (type == Type::capsule) {
    if (const at::Tensor* tensor = tensor_of_capsule(object)) {
      visit_tensor(*tensor, nullptr, -1, visit);
    }
  } else if (type == Type::script) {
    visit_script(object,
                 [&](const at::Tensor& tensor) { visit_tensor(tensor, nullptr, -1, visit); });
  } else if (type == Type::py_node) {
    int32_t index = 0;
    for (const SavedVariable& saved : reinterpret_cast<THPFunction*>(object)->saved_variables) {
      saved_reference(saved, "saved tensor", index++, visit);
    }
  }
}

void zbp::for_each_component(const c10::TensorImpl& tensor,
                             c10::function_ref<void(const at::Tensor&, const char* label)> visit) {
  const auto visit_defined = [&](const at::Tensor& component, const char* label) {
    if (component.defined()) {
      visit(component, label);
    }
  };
  // By their types: functorch's wrappers have the layouts of what they wrap.
  if (const auto* sparse = dynamic_cast<const at::SparseTensorImpl*>(&tensor)) {
    visit_defined(sparse->indices(), "indices");
    visit_defined(sparse->values(), "values");
  } else if (const auto* csr = dynamic_cast<const at::SparseCsrTensorImpl*>(&tensor)) {
    visit_defined(csr->compressed_indices(), "compressed indices");
    visit_defined(csr->plain_indices(), "plain indices");
    visit_defined(csr->values(), "values");
  } else if (const auto* nested = dynamic_cast<const at::native::NestedTensorImpl*>(&tensor)) {
    visit_defined(nested->get_nested_sizes(), "nested sizes");
    visit_defined(nested->get_nested_strides(), "nested strides");
    visit_defined(nested->get_storage_offsets(), "nested offsets");
  } else if (const auto* quantized = dynamic_cast<const at::QTensorImpl*>(&tensor)) {
    const at::QuantizerPtr quantizer = const_cast<at::QTensorImpl*>(quantized)->quantizer();
    if (const auto* channels =
            dynamic_cast<const at::PerChannelAffineQuantizer*>(quantizer.get())) {
      visit_defined(channels->scales(), "scales");
      visit_defined(channels->zero_points(), "zero points");
    }
  }
}

namespace {

/// Where strides alone cannot tell the way back from a view to its base, libtorch's function for it has the base too.
void visit_base(const torch::autograd::ViewInfo& info, Visit visit) {
  visit_tensor(info.base_, "base of the view", -1, visit);
  if (info.has_view_fn() && info.rev_view_fn_) {
    visit_tensor(info.base_, "base of the view", -1, visit);
  }
}

/// The gradient of a leaf, which an engine on another thread adds to under the lock of the leaf's accumulator.
/// False if it is being added to or let go of.
bool visit_grad(torch::autograd::AutogradMeta& meta, Visit visit) {
  NodePtr accumulator;
  {
    const std::lock_guard<std::mutex> lock(meta.mutex_);
    accumulator = meta.grad_accumulator_.lock();
  }
  std::unique_lock<std::mutex> lock;
  if (accumulator) {
    lock = std::unique_lock<std::mutex>(NodeParts::mutex_of(*accumulator), std::try_to_lock);
    if (!lock.owns_lock()) {
      return false;
    }
  }
  if (meta.grad_.defined() && !is_gradient(meta.grad_.unsafeGetTensorImpl())) {
    return false;
  }
  visit_tensor(meta.grad_, "grad", -1, visit);
  return true;
}

}  // namespace

void zbp_things::tensor_references(const c10::TensorImpl& tensor, Visit visit) {
  if (tensor.has_storage()) {
    if (c10::StorageImpl* storage = tensor.unsafe_storage().unsafeGetStorageImpl()) {
      visit({ZBP_THING_STORAGE, storage, "storage", -1, false});
    }
  }
  bool has_components = false;
  for_each_component(tensor, [&](const at::Tensor& component, const char* label) {
    has_components = true;
    visit_tensor(component, label, -1, visit);
  });
  if (!tensor.has_storage() && !has_components && !tensor.key_set().has(c10::DispatchKey::Python)) {
    note_unseen("tensors of an opaque kind (functorch wrappers, oneDNN)");
  }
  if (PyObject* object = tensor.pyobj_slot()->load_pyobj()) {
    python_references(object, visit);
  }
  auto* meta = static_cast<torch::autograd::AutogradMeta*>(
      const_cast<c10::TensorImpl&>(tensor).autograd_meta());
  if (!meta) {
    return;
  }
  visit_node(meta->grad_fn_.get(), "grad_fn", -1, visit);
  if (!visit_grad(*meta, visit)) {
    note_unseen("gradients that another thread was changing");
  }
  if (!visit_hooks(meta->hooks_, "tensor hooks", visit) || meta->cpp_hooks_list_) {
    note_unseen("tensors with C++ hooks");
  }
  if (const auto& hook = meta->post_acc_grad_hooks_) {
    if (PyObject* dict = dict_of(*hook)) {
      visit({ZBP_THING_PYTHON, dict, "post-accumulate hooks", -1, true});
    } else {
      note_unseen("tensors with C++ hooks");
    }
  }
  if (meta->is_view_) {
    const auto& view = static_cast<const torch::autograd::DifferentiableViewMeta&>(*meta);
    if (view.has_bw_view()) {
      visit_base(view.get_backward_view(), visit);
    }
    if (view.has_fw_view() && !view.shared_view_info()) {
      visit_base(view.get_forward_view(), visit);
    }
  }
  if (meta->fw_grad_ && meta->fw_grad_->contains(0)) {
    visit_tensor(meta->fw_grad_->value(0), "forward gradient", -1, visit);
  }
}

void zbp_things::saved_reference(const SavedVariable& saved, const char* name, int32_t index,
                                 Visit visit) {
  visit_node(history_of(saved), name, index, visit);
  visit_node(accumulator_of(saved), name, index, visit);
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
  visit({ZBP_THING_PYTHON, packed->second.ptr(interpreter), name, index, true});
  visit({ZBP_THING_PYTHON, packed->first.ptr(interpreter), name, index, true});
  if (PyObject* hook = pack_hook_of(saved)) {
    visit({ZBP_THING_PYTHON, hook, name, index, true});
  }
}

void zbp_things::node_references(Node& node, Visit visit) {
  {
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
  }
  if (const auto* anomaly = NodeParts::anomaly_of(node);
      anomaly && is_named(typeid(*anomaly), "N5torch8autograd17PyAnomalyMetadataE")) {
    auto* python = static_cast<torch::autograd::PyAnomalyMetadata*>(
        const_cast<torch::autograd::AnomalyMetadata*>(anomaly));
    visit({ZBP_THING_PYTHON, python->dict(), "metadata", -1, true});
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
  const auto visit_saved = [&](const SavedVariable& saved, const char* name, int32_t i) {
    saved_reference(saved, name, i, visit);
  };
  if (is_generated(node) && !for_each_saved(node, visit_saved)) {
    note_unseen("what nodes of type " + node.name() + " have saved");
  }
}

void zbp_things::group_references(PyObject* object, Visit visit) {
  const zbp_group* handle = groups_.get(object);
  if (zbp_book_is_claimed(&handle->book)) {
    note_unseen("parameter groups whose weight pass was running");
    return;
  }
  const Group& group = group_of(handle);
  int32_t index = 0;
  for (const Task& task : group.tasks) {
    visit_node(task.node.get(), "weight task", index, visit);
    c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
    for (const Face& face : task.face) {
      visit_node(face.edge.function.get(), "weight face of task", index, visit);
      visit_tensor(face.grad.tensor(), "kept gradient of weight task", index, visit);
    }
    if (const auto* product = std::get_if<Product>(&task.work)) {
      visit_tensor(product->output_grad.tensor(), "output gradient of weight task", index, visit);
      if (const auto* matrix = std::get_if<Watched>(&product->other)) {
        visit_tensor(matrix->tensor(), "matrix of weight task", index, visit);
      } else {  // a deferred node tells of its own
        const PackedPtr& packed = std::get<PackedPtr>(product->other);
        for (PyObject* held :
             {packed->data.ptr(interpreter), packed->unpack_hook.ptr(interpreter)}) {
          visit({ZBP_THING_PYTHON, held, "packed matrix of weight task", index, true});
        }
      }
    } else if (const auto* deferred = std::get_if<Deferred>(&task.work)) {
      for (const Watched& grad : deferred->output_grads) {
        visit_tensor(grad.tensor(), "output gradient of weight task", index, visit);
      }
      for (const Watched& saved : deferred->saved) {
        visit_tensor(saved.tensor(), "saved tensor of weight task", index, visit);
      }
    }
    const auto* given = std::get_if<Given>(&task.work);
    for (size_t i = 0; given && i < given->works.size(); ++i) {
      const Work& work = given->works[i];
      if (work.call) {
        for (const auto& list : {c10::ArrayRef<Watched>(work.call->saved),
                                 c10::ArrayRef<Watched>(work.call->parameters)}) {
          for (const Watched& saved : list) {
            visit_tensor(saved.tensor(), "saved for the work of task", index, visit);
          }
        }
        visit({ZBP_THING_PYTHON, work.call->function.ptr(interpreter), "work of weight task", index,
               true});
        visit({ZBP_THING_PYTHON, work.call->arguments.ptr(interpreter),
               "saved for the work of task", index, true});
      }
      for (const Watched& grad : work.grads) {
        visit_tensor(grad.tensor(), "gradient from the work of task", index, visit);
      }
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
