// What a thing of libtorch's holds.
#include "instruments/shim/handle.h"

#include <cstring>
#include <mutex>
#include <typeinfo>

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include "shim/torch/nodes.h"
#include "shim/torch/names.h"
#include "shim/torch/python.h"
#include "shim/torch/saved_parts.h"

using namespace zbp;

namespace {

/// Ours hold nothing.
bool is_ours(const std::type_info& type) {
  return std::strstr(type.name(), "3zbp") != nullptr;
}

/// The dictionary of a Python hook; null for a C++ hook.
PyObject* dict_of(const torch::autograd::FunctionPreHook& hook) {
  using torch::autograd::PyFunctionPreHook;
  using torch::autograd::PyFunctionTensorPreHook;
  if (const auto* of_tensor = as_hidden<const PyFunctionTensorPreHook>(hook)) {
    return of_tensor->dict;
  }
  const auto* of_node = as_hidden<const PyFunctionPreHook>(hook);
  return of_node ? of_node->dict : nullptr;
}

PyObject* dict_of(const torch::autograd::FunctionPostHook& hook) {
  const auto* python = as_hidden<const torch::autograd::PyFunctionPostHook>(hook);
  return python ? python->dict : nullptr;
}

PyObject* dict_of(const torch::autograd::PostAccumulateGradHook& hook) {
  const auto* python = as_hidden<const torch::autograd::PyFunctionTensorPostAccGradHooks>(hook);
  return python ? python->dict : nullptr;
}

template <class Hooks>
bool add_hooks(const Hooks& hooks, const char* label, References& references) {
  bool all = true;
  int32_t index = 0;
  for (const auto& hook : hooks) {
    if (PyObject* dict = hook ? dict_of(*hook) : nullptr) {
      references.add(dict, label, index);
    } else if (hook && !is_ours(typeid(*hook))) {
      all = false;
    }
    ++index;
  }
  return all;
}

/// Where strides alone cannot tell the way back from a view to its base, libtorch's function for it
/// has the base too.
void add_base(const torch::autograd::ViewInfo& info, References& references) {
  references.add(info.base_, "base of the view");
  if (info.has_view_fn() && info.rev_view_fn_) {
    references.add(info.base_, "base of the view");
  }
}

/// Whether a frame is at an instruction that sets or deletes an attribute, or may call what does:
/// it names setattr, or runs the attribute's setter for a mode or a subclass.
bool may_set_attribute(PyObject* frame) {
  THPObjectPtr at(PyObject_GetAttrString(frame, "f_lasti"));
  THPObjectPtr code(PyObject_GetAttrString(frame, "f_code"));
  THPObjectPtr bytes(code ? PyObject_GetAttrString(code, "co_code") : nullptr);
  THPObjectPtr name(code ? PyObject_GetAttrString(code, "co_name") : nullptr);
  THPObjectPtr names(code ? PyObject_GetAttrString(code, "co_names") : nullptr);
  const Py_ssize_t offset = at ? PyLong_AsSsize_t(at) : -1;
  if (!bytes || !name || !names || offset < 0 || offset >= PyBytes_GET_SIZE(bytes.get())) {
    PyErr_Clear();
    return false;
  }
  const int opcode = static_cast<unsigned char>(PyBytes_AS_STRING(bytes.get())[offset]);
  bool is_named = PyUnicode_CompareWithASCIIString(name, "__torch_function__") == 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names.get()); ++i) {
    PyObject* const one = PyTuple_GET_ITEM(names.get(), i);
    is_named = is_named || PyUnicode_CompareWithASCIIString(one, "setattr") == 0 ||
               PyUnicode_CompareWithASCIIString(one, "delattr") == 0;
  }
  return is_named || opcode == attribute_opcodes()[0] || opcode == attribute_opcodes()[1];
}

/// Whether another thread of Python's may be setting or deleting an attribute.
bool others_set_attributes() {
  PyThreadState* const here = PyThreadState_Get();
  PyThreadState* thread = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(here));
  for (; thread; thread = PyThreadState_Next(thread)) {
    THPObjectPtr frame(
        thread == here ? nullptr : reinterpret_cast<PyObject*>(PyThreadState_GetFrame(thread)));
    if (frame && may_set_attribute(frame)) {
      return true;
    }
  }
  return false;
}

/// The gradient of a leaf. An engine on another thread adds to it under the lock of the leaf's
/// accumulator. A thread that says `leaf.grad = None` gives the GIL away, and frees the gradient
/// before the leaf lets go of it: beside one that sets an attribute, only a gradient that a handle
/// owns is followed. False if it was not.
bool add_grad(torch::autograd::AutogradMeta& meta, References& references) {
  // Who makes a view's node anew holds it, and may run a subclass's Python code meanwhile.
  std::unique_lock<std::mutex> lock(meta.mutex_, std::try_to_lock);
  if (!lock) {
    return false;
  }
  const NodePtr accumulator = meta.grad_accumulator_.lock();
  lock.unlock();
  if (accumulator) {
    lock = std::unique_lock<std::mutex>(NodeParts::mutex_of(*accumulator), std::try_to_lock);
    if (!lock.owns_lock()) {
      return false;
    }
  }
  if (meta.grad_.defined() && !is_owned(meta.grad_.unsafeGetTensorImpl()) &&
      others_set_attributes()) {
    return false;
  }
  references.add(meta.grad_, "grad");
  return true;
}

void add_saved(const SavedVariable& saved, const char* name, int32_t index,
               References& references) {
  references.add(history_of(saved), name, index);
  references.add(accumulator_of(saved), name, index);
  if (!saved.has_hooks()) {
    if (const auto data = saved.get_raw_data()) {
      references.add(*data, name, index);
    }
    return;
  }
  // What Python hooks have packed; the hooks are not run.
  const auto packed = saved.retrieve_unpack_hook_data();
  if (!packed) {
    references.add_unseen("saved tensors that C++ hooks have packed");
    return;
  }
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  references.add(packed->second.ptr(interpreter), name, index);
  references.add(packed->first.ptr(interpreter), name, index);
  references.add(pack_hook_of(saved), name, index);
}

void add_references(const c10::TensorImpl& tensor, References& references) {
  references.add(storage_in(tensor), "storage");
  bool has_components = false;
  for_each_component(tensor, [&](const at::Tensor& component, const char* label) {
    has_components = true;
    references.add(component, label);
  });
  if (!tensor.has_storage() && !has_components && !tensor.key_set().has(c10::DispatchKey::Python)) {
    references.add_unseen("tensors of an opaque kind (functorch wrappers, oneDNN)");
  }
  auto* meta = static_cast<torch::autograd::AutogradMeta*>(
      const_cast<c10::TensorImpl&>(tensor).autograd_meta());
  if (!meta) {
    return;
  }
  references.add(meta->grad_fn_.get(), "grad_fn");
  if (!add_grad(*meta, references)) {
    references.add_unseen("gradients that another thread may be changing");
  }
  if (!add_hooks(meta->hooks_, "tensor hooks", references) || meta->cpp_hooks_list_) {
    references.add_unseen("tensors with C++ hooks");
  }
  if (const auto& hook = meta->post_acc_grad_hooks_) {
    if (PyObject* dict = dict_of(*hook)) {
      references.add(dict, "post-accumulate hooks");
    } else {
      references.add_unseen("tensors with C++ hooks");
    }
  }
  if (meta->is_view_) {
    const auto& view = static_cast<const torch::autograd::DifferentiableViewMeta&>(*meta);
    if (view.has_bw_view()) {
      add_base(view.get_backward_view(), references);
    }
    if (view.has_fw_view() && !view.shared_view_info()) {
      add_base(view.get_forward_view(), references);
    }
  }
  if (meta->fw_grad_ && meta->fw_grad_->contains(0)) {
    references.add(meta->fw_grad_->value(0), "forward gradient");
  }
}

/// Of a node that no thread runs.
void add_contents(Node& node, References& references) {
  if (auto* accumulator = as_accumulator(node)) {
    references.add(accumulator->variable, "its leaf");
  } else if (auto* slices = as<torch::autograd::CopySlices>(node)) {
    references.add(slices->fn.get(), "inner node");
  } else if (is_python_function(node)) {
    THPObjectPtr object(torch::autograd::functionToPyObject(ref_of(node)));
    PyErr_Clear();
    int32_t index = 0;
    if (object) {
      for (const auto& saved : reinterpret_cast<THPFunction*>(object.get())->saved_variables) {
        add_saved(saved, "saved tensor", index++, references);
      }
    }
  } else if (is_like<torch::autograd::CppNode<int>>(node, "iEE")) {  // whatever its Function
    references.add_unseen("what nodes of C++ Functions have saved");
  } else if (is_generated(node)) {
    const auto add_one = [&](const SavedVariable& saved, const char* name, int32_t i) {
      add_saved(saved, name, i, references);
    };
    if (!for_each_saved(node, add_one)) {
      references.add_unseen("what nodes of type " + node.name() + " have saved");
    }
  }
}

void add_references(Node& node, bool passes_run, References& references) {
  if (passes_run) {
    references.add_unseen("nodes while a pass ran on another thread");
  } else {
    int32_t index = 0;
    for (const Edge& edge : node.next_edges()) {
      references.add(edge.function.get(), "next node", index++);
    }
    for (uint32_t i = 0; i < node.num_inputs(); ++i) {
      if (node.input_metadata(i).is_cpp_nested_tensor()) {
        references.add_unseen("sizes of nested tensors that nodes keep");
      }
    }
    bool all_hooks = add_hooks(node.pre_hooks(), "pre hooks", references);
    all_hooks = add_hooks(node.tensor_pre_hooks(), "tensor hooks", references) && all_hooks;
    all_hooks = add_hooks(node.post_hooks(), "post hooks", references) && all_hooks;
    if (!all_hooks) {
      references.add_unseen("nodes with C++ hooks");
    }
  }
  auto* anomaly = const_cast<torch::autograd::AnomalyMetadata*>(NodeParts::anomaly_of(node));
  if (auto* of_node = anomaly ? as_hidden<torch::autograd::PyAnomalyMetadata>(*anomaly) : nullptr) {
    references.add(of_node->dict(), "metadata");
  }
  // Held by a thread that runs the node.
  if (const std::unique_lock<std::mutex> lock(NodeParts::mutex_of(node), std::try_to_lock); lock) {
    add_contents(node, references);
  } else {
    references.add_unseen("nodes that were running");
  }
}

/// A saved variable that Python owns: a node's _raw_saved_* is the node's, and may be gone with it.
bool is_saved(PyObject* object) {
  const auto type = py::detail::get_type_handle(typeid(SavedVariable), false);
  return type && PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type.ptr())) &&
         reinterpret_cast<py::detail::instance*>(object)->owned;
}

}  // namespace

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
  } else if (const auto* functional = dynamic_cast<const at::FunctionalTensorWrapper*>(&tensor)) {
    visit_defined(functional->value(), "value");
  } else if (const auto* quantized = dynamic_cast<const at::QTensorImpl*>(&tensor)) {
    const at::QuantizerPtr quantizer = const_cast<at::QTensorImpl*>(quantized)->quantizer();
    if (const auto* channels =
            dynamic_cast<const at::PerChannelAffineQuantizer*>(quantizer.get())) {
      visit_defined(channels->scales(), "scales");
      visit_defined(channels->zero_points(), "zero points");
    }
  }
}

References::References() : list_(checked(PyList_New(0))) {}

void References::append(PyObject* held, const char* label, int32_t index, bool is_native) {
  THPObjectPtr text =
      checked(!label      ? Py_NewRef(Py_None)
              : index < 0 ? PyUnicode_FromString(label)
                          : PyUnicode_FromFormat("%s %d", label, static_cast<int>(index)));
  zbp::append(list_, PyTuple_Pack(3, held, text.get(), is_native ? Py_True : Py_False));
}

void References::add(const at::Tensor& tensor, const char* label, int32_t index) {
  add(tensor.defined() ? tensor.unsafeGetTensorImpl() : nullptr, label, index);
}

void References::add(PyObject* object, const char* label, int32_t index) {
  if (object) {
    append(object, label, index, false);
  }
}

void References::add_unseen(const std::string& what) {
  append(Py_None, what.c_str(), -1, false);
}

PyObject* zbp_references_of(PyObject* thing, const zbp_group* group, bool passes_run,
                            zbp_error* error) {
  return guarded_object(error, [&] {
    References references;
    if (const Handle* handle = as_handle(thing)) {
      if (const auto* tensor = handle->tensor()) {
        add_references(*tensor, references);
      } else if (auto* node = handle->node()) {
        add_references(*node, passes_run, references);
      } else {
        references.add(numpy_array_of(*handle->storage()), "numpy array");
      }
    } else if (group) {
      add_held_by(group, references);
    } else if (const at::Tensor* tensor = tensor_of_capsule(thing)) {
      references.add(*tensor, nullptr);
    } else if (is_saved(thing)) {
      add_saved(*py::cast<SavedVariable*>(py::handle(thing)), "saved tensor", -1, references);
    }
    return references.release();
  });
}
