#include "shim/pass/folding.h"

#include <ATen/core/grad_mode.h>

#include "shim/torch/error.h"
#include "shim/torch/nodes.h"

namespace zbp {

namespace {

Watched& kept_at(Group& group, uint32_t face) {
  Task& task = group.tasks[group.layout.face[face].task];
  return task.kept[face - task.plan().face_begin];
}

/// False if the two are not plainly added, or are cast on their way to the weight.
bool can_add(const at::Tensor& sum, const at::Tensor& grad, const at::Tensor& weight) {
  return !is_subclass(sum) && !is_subclass(grad) && sum.sizes().equals(grad.sizes()) &&
         sum.scalar_type() == weight.scalar_type() && grad.scalar_type() == weight.scalar_type() &&
         sum.device() == grad.device();
}

/// ZBP_FOLD_*.
int add(Group& group, const zbp_fold_step& step) {
  Watched& sum = kept_at(group, step.sum);
  Watched& next = kept_at(group, step.next);
  if (!next.tensor().defined()) {
    return ZBP_FOLD_EMPTY;
  }
  if (!sum.tensor().defined()) {
    return ZBP_FOLD_ENDS;
  }
  const zbp_face& to = group.layout.face[step.sum];
  const zbp_face& from = group.layout.face[step.next];
  const at::AutoGradMode no_grad(false);
  const bool is_turned = ((to.flag ^ from.flag) & ZBP_FACE_TRANSPOSED) != 0;
  const at::Tensor grad = is_turned ? next.tensor().t() : next.tensor();
  if (!can_add(sum.tensor(), grad, group.weights[to.weight].accumulator->variable)) {
    return ZBP_FOLD_ENDS;
  }
  sum = Watched(step.is_own ? sum.tensor().add_(grad) : sum.tensor() + grad);
  next.reset();
  return ZBP_FOLD_ADDED;
}

}  // namespace

void plan_folds(Group& group) {
  if (group.tasks.size() < 2) {
    return;
  }
  c10::SmallVector<bool, 16> is_bound;
  c10::SmallVector<bool, 16> is_plain;
  for (const Task& task : group.tasks) {
    is_bound.push_back(!task.can_run_again);
  }
  for (const Weight& weight : group.weights) {
    is_plain.push_back(!is_subclass(weight.accumulator->variable));
  }
  check_status(
      zbp_folds_init(&group.folds, &group.layout, is_bound.data(), is_plain.data(), nullptr));
}

void fold_kept(Group& group, Task& task) {
  if (group.folds.face_count == 0) {
    return;
  }
  const std::lock_guard<std::mutex> lock(group.folds_mutex);
  for (uint32_t f = task.plan().face_begin; f < task.plan().face_end; ++f) {
    zbp_folds_come(&group.folds, f);
    for (zbp_fold_step step; zbp_folds_step(&group.folds, f, &step);) {
      zbp_folds_done(&group.folds, &step, add(group, step));
    }
  }
}

}  // namespace zbp
