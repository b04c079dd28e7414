// A file of its own: libtorch's headers of autograd and of vmap do not go together.
#include "shim/batched.h"

#include <ATen/functorch/BatchedTensorImpl.h>

namespace zbp {

at::Tensor without_vmap(const at::Tensor& tensor) {
  const auto* batched = at::functorch::maybeGetBatchedImpl(tensor);
  return batched ? without_vmap(batched->value()) : tensor;
}

}  // namespace zbp
