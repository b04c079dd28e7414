// A file of its own, and the first of its unit: libtorch's header of vmap must come before those of autograd.
#include "shim/torch/batched.h"

#include <ATen/functorch/BatchedTensorImpl.h>

namespace zbp {

at::Tensor without_vmap(const at::Tensor& tensor) {
  const auto* batched = at::functorch::maybeGetBatchedImpl(tensor);
  return batched ? without_vmap(batched->value()) : tensor;
}

}  // namespace zbp
