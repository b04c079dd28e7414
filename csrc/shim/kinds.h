// Which kind of split node a node is, and what is known about the nodes that can be split.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include "shim/group.h"

namespace zbp {

/// A node that computes a gradient from one output gradient and two saved matrices, each with an
/// edge of its own, such that the two gradients can be computed apart at no extra cost.
struct TwoFactors {
  torch::autograd::SavedVariable* left = nullptr;
  torch::autograd::SavedVariable* right = nullptr;
  uint32_t left_slot = 0;
  uint32_t right_slot = 0;
  bool plain_product = false;  // d(left) = dY rightᵀ and d(right) = leftᵀ dY, nothing scaled
};

/// The two factors of `node`, or nothing if it is not of a type that is known to split well.
std::optional<TwoFactors> two_factors(Node& node);

/// product, deferred or whole, from the node's type, its hooks and `face`.
/// A product is confirmed when its matrices are at hand: see take_matrices().
Kind classify(Node& node, c10::ArrayRef<Face> face);

/// Fills `task` for W from a product or deferred node that is about to run in I with `grads`.
/// Saved tensors behind hooks (checkpointing, offloading) are unpacked once and put back plainly, so
/// that neither the node nor W unpacks them a second time; a deferred node's always are. A product whose matrices turn out to need
/// more than one multiplication (subclasses, sparse or complex ones) becomes deferred.
void take_matrices(Task& task, Node& node, const variable_list& grads);

/// True if a hook would see `node` run.
bool has_hooks(Node& node);

/// True if `edge` leads to a node that only transposes a matrix on its way to one further edge and
/// that nobody watches; then `*next` is that edge.
bool is_plain_transposition(const Edge& edge, Edge* next);

/// True if the gradient at `face` is the product of a product's two matrices. Only such a gradient can be
/// given transposed; any other goes through the transposing node.
bool gives_matrix_gradient(const Task& task, Node& node, const Face& face);
void give_up_transposition(Face& face);

/// True for a tensor whose memory is not simply its own: DTensors and other Python subclasses,
/// wrappers of torch.func, sparse tensors.
bool is_subclass(const at::Tensor& tensor);

/// True for a node that libtorch generated: its apply() computes exactly what its edges ask for,
/// and release_variables() lets go of everything that it saved.
bool is_generated(const Node& node);

/// True if a node that has not run yet has no saved tensors that running it would release; false
/// where this is not known. Called with the GIL held.
bool saved_nothing(Node& node);

/// True for the node of a Python autograd Function.
bool is_python_function(const Node& node);

}  // namespace zbp
