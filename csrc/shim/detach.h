// Ending the history of a stage output.
#pragma once

#include <memory>

#include <torch/csrc/autograd/variable.h>

namespace zbp {

/// Detaches `output` in place; a leaf has nothing to be detached from and stays as it is. detach_()
/// refuses views, and a view keeps its base and with it the graph: there the history goes together
/// with everything that autograd knows of the tensor but its grad.
inline void detach_output(const at::Tensor& output) {
  if (output.is_leaf()) {
    return;
  }
  const auto* view = torch::autograd::impl::get_view_autograd_meta(output);
  if (!view || !view->has_bw_view()) {
    output.detach_();
    return;
  }
  auto fresh = std::make_unique<torch::autograd::AutogradMeta>();
  fresh->grad_ = output.mutable_grad();
  output.unsafeGetTensorImpl()->set_autograd_meta(std::move(fresh));
}

}  // namespace zbp
