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

/// Calls a function of zbpipe/_work.py.
template <class... Objects>
THPObjectPtr call_python(const char* function, Objects... objects) {
  THPObjectPtr module = checked(PyImport_ImportModule("zbpipe._work"));
  THPObjectPtr name = checked(PyUnicode_FromString(function));
  return checked(PyObject_CallMethodObjArgs(module.get(), name.get(), objects..., nullptr));
}

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

}  // namespace

THPObjectPtr WorkArguments::take(PyObject* saved) {
  THPObjectPtr tuple = checked(PySequence_Tuple(saved));
  THPObjectPtr arguments = checked(PyTuple_New(PyTuple_GET_SIZE(tuple.get())));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.get()); ++i) {
    PyTuple_SET_ITEM(arguments.get(), i, Py_NewRef(take_any(PyTuple_GET_ITEM(tuple.get(), i))));
  }
  return arguments;
}

/// Borrowed from what was taken.
PyObject* WorkArguments::take_any(PyObject* object) {
  const auto [place, is_new] = taken_.try_emplace(object);
  Taken& taken = place->second;  // stays where it is while others are added
  if (!is_new) {
    if (!taken.result) {
      refuse(PyExc_ValueError, "saved contains a ", Py_TYPE(object)->tp_name,
             " that contains itself; expected tuples, lists and dictionaries that end somewhere");
    }
    return taken.result.get();
  }
  taken.original = Py_NewRef(object);
  constexpr size_t deepest = 500;
  if (depth_ > deepest) {
    refuse(PyExc_ValueError, "saved contains a ", Py_TYPE(object)->tp_name, " within more than ",
           deepest, " others; expected tuples, lists and dictionaries that are nested less deeply");
  }
  ++depth_;
  taken.result = take_new(object);
  --depth_;
  return taken.result.get();
}

THPObjectPtr WorkArguments::take_new(PyObject* object) {
  if (const at::Tensor* tensor = as_tensor(object)) {
    return take_tensor(object, *tensor);
  }
  if (PyTuple_Check(object) || PyList_Check(object)) {
    return take_sequence(object);
  }
  return PyDict_Check(object) ? take_dict(object) : THPObjectPtr(Py_NewRef(object));
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
                : call_python("without_history", object);
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

/// Tuples and subclasses of lists are left as they are where nothing in them changes.
THPObjectPtr WorkArguments::take_sequence(PyObject* object) {
  THPObjectPtr items = checked(PySequence_List(object));
  bool has_changed = PyList_CheckExact(object);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    PyObject* taken = take_any(item);
    has_changed = has_changed || taken != item;
    PyList_SetItem(items.get(), i, Py_NewRef(taken));
  }
  if (!has_changed) {
    return THPObjectPtr(Py_NewRef(object));
  }
  if (PyList_CheckExact(object)) {
    return THPObjectPtr(Py_NewRef(items.get()));
  }
  return PyTuple_CheckExact(object) ? checked(PyList_AsTuple(items))
                                    : call_python("rebuilt", object, items.get());
}

/// Likewise. No key is looked up: it may have changed since it was put in.
THPObjectPtr WorkArguments::take_dict(PyObject* object) {
  THPObjectPtr items = checked(PyDict_Items(object));
  THPObjectPtr copy = checked(PyDict_New());
  bool has_changed = PyDict_CheckExact(object);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i) {
    PyObject* pair = PyList_GET_ITEM(items.get(), i);
    PyObject* item = PyTuple_GET_ITEM(pair, 1);
    PyObject* taken = take_any(item);
    has_changed = has_changed || taken != item;
    if (PyDict_SetItem(copy, PyTuple_GET_ITEM(pair, 0), taken) < 0) {
      throw python_error();
    }
  }
  if (!has_changed) {
    return THPObjectPtr(Py_NewRef(object));
  }
  return PyDict_CheckExact(object) ? THPObjectPtr(Py_NewRef(copy.get()))
                                   : call_python("rebuilt", object, copy.get());
}

}  // namespace zbp
