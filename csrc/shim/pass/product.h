// The gradients that tasks give at their faces: products of two matrices, and all others.
#pragma once

#include "shim/pass/group.h"

namespace zbp {

/// True if the face's gradient is a product, `plan` being one of the task's faces.
bool is_product(const Task& task, const zbp_face& plan);

/// Adds the product of face number `i`, rounded to `type`, in place to `grad`, which is laid out as the weight is.
/// False if that cannot be done; then nothing was done. panels_added: how many of its pieces are in `grad` already,
/// and after an exception by now; 0 when it is done.
bool add_product_to(const at::Tensor& grad, c10::ScalarType type, const Task& task, size_t i,
                    bool fuse, int64_t& panels_added);

/// The gradient for face number `i`, at its weight where it has a path; `outputs` are a deferred node's.
at::Tensor face_grad(const Task& task, size_t i, variable_list& outputs);

/// The gradients of a task, one per face, at its weight where the face has a path; undefined where there
/// is none. Leaves the task as it is.
variable_list compute_task(const Task& task);

}  // namespace zbp
