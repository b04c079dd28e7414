// Weights' main_grad, where Megatron-LM and its kin accumulate.
#pragma once

#include <algorithm>

#include "shim/torch/gil.h"
#include "shim/torch/python.h"

namespace zbp {

constexpr const char* OF_MAIN_GRADS = "zbpipe._torch.main_grad";

/// Around one run of a Function, whose kernels may add to main_grad by themselves. They say so by
/// grad_added_to_main_grad, and what the Function returns for such a weight is no gradient.
class AddedByKernels {
 public:
  /// The weights of the gradients to come, by their numbers; undefined for those of no weight.
  explicit AddedByKernels(const variable_list& weights) {
    if (std::any_of(weights.begin(), weights.end(), [](const auto& w) { return w.defined(); })) {
      const AcquireGil gil;
      watched_ = call_python(OF_MAIN_GRADS, "watch", {checked(wrap_tensors(weights))}).release();
    }
  }
  ~AddedByKernels() {
    if (watched_) {
      const AcquireGil gil;
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      for (int tries = 3; tries > 0 && !unwatch(); --tries) {
      }
      Py_DECREF(watched_);
      PyErr_Restore(type, value, traceback);
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(AddedByKernels);

  /// Takes what is no gradient out of what has been returned.
  void drop(variable_list& grads) const {
    if (watched_) {
      const AcquireGil gil;
      const THPObjectPtr added = call_python(OF_MAIN_GRADS, "added", {watched_});
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(added.get()); ++i) {
        grads[PyLong_AsSize_t(PyList_GET_ITEM(added.get(), i))].reset();
      }
    }
  }

 private:
  /// False if a Ctrl-C has come between: it is the main thread's again, and the rest is to do.
  bool unwatch() noexcept {
    try {
      call_python(OF_MAIN_GRADS, "unwatch", {watched_});
    } catch (python_error& error) {  // an attribute that could be set can be put back
      error.restore();
      const bool is_interrupted = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
      PyErr_Clear();
      if (is_interrupted) {
        PyErr_SetInterrupt();
      }
      return !is_interrupted;
    }
    return true;
  }

  PyObject* watched_ = nullptr;
};

}  // namespace zbp
