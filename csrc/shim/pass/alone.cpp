// A gradient that is all its weight is owed, on its way there without the engine: zbp_add_alone of zbp_weight.h.

#include <optional>

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>

#include "shim/pass/product.h"
#include "shim/pass/weight_nodes.h"
#include "shim/pass/zbp_weight.h"
#include "shim/torch/error.h"
#include "shim/torch/nodes.h"
#include "shim/torch/ranges.h"
#include "shim/work/work.h"

using namespace zbp;

namespace {

/// The gradient that the face gives to its weight, as the accumulator expects it.
at::Tensor checked_grad(const Task& task, size_t i, const Weight& weight) {
  variable_list none;
  variable_list grad{face_grad(task, i, none)};
  torch::autograd::validate_outputs(
      {Edge(weight.accumulator, 0)}, grad,
      [](const std::string& message) { return "a weight task returned an " + message; });
  return std::move(grad[0]);
}

/// Whether a product can be added in place to the gradient that the weight has.
bool takes_product(const Weight& weight, zbp_how how) {
  const at::Tensor& grad = sum_of(weight);
  const at::Tensor& variable = weight.accumulator->variable;
  return grad.defined() && !grad.requires_grad() && !grad.is_complex() &&
         is_subclass(grad) == is_subclass(variable) && grad.sizes().equals(variable.sizes()) &&
         (weight.main_grad.defined() || grad.scalar_type() == variable.scalar_type() ||
          (how.fuse &&
           c10::promoteTypes(grad.scalar_type(), variable.scalar_type()) == grad.scalar_type()));
}

/// False, and nothing was done, if the face's gradient is no product or cannot be added so.
/// The accumulator's mutex is taken before the GIL, which a DTensor may ask for: as in libtorch's own accumulation.
bool add_product(const Weight& weight, const Task& task, size_t i, zbp_how how) {
  if (!is_product(task, task.plan(i))) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(*weight.accumulator));
  return takes_product(weight, how) &&
         add_in_place(sum_of(weight), weight.accumulator->variable.scalar_type(), task, i, how);
}

void add_alone(Group& group, uint32_t face, zbp_how how) {
  const ProfiledRange range("zbpipe::group");
  Task& task = group.tasks[group.layout.face[face].task];
  Weight& weight = group.weights[group.layout.face[face].weight];
  const size_t i = face - task.plan().face_begin;
  const c10::OptionalStreamGuard stream(
      task.place ? std::optional<c10::Stream>(task.place->stream()) : std::nullopt);
  if (add_product(weight, task, i, how)) {
    return;
  }
  Watched* const kept = how.retain ? nullptr : only_kept_grad(task, i);
  accumulate(weight, checked_grad(task, i, weight), kept);
  if (kept) {
    kept->reset();  // it is added: a retry does not ask for it
  }
}

}  // namespace

int zbp_add_alone(zbp_group* group, uint32_t face, zbp_how how, zbp_error* error) {
  return kept_in(error, [&] { add_alone(group_of(group), face, how); });
}
