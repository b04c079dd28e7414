#include "shim/torch/checkpoint.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/utils/pybind.h>

#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

/// What the object, which may be null, has under the name; null if it has nothing. No error is set.
THPObjectPtr attribute(PyObject* object, const char* name) {
  THPObjectPtr value(object ? PyObject_GetAttrString(object, name) : nullptr);
  forget_error();
  return value;
}

THPObjectPtr of_checkpoint(const char* name) {
  THPObjectPtr module(PyImport_ImportModule("torch.utils.checkpoint"));
  return attribute(module, name);
}

/// Calls `visit` with what each cell of a Python function's closure holds, until it returns true.
template <class Visit>
bool find_in_closure(PyObject* function, const Visit& visit) {
  PyObject* closure = PyFunction_Check(function) ? PyFunction_GetClosure(function) : nullptr;
  for (Py_ssize_t i = 0; closure && i < PyTuple_GET_SIZE(closure); ++i) {
    THPObjectPtr held(PyCell_Get(PyTuple_GET_ITEM(closure, i)));
    if (held && visit(held.get())) {
      return true;
    }
  }
  return false;
}

/// The first that is of the type, new; or null.
THPObjectPtr instance_in_closure(PyObject* function, PyObject* type) {
  THPObjectPtr found;
  if (function && type) {
    find_in_closure(function, [&](PyObject* held) {
      if (PyObject_IsInstance(held, type) == 1) {
        found = THPObjectPtr(Py_NewRef(held));
      }
      return static_cast<bool>(found);
    });
    forget_error();
  }
  return found;
}

/// The frame of the checkpointed region that the hook is of, or null: torch.utils.checkpoint has no
/// question for this.
THPObjectPtr frame_of(PyObject* unpack_hook) {
  return instance_in_closure(unpack_hook, of_checkpoint("_CheckpointFrame"));
}

using VisitTensor = c10::function_ref<void(const at::Tensor&)>;
using VisitSaved = c10::function_ref<void(const SavedVariable&, const NodePtr&)>;

void visit_if_tensor(PyObject* object, VisitTensor visit) {
  const at::Tensor* tensor = as_tensor(object);
  if (tensor && !(tensor->is_leaf() && tensor->requires_grad())) {
    visit(*tensor);
  }
}

/// Named arguments, and what the region's function itself has closed over.
void visit_closure(PyObject* recompute, VisitTensor visit) {
  find_in_closure(recompute, [&](PyObject* held) {
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Check(held) && PyDict_Next(held, &at, &key, &value);) {
      visit_if_tensor(value, visit);
    }
    find_in_closure(held, [&](PyObject* inner) {
      visit_if_tensor(inner, visit);
      return false;
    });
    return false;
  });
}

/// A region's frame has its arguments as saved tensors: in a list from torch 2.13 on, of a node of
/// their own before.
void for_each_saved_argument(PyObject* frame, VisitSaved visit) {
  THPObjectPtr arguments = attribute(frame, "saved_args");
  for (Py_ssize_t i = 0;
       arguments && PyList_Check(arguments.get()) && i < PyList_GET_SIZE(arguments.get()); ++i) {
    const pybind11::handle item(PyList_GET_ITEM(arguments.get(), i));
    if (pybind11::isinstance<SavedVariable>(item)) {
      visit(*pybind11::cast<SavedVariable*>(item), nullptr);
    }
  }
  THPObjectPtr saver = attribute(frame, "input_saver");
  const at::Tensor* saved_by_it = saver ? as_tensor(saver) : nullptr;
  if (const NodePtr node = saved_by_it ? saved_by_it->grad_fn() : nullptr;
      node && is_python_function(*node)) {
    for (const SavedVariable* saved : saved_by(*node)) {
      visit(*saved, node);
    }
  }
}

}  // namespace

// The frame's function for computing the region again holds, of a selective one, the mode that
// hands results out, each once. Where torch has no such mode to tell, a region may be a selective
// one.
UnpackHook recognise(PyObject* unpack_hook) {
  THPObjectPtr frame = frame_of(unpack_hook);
  if (!frame) {
    return UnpackHook::other;
  }
  THPObjectPtr mode = of_checkpoint("_CachedTorchDispatchMode");
  const bool is_selective =
      !mode || instance_in_closure(attribute(frame, "recompute_fn"), mode).get() != nullptr;
  return is_selective ? UnpackHook::selective_checkpoint : UnpackHook::checkpoint;
}

void for_each_argument(PyObject* unpack_hook, VisitTensor visit) {
  THPObjectPtr frame = frame_of(unpack_hook);
  if (!frame) {
    return;
  }
  for_each_saved_argument(frame, [&](const SavedVariable& saved, const NodePtr& saved_for) {
    if (!saved.has_hooks()) {
      visit(saved.unpack(saved_for));
    } else if (const auto data = saved.retrieve_unpack_hook_data()) {
      for_each_argument(data->first.ptr(getPyInterpreter()), visit);  // of the region around it
    }
  });
  if (THPObjectPtr recompute = attribute(frame, "recompute_fn"); recompute) {
    visit_closure(recompute, visit);
  }
}

bool is_computed_only_once(PyObject* unpack_hook) {
  if (recognise(unpack_hook) == UnpackHook::selective_checkpoint) {
    return true;
  }
  bool found = false;
  if (THPObjectPtr frame = frame_of(unpack_hook); frame) {
    for_each_saved_argument(frame, [&](const SavedVariable& saved, const NodePtr&) {
      if (const auto data = saved.has_hooks() ? saved.retrieve_unpack_hook_data() : std::nullopt) {
        found = found || is_computed_only_once(data->first.ptr(getPyInterpreter()));
      }
    });
  }
  return found;
}

bool is_reentrant_checkpoint(Node& node) {
  THPObjectPtr function = attribute(context_of(node), "_forward_cls");
  return function && function.get() == of_checkpoint("CheckpointFunction").get();
}

bool in_graph_exec_group() {
  THPObjectPtr module(PyImport_ImportModule("torch._C"));
  THPObjectPtr group(module ? PyObject_CallMethod(module, "_get_graph_exec_group", nullptr)
                            : nullptr);
  forget_error();  // a torch that has none
  return group && group.get() != Py_None;
}

}  // namespace zbp
