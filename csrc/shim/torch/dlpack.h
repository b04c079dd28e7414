// The tensors in DLPack capsules.
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>

namespace zbp {

/// The tensor that a DLPack capsule of torch's holds, whoever has it now; null for any other
/// object.
const at::Tensor* tensor_of_capsule(PyObject* capsule);

}  // namespace zbp
