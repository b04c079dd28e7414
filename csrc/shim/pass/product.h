// The gradients that tasks give at their faces: products of two matrices, and all others.
#pragma once

#include "shim/pass/group.h"

namespace zbp {

/// True if the face's gradient is a product, `plan` being one of the task's faces.
bool is_product(const Task& task, const zbp_face& plan);

/// Adds the product of face number `i` in place to `grad`, which is laid out as the weight is. A product that is not
/// fused is rounded to `type`, the weight's, before it is added. False, and nothing was done, if it cannot be added so.
bool add_in_place(const at::Tensor& grad, c10::ScalarType type, const Task& task, size_t i,
                  zbp_how how);

/// The gradient for face number `i`, at its weight where it has a path; `outputs` are a deferred node's.
at::Tensor face_grad(const Task& task, size_t i, variable_list& outputs);

}  // namespace zbp
