// What is known of a weight's main_grad, where Megatron-LM and its kin accumulate. Called with the
// GIL held, but for AddedByKernels.
#pragma once

#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/torch/compat.h"

namespace zbp {

/// Null for None, and where there is none. Throws python_error.
THPObjectPtr main_grad_of(PyObject* weight);

/// Sets the weight's grad_added_to_main_grad to `value`, if it has the attribute: what it was, or
/// null. Throws python_error.
THPObjectPtr set_added(PyObject* weight, PyObject* value);

/// Around one run of a Function, whose kernels may add to main_grad by themselves. They say so by
/// grad_added_to_main_grad, and what the Function returns for such a weight is no gradient. W sets
/// the attribute too, and nobody may reset it for a whole step: so it is asked per run, and put
/// back afterwards.
class AddedByKernels {
 public:
  /// The weights of the gradients to come, by their numbers; undefined for those of no weight.
  explicit AddedByKernels(const variable_list& weights);
  ~AddedByKernels();
  AddedByKernels(const AddedByKernels&) = delete;
  AddedByKernels& operator=(const AddedByKernels&) = delete;

  /// Takes what is no gradient out of what has been returned.
  void drop(variable_list& grads) const;

 private:
  AddedByKernels() = default;

  struct Watched {
    size_t number;
    PyObject *weight, *before;  // owned; before: the attribute
  };
  c10::SmallVector<Watched, 2> watched_;
};

}  // namespace zbp
