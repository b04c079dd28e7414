// The tensors that torch.vmap passes to the functions that it runs.
#pragma once

#include <ATen/core/Tensor.h>

namespace zbp {

/// The tensor of all of the batch that `tensor` stands for within vmaps; `tensor` itself elsewhere.
at::Tensor without_vmap(const at::Tensor& tensor);

}  // namespace zbp
