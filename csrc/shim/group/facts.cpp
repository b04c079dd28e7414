#include "shim/group/facts.h"

#include <c10/core/WrapDimMinimal.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "shim/group/saved.h"
#include "shim/torch/nodes.h"

namespace zbp {

namespace gen = torch::autograd::generated;

namespace {

/// True if a and b, which may count from the end, are the last two of `count` dimensions.
bool are_last_two(int64_t a, int64_t b, int64_t count) {
  const auto from_end = [count](int64_t d) { return d < 0 ? -d : count - d; };
  return a != b && from_end(a) + from_end(b) == 3;
}

template <class... Types>
bool is_one_of(Node& node) {
  return (as<Types>(node) || ...);
}

/// Of the gradient that the node gives.
c10::SymIntArrayRef shape_behind(Node& node) {
  const Edge& next = node.next_edge(0);
  return next.function->input_metadata(next.input_nr).shape_as_dim_vector();
}

/// A ZBP_STEP_*; whether a hook sees it is not looked at.
uint8_t step_of(Node& node) {
  if (!is_layout(node) || !node.next_edge(0).is_valid()) {
    return ZBP_STEP_NONE;
  }
  const c10::SymIntArrayRef shape = node.input_metadata(0).shape_as_dim_vector();
  const auto dims = static_cast<int64_t>(shape.size());
  if (as<gen::TBackward0>(node)) {
    return dims == 2 ? ZBP_STEP_TRANSPOSITION : ZBP_STEP_VIEW;
  }
  if (auto* n = as<gen::ToCopyBackward0>(node)) {
    const bool moves = n->self_options.device() != node.input_metadata(0).device();
    return moves ? ZBP_STEP_NONE : ZBP_STEP_CAST;
  }
  if (auto* n = as<gen::TransposeBackward0>(node)) {
    const bool transposes = dims <= 3 && are_last_two(n->dim0, n->dim1, dims);
    return transposes ? ZBP_STEP_TRANSPOSITION : ZBP_STEP_VIEW;
  }
  if (auto* n = as<gen::PermuteBackward0>(node)) {
    return dims == 2 && n->dims[0] % 2 != 0 ? ZBP_STEP_TRANSPOSITION : ZBP_STEP_VIEW;
  }
  const c10::SymIntArrayRef behind = shape_behind(node);
  if (behind.equals(shape)) {
    return ZBP_STEP_NOTHING;  // as what matmul puts before batches that it need not expand
  }
  return as<gen::ExpandBackward0>(node) ? ZBP_STEP_NONE : ZBP_STEP_VIEW;
}

/// The gradient that the node, a plain step, gives for `grad`.
at::Tensor step_back(Node& node, const at::Tensor& grad) {
  if (auto* n = as<gen::ToCopyBackward0>(node)) {
    const auto type = c10::typeMetaToScalarType(n->self_options.dtype());
    return (c10::isComplexType(type) || !grad.is_complex() ? grad : at::real(grad)).to(type);
  }
  if (as<gen::TBackward0>(node)) {
    return grad.t();
  }
  if (auto* n = as<gen::TransposeBackward0>(node)) {
    return grad.transpose(n->dim0, n->dim1);
  }
  if (auto* n = as<gen::PermuteBackward0>(node)) {
    std::vector<int64_t> back(n->dims.size());
    for (size_t d = 0; d < back.size(); ++d) {
      back[c10::maybe_wrap_dim(n->dims[d], static_cast<int64_t>(back.size()))] =
          static_cast<int64_t>(d);
    }
    return grad.permute(back);
  }
  return grad.reshape_symint(shape_behind(node));
}

}  // namespace

bool is_layout(Node& node) {
  return node.num_inputs() == 1 && node.num_outputs() == 1 &&
         !node.input_metadata(0).is_nested_tensor() &&
         is_one_of<gen::TBackward0, gen::TransposeBackward0, gen::PermuteBackward0,
                   gen::ToCopyBackward0, gen::ViewBackward0, gen::UnsafeViewBackward0,
                   gen::ReshapeAliasBackward0, gen::UnsqueezeBackward0, gen::SqueezeBackward0,
                   gen::SqueezeBackward1, gen::SqueezeBackward2, gen::ExpandBackward0,
                   gen::AliasBackward0, gen::CloneBackward0>(node) &&
         !is_distrusted(node);
}

zbp_fact fact_of_split(Node& node) {
  zbp_fact fact{};
  fact.sequence_nr = node.sequence_nr();
  bool is_packed = false;
  if (!node.post_hooks().empty()) {
    fact.flag = ZBP_FACT_POST_HOOK;
  } else if (const auto separable = separate(node)) {
    fact.type = is_distrusted(node) ? ZBP_TYPE_DISAGREES : ZBP_TYPE_SEPARABLE;
    if (separable->has_factors && fact.type == ZBP_TYPE_SEPARABLE) {
      fact.type = separable->is_product ? ZBP_TYPE_PRODUCT : ZBP_TYPE_FACTORS;
      fact.left_slot = static_cast<uint8_t>(separable->parts[0].own_slot);
      const auto is_matrix_at = [&node](size_t slot) {
        return node.next_edge(slot).is_valid() && is_matrix(node.next_edge(slot));
      };
      fact.flag |= is_matrix_at(fact.left_slot) ? ZBP_FACT_LEFT_MATRIX : 0;
      fact.flag |= is_matrix_at(fact.left_slot + size_t{1}) ? ZBP_FACT_RIGHT_MATRIX : 0;
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
  return step_of(node) != ZBP_STEP_NONE && !has_hooks(node);
}

bool saves_nothing(Node& node) {
  return is_layout(node) ||
         (is_one_of<gen::AddBackward0, gen::SubBackward0>(node) && !is_distrusted(node));
}

bool has_saved_nothing(Node& node) {
  return is_python_function(node) ? Saver(node).all().empty() : saves_nothing(node);
}

at::Tensor along_path(const Task& task, size_t f, at::Tensor grad) {
  // What comes out does not know of what it is a view. In W's mode (no grad) a view would keep its
  // base, and look as if somebody else had its memory.
  const at::AutoDispatchBelowADInplaceOrView no_view;
  for (Node* node : path_of(task, f)) {
    grad = step_back(*node, grad);
  }
  return grad;
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
