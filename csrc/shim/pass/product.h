// The gradients that tasks give at their faces: products of two matrices, and all others.
#pragma once

#include <optional>

#include "shim/pass/group.h"

namespace zbp {

/// True if the face's gradient is a product, `plan` being one of the task's faces.
bool is_product(const Task& task, const zbp_face& plan);

/// A product on its way into a gradient, which is seen as the product is laid out.
struct Addition {
  at::Tensor sum;
  at::Tensor left;
  at::Tensor right;
  c10::ScalarType type;  // to which the product is rounded before it is added
  int64_t panels_added;  // how many of its pieces are in `sum`
  bool is_done = false;
};
using Additions = SmallVector<Addition, 1>;

/// How the product of face number `i`, rounded to `type`, is added in place to `grad`, which is laid out as the weight
/// is; nothing if it cannot be. panels_added: how many of its pieces are in `grad` already.
std::optional<Addition> addition_to(const at::Tensor& grad, c10::ScalarType type, const Task& task,
                                    size_t i, int64_t panels_added);

/// Whether both can be added in one sweep.
bool go_together(const Addition& a, const Addition& b, zbp_how how);

/// Adds them to what is the same place for all. After an exception each tells how far it came.
void add_all(Additions& additions, zbp_how how);

/// The gradient for face number `i`, at its weight where it has a path; `outputs` are a deferred node's.
at::Tensor face_grad(const Task& task, size_t i, variable_list& outputs);

/// The gradients of a task, one per face, at its weight where the face has a path; undefined where there
/// is none. Leaves the task as it is.
variable_list compute_task(const Task& task);

}  // namespace zbp
