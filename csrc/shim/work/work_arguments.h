// What a callable that is handed over will be called with.
#pragma once

#include <Python.h>

#include <unordered_map>

#include "shim/torch/python.h"

namespace zbp {

/// Makes of `saved` what W may hold: tensors without their history, as they are otherwise; tuples, lists and
/// dictionaries of such. Within one `saved`, what is one object stays one.
///
/// Called with the GIL held; runs Python code for containers and for subclasses.
class WorkArguments {
 public:
  /// group: whose weights cost nothing to keep.
  explicit WorkArguments(const Group& group) : group_(group) {}

  /// A new tuple. Throws python_error, also what zbpipe/_work.py says of a container that contains itself.
  THPObjectPtr take(PyObject* saved);

  SmallVector<Watched, 3> tensors;     // in what was taken, but for
  SmallVector<Watched, 1> parameters;  // those whose memory is a parameter's

 private:
  THPObjectPtr take_nested(PyObject* tuple);
  PyObject* take(PyObject* object, const at::Tensor& tensor);
  THPObjectPtr take_tensor(PyObject* object, const at::Tensor& tensor);
  bool is_parameters(const at::Tensor& tensor) const;

  const Group& group_;
  struct Taken {
    THPObjectPtr original;
    THPObjectPtr result;
  };
  std::unordered_map<PyObject*, Taken> taken_;  // tensors
};

}  // namespace zbp
