#include "shim/torch/main_grad.h"

#include "shim/torch/gil.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

constexpr const char* ADDED = "grad_added_to_main_grad";

/// Safe from the loss of this thread's state: it may be one of the engine's.
[[noreturn]] void throw_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

/// Null for None, and where there is none.
THPObjectPtr attribute_of(PyObject* weight, const char* name) {
  THPObjectPtr found(PyObject_GetAttrString(weight, name));
  if (!found && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
    throw_error();
  }
  PyErr_Clear();
  return found.get() == Py_None ? THPObjectPtr() : std::move(found);
}

}  // namespace

THPObjectPtr main_grad_of(PyObject* weight) {
  return attribute_of(weight, "main_grad");
}

THPObjectPtr set_added(PyObject* weight, PyObject* value) {
  THPObjectPtr before = attribute_of(weight, ADDED);
  if (before && PyObject_SetAttrString(weight, ADDED, value) < 0) {
    throw_error();
  }
  return before;
}

// Through the other constructor: so what is watched is put back where this one throws.
AddedByKernels::AddedByKernels(const variable_list& weights) : AddedByKernels() {
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!weights[i].defined()) {
      continue;
    }
    const AcquireGil gil;
    THPObjectPtr object(wrap_tensor(weights[i]));
    THPObjectPtr before = main_grad_of(object) ? set_added(object, Py_False) : THPObjectPtr();
    if (before) {
      watched_.push_back({i, object.release(), before.release()});
    }
  }
}

void AddedByKernels::drop(variable_list& grads) const {
  for (const Watched& watched : watched_) {
    const AcquireGil gil;
    THPObjectPtr now = attribute_of(watched.weight, ADDED);
    if (now && PyObject_IsTrue(now) == 1) {
      grads[watched.number].reset();
    }
  }
}

AddedByKernels::~AddedByKernels() {
  if (watched_.empty()) {
    return;
  }
  const AcquireGil gil;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  for (auto one = watched_.rbegin(); one != watched_.rend();
       ++one) {  // a weight can be there twice
    if (PyObject_SetAttrString(one->weight, ADDED, one->before) < 0) {
      PyErr_Clear();  // it could be set before
    }
    Py_DECREF(one->weight);
    Py_DECREF(one->before);
  }
  PyErr_Restore(type, value, traceback);
}

}  // namespace zbp
