#include "shim/torch/separable.h"

#include <initializer_list>

#include <torch/csrc/autograd/generated/Functions.h>

#include "shim/torch/nodes.h"

namespace zbp {

namespace gen = torch::autograd::generated;
using torch::autograd::SavedVariable;

namespace {

Separable two_factors(SavedVariable& left, SavedVariable& right, uint32_t left_slot,
                      bool is_product, bool is_insisted_on = false) {
  const uint32_t right_slot = left_slot + 1;
  return {{{&left, bit(right_slot), left_slot, is_insisted_on},
           {&right, bit(left_slot), right_slot, is_insisted_on}},
          true,
          is_product};
}

/// The weights of such a node are light: it is deferred only where the policy asks for it.
Separable without_factors(std::initializer_list<Part> parts) {
  Separable separable;
  separable.parts.assign(parts.begin(), parts.end());
  return separable;
}

bool is_one(const at::Scalar& scalar) {
  return scalar.equal(1);
}

}  // namespace

std::optional<Separable> separate(Node& node) {
  if (auto* n = as<gen::AddmmBackward0>(node)) {
    return two_factors(n->mat1_, n->mat2_, 1, is_one(n->alpha) && is_one(n->beta));
  }
  if (auto* n = as<gen::MmBackward0>(node)) {
    return two_factors(n->self_, n->mat2_, 0, true);
  }
  if (auto* n = as<gen::BmmBackward0>(node)) {
    return two_factors(n->self_, n->mat2_, 0, true);
  }
  if (auto* n = as<gen::BaddbmmBackward0>(node)) {
    return two_factors(n->batch1_, n->batch2_, 1, is_one(n->alpha) && is_one(n->beta));
  }
  if (auto* n = as<gen::GroupedMmBackward0>(node)) {
    Separable separable = two_factors(n->self_, n->mat2_, 0, true);
    separable.parts.push_back({&n->offs_, bit(0) | bit(1)});
    return separable;
  }
  if (auto* n = as<gen::LinearBackward0>(node)) {
    return two_factors(n->input_, n->weight_, 0, false, true);
  }
  if (auto* n = as<gen::ConvolutionBackward0>(node)) {
    return two_factors(n->input_, n->weight_, 0, true, true);
  }
  if (auto* n = as<gen::NativeLayerNormBackward0>(node)) {
    constexpr uint32_t all = bit(0) | bit(1) | bit(2);
    return without_factors({{&n->input_, all, 0},
                            {&n->result1_, all},
                            {&n->result2_, all},
                            {&n->weight_, bit(0), 1, true},
                            {&n->bias_, 0, 2, true}});
  }
  if (auto* n = as<gen::FusedRmsNormBackward0>(node)) {
    constexpr uint32_t all = bit(0) | bit(1);
    return without_factors(
        {{&n->input_, all, 0}, {&n->result1_, all}, {&n->weight_, bit(0), 1, true}});
  }
  if (auto* n = as<gen::NativeGroupNormBackward0>(node)) {
    constexpr uint32_t all = bit(0) | bit(1) | bit(2);
    // The CPU's kernel for channels-last memory writes the input's gradient also where nobody asks.
    const auto input = n->input_.get_raw_data();
    if (node.input_metadata(0).device().is_cpu() &&
        !(input && input->defined() &&
          input->suggest_memory_format() == c10::MemoryFormat::Contiguous)) {
      return std::nullopt;
    }
    return without_factors({{&n->input_, all, 0},
                            {&n->result1_, all},
                            {&n->result2_, all},
                            {&n->weight_, bit(0), 1, true}});
  }
  if (auto* n = as<gen::MulBackward0>(node)) {
    return without_factors({{&n->self_, bit(1), 0}, {&n->other_, bit(0), 1}});
  }
  if (as<gen::AddBackward0>(node) || as<gen::SubBackward0>(node)) {
    return without_factors({});
  }
  return std::nullopt;
}

}  // namespace zbp
