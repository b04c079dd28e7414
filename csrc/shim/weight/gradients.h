// The gradients that tasks give at their faces, and their addition to the weights.
#pragma once

#include "shim/group/group.h"

namespace zbp {

/// The gradient for face number `f`, on its edge; `outputs` are a deferred node's. Each is asked
/// for once.
at::Tensor face_grad(Task& task, size_t f, variable_list& outputs);

/// Adds `grad` to the weight's gradient, as its accumulator does, without any hook; or to its
/// main_grad. When `kept` is this same gradient, nobody else has its memory, and the weight has
/// none yet, the gradient is taken and not copied, and `kept` is let go. On an exception nothing
/// was added, `grad` and `kept` are whole.
void accumulate(Weight& weight, const at::Tensor& grad, Kept* kept);

}  // namespace zbp
