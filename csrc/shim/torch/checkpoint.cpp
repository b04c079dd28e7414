#include "shim/torch/checkpoint.h"

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

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

}  // namespace

// torch.utils.checkpoint has no question for this. Its hook's closure holds the frame of the region, whose
// function for computing it again holds, of a selective one, the mode that hands results out, each once. Where torch
// has no such mode to tell, a region may be a selective one.
UnpackHook recognise(PyObject* unpack_hook) {
  THPObjectPtr module(PyImport_ImportModule("torch.utils.checkpoint"));
  const auto type_named = [&](const char* name) {
    THPObjectPtr type(module ? PyObject_GetAttrString(module, name) : nullptr);
    PyErr_Clear();
    return type;
  };
  THPObjectPtr frame_type = type_named("_CheckpointFrame");
  THPObjectPtr mode_type = type_named("_CachedTorchDispatchMode");
  UnpackHook hook = UnpackHook::other;
  if (!frame_type) {
    return hook;
  }
  find_in_closure(unpack_hook, [&](PyObject* held) {
    if (PyObject_IsInstance(held, frame_type) != 1) {
      return false;
    }
    THPObjectPtr recompute(PyObject_GetAttrString(held, "recompute_fn"));
    const auto is_mode = [&](PyObject* inner) {
      return PyObject_IsInstance(inner, mode_type) == 1;
    };
    const bool is_selective = !mode_type || (recompute && find_in_closure(recompute, is_mode));
    hook = is_selective ? UnpackHook::selective_checkpoint : UnpackHook::checkpoint;
    return true;
  });
  PyErr_Clear();
  return hook;
}

namespace {

/// New reference to the frame of the checkpointed region that the hook is of, or null.
THPObjectPtr frame_of(PyObject* unpack_hook) {
  THPObjectPtr module(PyImport_ImportModule("torch.utils.checkpoint"));
  THPObjectPtr type(module ? PyObject_GetAttrString(module, "_CheckpointFrame") : nullptr);
  THPObjectPtr frame;
  if (type) {
    find_in_closure(unpack_hook, [&](PyObject* held) {
      if (PyObject_IsInstance(held, type) == 1) {
        frame = THPObjectPtr(Py_NewRef(held));
      }
      return static_cast<bool>(frame);
    });
  }
  PyErr_Clear();
  return frame;
}

using VisitTensor = c10::function_ref<void(const at::Tensor&)>;
using VisitSaved = c10::function_ref<void(const SavedVariable&, const NodePtr&)>;

/// An argument of a region; within another region it is packed by that one's hooks.
void visit_argument(const SavedVariable& saved, const NodePtr& saved_for, VisitTensor visit) {
  if (!saved.has_hooks()) {
    visit(saved.unpack(saved_for));
  } else if (const auto data = saved.retrieve_unpack_hook_data()) {
    for_each_argument(data->first.ptr(getPyInterpreter()), visit);
  }
}

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

/// A region's frame has its arguments as saved tensors: in a list from torch 2.13 on, of a node of their own before.
void for_each_saved_argument(PyObject* frame, VisitSaved visit) {
  THPObjectPtr arguments(PyObject_GetAttrString(frame, "saved_args"));
  PyErr_Clear();
  for (Py_ssize_t i = 0;
       arguments && PyList_Check(arguments.get()) && i < PyList_GET_SIZE(arguments.get()); ++i) {
    const pybind11::handle item(PyList_GET_ITEM(arguments.get(), i));
    if (pybind11::isinstance<SavedVariable>(item)) {
      visit(*pybind11::cast<SavedVariable*>(item), nullptr);
    }
  }
  THPObjectPtr saver(PyObject_GetAttrString(frame, "input_saver"));
  PyErr_Clear();
  const at::Tensor* saved_by_it = saver ? as_tensor(saver) : nullptr;
  if (const NodePtr node = saved_by_it ? saved_by_it->grad_fn() : nullptr;
      node && is_python_function(*node)) {
    THPObjectPtr context(torch::autograd::functionToPyObject(node));
    if (!context) {
      throw python_error();
    }
    for (const SavedVariable& saved :
         reinterpret_cast<THPFunction*>(context.get())->saved_variables) {
      visit(saved, node);
    }
  }
}

}  // namespace

void for_each_argument(PyObject* unpack_hook, VisitTensor visit) {
  THPObjectPtr frame = frame_of(unpack_hook);
  if (!frame) {
    return;
  }
  for_each_saved_argument(frame, [&](const SavedVariable& saved, const NodePtr& saved_for) {
    visit_argument(saved, saved_for, visit);
  });
  THPObjectPtr recompute(PyObject_GetAttrString(frame, "recompute_fn"));
  PyErr_Clear();
  if (recompute) {
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
  THPObjectPtr context(torch::autograd::functionToPyObject(ref_of(node)));
  THPObjectPtr function(context ? PyObject_GetAttrString(context, "_forward_cls") : nullptr);
  THPObjectPtr module(PyImport_ImportModule("torch.utils.checkpoint"));
  THPObjectPtr reentrant(module ? PyObject_GetAttrString(module, "CheckpointFunction") : nullptr);
  PyErr_Clear();
  return function && function.get() == reentrant.get();
}

bool in_graph_exec_group() {
  THPObjectPtr module(PyImport_ImportModule("torch._C"));
  THPObjectPtr group(module ? PyObject_CallMethod(module, "_get_graph_exec_group", nullptr)
                            : nullptr);
  PyErr_Clear();  // a torch that has none
  return group && group.get() != Py_None;
}

}  // namespace zbp
