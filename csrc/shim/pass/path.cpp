#include "shim/pass/path.h"

#include <algorithm>

#include <ATen/TensorUtils.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/generated/Functions.h>

#include "core/pass/zbp_facts.h"
#include "shim/torch/nodes.h"

namespace zbp {

namespace gen = torch::autograd::generated;

namespace {

bool swaps_two(int64_t a, int64_t b) {
  return (a - b) % 2 != 0;
}

/// What the node made of `tensor` in the forward, if that is a view of it.
std::optional<at::Tensor> view_forward(Node& node, const at::Tensor& tensor) {
  const auto& metadata = node.input_metadata(0);
  if (as<gen::TBackward0>(node)) {
    return tensor.t();
  }
  if (auto* n = as<gen::TransposeBackward0>(node)) {
    return tensor.transpose(n->dim0, n->dim1);
  }
  if (auto* n = as<gen::PermuteBackward0>(node)) {
    return tensor.permute(n->dims);
  }
  if (as<gen::ToCopyBackward0>(node) || as<gen::AliasBackward0>(node) ||
      as<gen::CloneBackward0>(node)) {
    return tensor;
  }
  // All others keep the elements' order: a view in the node's shape, if the strides allow one.
  const auto shape = c10::asIntArrayRefSlowOpt(metadata.shape_as_dim_vector());
  if (!shape || c10::multiply_integers(*shape) != tensor.numel()) {
    return std::nullopt;
  }
  const auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), *shape);
  return strides ? std::optional(tensor.as_strided(*shape, *strides)) : std::nullopt;
}

bool is_column_major(const std::vector<c10::SymInt>& sizes,
                     const std::vector<c10::SymInt>& strides) {
  return strides.size() == 2 && strides[0] == 1 && strides[1] == sizes[0];
}

}  // namespace

uint8_t step_of(Node& node) {
  if (node.num_inputs() != 1 || node.num_outputs() != 1 ||
      node.input_metadata(0).is_nested_tensor()) {
    return ZBP_STEP_NONE;
  }
  const auto dim = [&] { return node.input_metadata(0).shape_as_dim_vector().size(); };
  if (as<gen::TBackward0>(node)) {
    return dim() == 2 ? ZBP_STEP_TRANSPOSITION : ZBP_STEP_OTHER;
  }
  if (auto* n = as<gen::ToCopyBackward0>(node)) {
    const bool moves = n->self_options.device() != node.input_metadata(0).device();
    return moves ? ZBP_STEP_MOVE : ZBP_STEP_CAST;
  }
  if (auto* n = as<gen::TransposeBackward0>(node)) {
    return dim() == 2 && swaps_two(n->dim0, n->dim1) ? ZBP_STEP_TRANSPOSITION : ZBP_STEP_OTHER;
  }
  if (auto* n = as<gen::PermuteBackward0>(node)) {
    const bool transposes =
        n->dims.size() == 2 && swaps_two(n->dims[0], n->dims[1]) && n->dims[0] % 2 != 0;
    return transposes ? ZBP_STEP_TRANSPOSITION : ZBP_STEP_OTHER;
  }
  const bool is_known = as<gen::ViewBackward0>(node) || as<gen::UnsafeViewBackward0>(node) ||
                        as<gen::ReshapeAliasBackward0>(node) || as<gen::UnsqueezeBackward0>(node) ||
                        as<gen::SqueezeBackward0>(node) || as<gen::SqueezeBackward1>(node) ||
                        as<gen::SqueezeBackward2>(node) || as<gen::ExpandBackward0>(node) ||
                        as<gen::AliasBackward0>(node) || as<gen::CloneBackward0>(node);
  return is_known ? ZBP_STEP_OTHER : ZBP_STEP_NONE;
}

bool is_multiplied_transposed(const Task& task) {
  if (auto* n = as<gen::AddmmBackward0>(*task.node)) {
    return task.weight_is_left ? is_column_major(n->mat1_sym_sizes, n->mat1_sym_strides)
                               : is_column_major(n->mat2_sym_sizes, n->mat2_sym_strides);
  }
  if (auto* n = as<gen::MmBackward0>(*task.node)) {
    return task.weight_is_left ? is_column_major(n->self_sym_sizes, n->self_sym_strides)
                               : is_column_major(n->mat2_sym_sizes, n->mat2_sym_strides);
  }
  return false;  // products of batches are not
}

bool is_plain_step(Node& node) {
  return step_of(node) != ZBP_STEP_NONE && node.next_edge(0).is_valid() && !has_hooks(node);
}

bool saves_nothing(Node& node) {
  return step_of(node) != ZBP_STEP_NONE || as<gen::AddBackward0>(node) ||
         as<gen::SubBackward0>(node);
}

at::Tensor take_along(const Face& face, at::Tensor grad) {
  variable_list grads{std::move(grad)};
  const auto check = [&](const Edge& edge) {
    torch::autograd::validate_outputs({edge}, grads, [&](const std::string& message) {
      return "a weight task, on the way to its weight, returned an " + message;
    });
  };
  check(face.edge);
  for (Node* node : face.path) {
    if (!grads[0].defined()) {
      break;
    }
    grads = NodeParts::apply_without_views_to(*node, std::move(grads));
    check(node->next_edge(0));
  }
  return std::move(grads[0]);
}

std::optional<at::Tensor> view_along(const Face& face, const at::Tensor& tensor) {
  std::optional<at::Tensor> view = tensor;
  for (auto node = face.path.rbegin(); view && node != face.path.rend(); ++node) {
    view = view_forward(**node, *view);
  }
  return view;
}

}  // namespace zbp
