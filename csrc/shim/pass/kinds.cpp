#include "shim/pass/kinds.h"

#include <algorithm>

#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>

#include "shim/pass/path.h"
#include "shim/torch/separable.h"
#include "shim/torch/python.h"

namespace zbp {

namespace gen = torch::autograd::generated;
using torch::autograd::SavedVariable;

namespace {

bool has_packed_part(const Separable& separable) {
  return std::any_of(separable.parts.begin(), separable.parts.end(),
                     [](const Part& part) { return part.saved->has_hooks(); });
}

}  // namespace

zbp_fact fact_of_split(Node& node) {
  zbp_fact fact{};
  fact.sequence_nr = node.sequence_nr();
  if (!node.post_hooks().empty()) {
    fact.flag = ZBP_FACT_POST_HOOK;
  } else if (const auto separable = separate(node)) {
    fact.type = ZBP_TYPE_SEPARABLE;
    if (separable->has_factors) {
      fact.type = separable->is_plain_product ? ZBP_TYPE_PRODUCT : ZBP_TYPE_FACTORS;
      fact.left_slot = static_cast<uint8_t>(separable->parts[0].own_slot);
    }
    fact.flag = has_packed_part(*separable) ? ZBP_FACT_PACKED : 0;
  } else if (is_python_function(node)) {
    fact.type = ZBP_TYPE_FUNCTION;
    const auto saved = saved_by(node);
    const bool is_packed = std::any_of(saved.begin(), saved.end(),
                                       [](const SavedVariable* one) { return one->has_hooks(); });
    fact.flag = is_packed ? ZBP_FACT_PACKED : 0;
  }
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

bool saved_nothing(Node& node) {
  if (is_python_function(node)) {
    THPObjectPtr context(torch::autograd::functionToPyObject(ref_of(node)));
    return context && reinterpret_cast<THPFunction*>(context.get())->saved_variables.empty();
  }
  return as<gen::AddBackward0>(node) || as<gen::SubBackward0>(node);
}

}  // namespace zbp
