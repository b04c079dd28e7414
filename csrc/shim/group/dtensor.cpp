#include "shim/group/dtensor.h"

#include "shim/torch/gil.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

constexpr const char* OF_DTENSORS = "zbpipe._torch.dtensor";

/// What `ask` returns; null for what could not be asked: that is as if it were no DTensor.
template <class Ask>
THPObjectPtr asked(const Ask& ask) {
  try {
    return ask();
  } catch (python_error& error) {
    error.restore();
    forget_error();
    return {};
  }
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_subclass(tensor)) {
    return false;
  }
  const AcquireGil gil;
  THPObjectPtr told = asked([&] {
    return call_python("zbpipe._torch.autograd", "is_dtensor", {checked(wrap_tensor(tensor))});
  });
  return told.get() == Py_True;
}

at::Tensor local_part(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) {
    return tensor;
  }
  const AcquireGil gil;
  THPObjectPtr local =
      asked([&] { return call_python(OF_DTENSORS, "local_part", {checked(wrap_tensor(tensor))}); });
  const at::Tensor* plain = local ? as_tensor(local) : nullptr;
  return plain && !is_subclass(*plain) ? *plain : tensor;
}

bool make_local(Operand& sum, Operand& left, Operand& right) {
  if (!is_subclass(sum.matrix) || !is_subclass(left.matrix) || !is_subclass(right.matrix) ||
      !is_dtensor(sum.matrix)) {
    return false;
  }
  const AcquireGil gil;
  THPObjectPtr parts = asked([&] {
    return call_python(OF_DTENSORS, "local_product",
                       {checked(wrap_tensor(sum.matrix)), checked(wrap_tensor(left.matrix)),
                        checked(wrap_tensor(right.matrix)),
                        checked(Py_BuildValue("(iii)", sum.is_transposed, left.is_transposed,
                                              right.is_transposed))});
  });
  const variable_list plain = parts ? tensors_in(parts) : variable_list();
  if (plain.empty() || std::any_of(plain.begin(), plain.end(), is_subclass)) {
    return false;  // the DTensors' own rules apply
  }
  sum.matrix = plain[0];
  left.matrix = plain[1];
  right.matrix = plain[2];
  return true;
}

}  // namespace zbp
