// What is known of a weight's main_grad, where Megatron-LM and its kin accumulate. Called with the
// GIL held, but for AddedByKernels.
#pragma once

#include <Python.h>

#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/object_ptr.h>

namespace zbp {

/// Null for None, and where there is none. Throws python_error.
THPObjectPtr main_grad_of(PyObject* weight);

/// Sets the weight's grad_added_to_main_grad to `value`, if it has the attribute: what it was, or
/// null. Throws python_error.
THPObjectPtr set_added(PyObject* weight, PyObject* value);

/// The weights to which a Function's kernels add by themselves while this lives. They say so by
/// grad_added_to_main_grad, and what the Function returns for such a weight is no gradient. W sets
/// the attribute too, and nobody may reset it for a whole step: so it is asked per run of a node,
/// and put back afterwards.
class AddedByKernels {
 public:
  AddedByKernels() = default;
  ~AddedByKernels();
  AddedByKernels(const AddedByKernels&) = delete;
  AddedByKernels& operator=(const AddedByKernels&) = delete;

  /// Nothing for a weight without main_grad, or without the attribute.
  void watch(const at::Tensor& weight);
  bool has(const at::Tensor& weight) const;

 private:
  c10::SmallVector<std::pair<PyObject*, PyObject*>, 2> before_;  // owned: weight, its attribute
};

}  // namespace zbp
