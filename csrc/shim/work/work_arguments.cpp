#include "shim/work/work_arguments.h"

#include <algorithm>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/torch/detach.h"

namespace zbp {

namespace {

THPObjectPtr checked(PyObject* object) {
  if (!object) {
    throw python_error();
  }
  return THPObjectPtr(object);
}

constexpr const char* HELPER = "zbpipe._work";

bool is_parameter_object(PyObject* object) {
  if (Py_IS_TYPE(object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
    return false;  // the class itself would be asked in Python
  }
  const int answer = PyObject_IsInstance(object, ParameterClass);
  if (answer < 0) {
    throw python_error();
  }
  return answer == 1;
}

/// Also a view that was made without grad mode says so where its base requires a gradient.
bool has_history(const at::Tensor& tensor) {
  const at::Tensor base = base_of(tensor);
  return tensor.requires_grad() || (base.defined() && base.requires_grad());
}

bool has_attributes(PyObject* object) {
  THPObjectPtr attributes = checked(PyObject_GetAttrString(object, "__dict__"));
  return PyDict_Check(attributes.get()) && PyDict_GET_SIZE(attributes.get()) > 0;
}

bool is_container(PyObject* object) {
  return PyTuple_Check(object) || PyList_Check(object) || PyDict_Check(object);
}

}  // namespace

THPObjectPtr WorkArguments::take(PyObject* saved) {
  THPObjectPtr tuple = checked(PySequence_Tuple(saved));
  const Py_ssize_t count = PyTuple_GET_SIZE(tuple.get());
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (is_container(PyTuple_GET_ITEM(tuple.get(), i))) {
      return take_nested(tuple);
    }
  }
  THPObjectPtr arguments = checked(PyTuple_New(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* object = PyTuple_GET_ITEM(tuple.get(), i);
    const at::Tensor* tensor = as_tensor(object);
    PyTuple_SET_ITEM(arguments.get(), i, Py_NewRef(tensor ? take(object, *tensor) : object));
  }
  return arguments;
}

/// The walk over containers is Python's: a generator that is sent, for each tensor that it yields, what W may hold.
THPObjectPtr WorkArguments::take_nested(PyObject* tuple) {
  THPObjectPtr walk = call_python(HELPER, "taken", {tuple});
  PyObject* alias = Py_None;
  for (;;) {
    PyObject* result = nullptr;
    const PySendResult state = PyIter_Send(walk.get(), alias, &result);
    THPObjectPtr object = checked(result);
    if (state == PYGEN_RETURN) {
      return object;
    }
    alias = take(object, *as_tensor(object));
  }
}

/// Borrowed from what was taken.
PyObject* WorkArguments::take(PyObject* object, const at::Tensor& tensor) {
  const auto found = taken_.find(object);
  if (found != taken_.end()) {
    return found->second.result.get();
  }
  Taken taken{THPObjectPtr(Py_NewRef(object)), take_tensor(object, tensor)};
  return taken_.emplace(object, std::move(taken)).first->second.result.get();
}

/// A parameter comes as it is: what adds to its main_grad needs it. A stage input is a leaf as well, but it goes
/// when I is over.
THPObjectPtr WorkArguments::take_tensor(PyObject* object, const at::Tensor& tensor) {
  const bool is_weight = std::any_of(
      group_.weights.begin(), group_.weights.end(),
      [&](const Weight& weight) { return weight.accumulator->variable.is_same(tensor); });
  if (is_weight || (tensor.is_leaf() && is_parameter_object(object))) {
    parameters.emplace_back(tensor);
    return THPObjectPtr(Py_NewRef(object));
  }
  THPObjectPtr alias(Py_NewRef(object));
  if (has_history(tensor)) {
    alias = THPVariable_CheckExact(object) && !has_attributes(object)
                ? checked(THPVariable_Wrap(tensor.detach()))
                : call_python(HELPER, "without_history", {object});
  }
  const at::Tensor* taken = as_tensor(alias);
  TORCH_CHECK_TYPE(taken, "detach() of a ", Py_TYPE(object)->tp_name, " in saved returned a ",
                   Py_TYPE(alias.get())->tp_name, "; expected a tensor");
  if (is_parameters(tensor)) {
    parameters.emplace_back(*taken);
  } else {
    tensors.emplace_back(*taken);
  }
  return alias;
}

/// True for another view of a parameter's memory.
bool WorkArguments::is_parameters(const at::Tensor& tensor) const {
  const void* storage = storage_of(tensor);
  const auto has_it = [&](const Weight& weight) {
    return storage && storage_of(weight.accumulator->variable) == storage;
  };
  if (std::any_of(group_.weights.begin(), group_.weights.end(), has_it)) {
    return true;
  }
  const at::Tensor base = base_of(tensor);
  return base.defined() && base.is_leaf() &&
         is_parameter_object(checked(THPVariable_Wrap(base)).get());
}

}  // namespace zbp
