// DTensors (torch.distributed.tensor): each rank of a mesh has a part of them. These functions ask
// the Python objects, and take the GIL for that. For a tensor that is no subclass they do neither.
#pragma once

#include <ATen/core/Tensor.h>

namespace zbp {

bool is_dtensor(const at::Tensor& tensor);

/// What this rank has of a DTensor; `tensor` itself if it is none, or if it is not there yet.
at::Tensor local_part(const at::Tensor& tensor);

/// A factor of a product, or where the product is added.
struct Operand {
  at::Tensor matrix;
  bool is_transposed;
};

/// Makes of three DTensors this rank's parts, without the transposition, where adding the product
/// of its parts of `left` and `right` to its part of `sum` is all there is to adding the product
/// itself: it needs no communication, and lies on the mesh as `sum` does. Else false, and nothing
/// was done.
bool make_local(Operand& sum, Operand& left, Operand& right);

}  // namespace zbp
