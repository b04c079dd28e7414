#include "shim/group/facts.h"

#include <torch/csrc/autograd/generated/Functions.h>

#include "shim/torch/nodes.h"
#include "shim/torch/python.h"
#include "shim/torch/separable.h"

namespace zbp {

namespace gen = torch::autograd::generated;

namespace {

bool swaps_two(int64_t a, int64_t b) {
  return (a - b) % 2 != 0;
}

template <class... Types>
bool is_one_of(Node& node) {
  return (as<Types>(node) || ...);
}

/// A ZBP_STEP_*; whether it is watched is not looked at.
uint8_t step_of(Node& node) {
  if (node.num_inputs() != 1 || node.num_outputs() != 1 ||
      node.input_metadata(0).is_nested_tensor()) {
    return ZBP_STEP_NONE;
  }
  if (auto* n = as<gen::ToCopyBackward0>(node)) {
    const bool moves = n->self_options.device() != node.input_metadata(0).device();
    return moves ? ZBP_STEP_MOVE : ZBP_STEP_CAST;
  }
  const auto is_of_matrix = [&] {
    return node.input_metadata(0).shape_as_dim_vector().size() == 2;
  };
  bool transposes = false;
  if (as<gen::TBackward0>(node)) {
    transposes = is_of_matrix();
  } else if (auto* n = as<gen::TransposeBackward0>(node)) {
    transposes = is_of_matrix() && swaps_two(n->dim0, n->dim1);
  } else if (auto* n = as<gen::PermuteBackward0>(node)) {
    transposes = n->dims.size() == 2 && swaps_two(n->dims[0], n->dims[1]) && n->dims[0] % 2 != 0;
  } else if (!is_one_of<gen::ViewBackward0, gen::UnsafeViewBackward0, gen::ReshapeAliasBackward0,
                        gen::UnsqueezeBackward0, gen::SqueezeBackward0, gen::SqueezeBackward1,
                        gen::SqueezeBackward2, gen::ExpandBackward0, gen::AliasBackward0,
                        gen::CloneBackward0>(node)) {
    return ZBP_STEP_NONE;
  }
  return transposes ? ZBP_STEP_TRANSPOSITION : ZBP_STEP_OTHER;
}

}  // namespace

zbp_fact fact_of_split(Node& node) {
  zbp_fact fact{};
  fact.sequence_nr = node.sequence_nr();
  bool is_packed = false;
  if (!node.post_hooks().empty()) {
    fact.flag = ZBP_FACT_POST_HOOK;
  } else if (const auto separable = separate(node)) {
    fact.type = ZBP_TYPE_SEPARABLE;
    if (separable->has_factors) {
      fact.type = separable->is_plain_product ? ZBP_TYPE_PRODUCT : ZBP_TYPE_FACTORS;
      fact.left_slot = static_cast<uint8_t>(separable->parts[0].own_slot);
    }
    for (const Part& part : separable->parts) {
      is_packed |= part.saved->has_hooks();
    }
  } else if (is_python_function(node)) {
    fact.type = ZBP_TYPE_FUNCTION;
    for (const SavedVariable* saved : saved_by(node)) {
      is_packed |= saved->has_hooks();
    }
  }
  fact.flag |= is_packed ? ZBP_FACT_PACKED : 0;
  return fact;
}

zbp_fact fact_of_outside(Node& node) {
  zbp_fact fact{};
  fact.step = step_of(node);
  fact.flag = fact.step != ZBP_STEP_NONE && has_hooks(node) ? ZBP_FACT_WATCHED : 0;
  return fact;
}

bool is_matrix(const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  return metadata.is_nested_tensor() || metadata.shape_as_dim_vector().size() > 1;
}

bool is_plain_step(Node& node) {
  return step_of(node) != ZBP_STEP_NONE && node.next_edge(0).is_valid() && !has_hooks(node);
}

bool saves_nothing(Node& node) {
  return step_of(node) != ZBP_STEP_NONE || is_one_of<gen::AddBackward0, gen::SubBackward0>(node);
}

bool has_saved_nothing(Node& node) {
  return is_python_function(node) ? saved_by(node).empty() : saves_nothing(node);
}

SmallVector<Node*, 4> path_behind(const Edge& edge, size_t count) {
  SmallVector<Node*, 4> path;
  for (Node* node = edge.function.get(); path.size() < count;
       node = node->next_edge(0).function.get()) {
    path.push_back(node);
  }
  return path;
}

}  // namespace zbp
