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

void AddedByKernels::watch(const at::Tensor& weight) {
  if (!weight.defined()) {
    return;
  }
  const AcquireGil gil;
  THPObjectPtr object(wrap_tensor(weight));
  if (!main_grad_of(object)) {
    return;
  }
  if (THPObjectPtr before = set_added(object, Py_False)) {
    before_.emplace_back(object.release(), before.release());
  }
}

bool AddedByKernels::has(const at::Tensor& weight) const {
  if (before_.empty() || !weight.defined()) {
    return false;
  }
  const AcquireGil gil;
  THPObjectPtr object(wrap_tensor(weight));
  for (const auto& [watched, before] : before_) {
    if (watched == object.get()) {
      THPObjectPtr now = attribute_of(watched, ADDED);
      return now && PyObject_IsTrue(now) == 1;
    }
  }
  return false;
}

AddedByKernels::~AddedByKernels() {
  if (before_.empty()) {
    return;
  }
  const AcquireGil gil;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  for (auto one = before_.rbegin(); one != before_.rend(); ++one) {  // a weight can be there twice
    if (PyObject_SetAttrString(one->first, ADDED, one->second) < 0) {
      PyErr_Clear();  // it could be set before
    }
    Py_DECREF(one->first);
    Py_DECREF(one->second);
  }
  PyErr_Restore(type, value, traceback);
}

}  // namespace zbp
