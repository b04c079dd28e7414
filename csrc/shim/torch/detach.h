// What keeps a tensor's history, and ending that of a stage output.
#pragma once

#include <torch/csrc/autograd/variable.h>

#include "shim/torch/compat.h"

namespace zbp {

/// That of which the tensor is a view, or undefined.
inline at::Tensor base_of(const at::Tensor& tensor) {
  const auto* view = torch::autograd::impl::get_view_autograd_meta(tensor);
  return view && view->has_bw_view() ? view->get_backward_view().base_ : at::Tensor();
}

/// True for a view that was made without grad mode of something that requires a gradient: nothing
/// flows through it, but it keeps its base, and with that the base's graph and gradient.
inline bool keeps_base_unused(const at::Tensor& tensor) {
  const at::Tensor base = base_of(tensor);
  // As it is stored: for a view, asking for it could compute it anew.
  return base.defined() && base.requires_grad() &&
         !torch::autograd::impl::get_autograd_meta(tensor)->grad_fn_;
}

/// Detaches `output` in place; a leaf has nothing to be detached from and stays as it is. detach_()
/// refuses views, and a view keeps its base and with it the graph: there the history goes together
/// with everything that autograd knows of the tensor but its grad.
inline void detach_output(const at::Tensor& output) {
  if (output.is_leaf()) {
    return;
  }
  if (!base_of(output).defined()) {
    // Goes when the tensor no longer refers to it: that may run Python code and give the GIL away.
    const NodePtr history = torch::autograd::impl::get_autograd_meta(output)->grad_fn_;
    output.detach_();
    return;
  }
  auto fresh = std::make_unique<torch::autograd::AutogradMeta>();
  fresh->grad_ = output.mutable_grad();
  output.unsafeGetTensorImpl()->set_autograd_meta(std::move(fresh));
}

}  // namespace zbp
