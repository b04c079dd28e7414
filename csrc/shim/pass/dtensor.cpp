#include "shim/pass/dtensor.h"

#include <Python.h>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/torch/gil.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

/// Null if nobody imported torch.distributed.tensor. No error is set.
THPObjectPtr dtensor_class() {
  THPObjectPtr module_name(PyUnicode_FromString("torch.distributed.tensor"));
  THPObjectPtr module(module_name ? PyImport_GetModule(module_name.get()) : nullptr);
  THPObjectPtr found(module ? PyObject_GetAttrString(module.get(), "DTensor") : nullptr);
  PyErr_Clear();
  return found;
}

bool is_dtensor_object(PyObject* object) {
  THPObjectPtr type = dtensor_class();
  return type && PyObject_IsInstance(object, type.get()) == 1;
}

constexpr const char* OF_DTENSORS = "zbpipe._torch.dtensor";

/// What could not be asked of a DTensor is as if it were none; but nobody's Ctrl-C is lost.
void forget_error() {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
    throw python_error();
  }
  PyErr_Clear();
}

/// The plain tensor in `object`, which may be null.
std::optional<at::Tensor> plain_tensor_in(PyObject* object) {
  const at::Tensor* tensor = object ? as_tensor(object) : nullptr;
  return tensor && !is_subclass(*tensor) ? std::optional(*tensor) : std::nullopt;
}

std::optional<LocalProduct> take_apart(const Operand& sum, const Operand& left,
                                       const Operand& right) {
  THPObjectPtr function = python_function(OF_DTENSORS, "local_product");
  THPObjectPtr transposed(Py_BuildValue("(iii)", static_cast<int>(sum.is_transposed),
                                        static_cast<int>(left.is_transposed),
                                        static_cast<int>(right.is_transposed)));
  THPObjectPtr matrices(wrap_tensors({sum.matrix, left.matrix, right.matrix}));
  if (!transposed) {
    throw python_error();
  }
  THPObjectPtr parts(PyObject_CallFunctionObjArgs(
      function.get(), PyTuple_GET_ITEM(matrices.get(), 0), PyTuple_GET_ITEM(matrices.get(), 1),
      PyTuple_GET_ITEM(matrices.get(), 2), transposed.get(), nullptr));
  if (!parts || !PyTuple_Check(parts.get()) || PyTuple_GET_SIZE(parts.get()) != 3) {
    return std::nullopt;
  }
  const auto s = plain_tensor_in(PyTuple_GET_ITEM(parts.get(), 0));
  const auto l = plain_tensor_in(PyTuple_GET_ITEM(parts.get(), 1));
  const auto r = plain_tensor_in(PyTuple_GET_ITEM(parts.get(), 2));
  return s && l && r ? std::optional(LocalProduct{*s, *l, *r}) : std::nullopt;
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_subclass(tensor)) {
    return false;
  }
  const AcquireGil gil;
  THPObjectPtr object(THPVariable_Wrap(tensor));
  const bool is_one = object && is_dtensor_object(object.get());
  PyErr_Clear();
  return is_one;
}

at::Tensor local_part(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) {
    return tensor;
  }
  const AcquireGil gil;
  THPObjectPtr object(THPVariable_Wrap(tensor));
  THPObjectPtr function = python_function(OF_DTENSORS, "local_part");
  THPObjectPtr local(object && function
                         ? PyObject_CallFunctionObjArgs(function.get(), object.get(), nullptr)
                         : nullptr);
  forget_error();
  return plain_tensor_in(local.get()).value_or(tensor);
}

std::optional<LocalProduct> local_product(const Operand& sum, const Operand& left,
                                          const Operand& right) {
  if (!is_subclass(sum.matrix) || !is_subclass(left.matrix) || !is_subclass(right.matrix) ||
      !is_dtensor(sum.matrix)) {
    return std::nullopt;
  }
  const AcquireGil gil;
  auto parts = take_apart(sum, left, right);
  forget_error();  // then the DTensors' own rules apply
  return parts;
}

}  // namespace zbp
