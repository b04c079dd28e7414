// The way from a task to a weight, where nothing lies between them but changes of layout and casts.
#pragma once

#include "shim/pass/group.h"

namespace zbp {

/// True for a node that only lays one gradient out anew, copies or casts it, has saved no tensor, and
/// that nobody watches. Running it any number of times, on any thread, does no harm.
bool is_plain_step(Node& node);

/// True if a product's node computes the gradient of the task's weight transposed, which it does to lay it out
/// as the weight, where that is column-major. BLAS may round otherwise where a product is computed the other way
/// round.
bool is_multiplied_transposed(const Task& task);

/// True for a node of a kind that saves no tensor.
bool saves_nothing(Node& node);

/// A ZBP_STEP_*; whether it is watched is not looked at.
uint8_t step_of(Node& node);

/// Takes `grad`, the gradient at `face.edge`, along the path, checked at every edge as by the engine.
at::Tensor take_along(const Face& face, at::Tensor grad);

/// The part of `tensor`, which is laid out as the weight, that a gradient at `face.edge` is added to:
/// a view in the gradient's shape, or nothing if there is none. Only casts are passed over, so the
/// view has the dtype of `tensor`.
std::optional<at::Tensor> view_along(const Face& face, const at::Tensor& tensor);

}  // namespace zbp
