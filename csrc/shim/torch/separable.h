// The table of node types whose gradients can be computed apart.
#pragma once

#include <cstdint>
#include <optional>

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "shim/torch/compat.h"

namespace zbp {

/// The edges of a node as bits.
constexpr uint32_t bit(uint32_t slot) {
  return uint32_t{1} << slot;
}

constexpr uint32_t no_slot = UINT32_MAX;

/// Something that a node has saved.
struct Part {
  torch::autograd::SavedVariable* saved;
  uint32_t readers;             // the edges, as bits, whose gradients are computed from it
  uint32_t own_slot = no_slot;  // the edge that takes its gradient
  bool is_insisted_on = false;  // the node wants a tensor of its shape where it does not read it
};

/// A node of a type that is known to compute the gradients of its edges apart, at no extra cost
/// worth naming, as often as one likes.
struct Separable {
  c10::SmallVector<Part, 5> parts;
  // It multiplies its first part with its second: its weights may be heavy.
  bool has_factors = false;
  // W computes the gradient of one by an operation of its own, from dY and the other: for matrices
  // d(left) = dY rightᵀ and d(right) = leftᵀ dY, nothing scaled.
  bool is_product = false;
};

/// Nothing for a node of any other type.
std::optional<Separable> separate(Node& node);

}  // namespace zbp
