// Matrix products of a Function that says nothing, put off until W: zbpipe/_kernels/lazy.py, Note [Lazy products].
#pragma once

#include "shim/pass/group.h"
#include "shim/torch/python.h"

namespace zbp {

/// While it lives, products that a whole task's Function computes on this thread may be lazy: those that can be a
/// gradient that its work may be handed over for. Where the policy does not ask for it, or there is none, nothing is
/// done. Its functions take the GIL.
class LazyProducts {
 public:
  LazyProducts(Group& group, Task& task, Node& original);
  ~LazyProducts();
  LazyProducts(const LazyProducts&) = delete;
  LazyProducts& operator=(const LazyProducts&) = delete;

  /// Of what the Function has returned: hands over to W what is still lazy and may wait, which is then undefined, and
  /// computes the other lazy ones. No product is lazy any more from here on. Throws what computing them raises.
  void settle(variable_list& gradients);

 private:
  void end() noexcept;
  void settle_lazy(variable_list& gradients);
  at::Tensor hand_over(PyObject* function, PyObject* factors, size_t slot);

  Group& group_;
  Task& task_;
  THPObjectPtr seen_{nullptr};
  bool is_under_way_ = false;
};

}  // namespace zbp
