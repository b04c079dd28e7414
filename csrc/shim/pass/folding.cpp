#include "shim/pass/folding.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>

#include "core/pass/zbp_policy.h"
#include "shim/torch/nodes.h"

namespace zbp {

namespace {

bool may_fold(const Group& group, const Task& task, const zbp_face& face) {
  return task.kind() == Kind::whole && !task.can_run_again &&
         task.plan().takes_work == ZBP_DEFER_NOTHING && (face.flag & ZBP_FACE_SIMPLE) != 0 &&
         !is_subclass(group.weights[face.weight].accumulator->variable);
}

bool fits_with(const zbp_layout& layout, uint32_t a, uint32_t b) {
  return layout.face[a].task != layout.face[b].task &&
         layout.task[layout.face[a].task].stream == layout.task[layout.face[b].task].stream;
}

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

/// Adds the gradient at the face to the sum, which stands at the first one. False if it cannot be added.
bool add_next(Group& group, Fold& fold) {
  Watched& first = kept_at(group, fold.face[0]);
  Watched& next = kept_at(group, fold.face[fold.next]);
  if (!next.tensor().defined()) {
    return true;
  }
  if (!first.tensor().defined()) {
    return false;
  }
  const zbp_face& to = group.layout.face[fold.face[0]];
  const zbp_face& from = group.layout.face[fold.face[fold.next]];
  const at::AutoGradMode no_grad(false);
  const bool is_turned = ((to.flag ^ from.flag) & ZBP_FACE_TRANSPOSED) != 0;
  const at::Tensor grad = is_turned ? next.tensor().t() : next.tensor();
  if (!can_add(first.tensor(), grad, group.weights[to.weight].accumulator->variable)) {
    return false;
  }
  const at::Tensor sum = fold.is_own ? first.tensor().add_(grad) : first.tensor() + grad;
  fold.is_own = true;
  first = Watched(sum);
  next.reset();
  return true;
}

}  // namespace

void plan_folds(Group& group) {
  const zbp_layout& layout = group.layout;
  if (layout.task_count < 2) {
    return;
  }
  std::vector<Fold> of_weight(layout.weight_count);
  std::vector<bool> is_over(layout.weight_count);
  std::vector<uint32_t> order(2 * size_t{layout.task_count});
  zbp_layout_order(&layout, order.data());
  const auto leads_directly = [&](uint32_t t) {
    return std::all_of(layout.face + layout.task[t].face_begin,
                       layout.face + layout.task[t].face_end,
                       [](const zbp_face& face) { return face.weight >= 0; });
  };
  for (uint32_t t = 0; t < layout.task_count && leads_directly(order[t]); ++t) {
    const Task& task = group.tasks[order[t]];
    for (uint32_t f = task.plan().face_begin; f < task.plan().face_end; ++f) {
      const zbp_face& face = layout.face[f];
      Fold& fold = of_weight[face.weight];
      is_over[face.weight] = is_over[face.weight] || !may_fold(group, task, face) ||
                             (!fold.face.empty() && !fits_with(layout, fold.face.back(), f));
      if (!is_over[face.weight]) {
        fold.face.push_back(f);
      }
    }
  }
  for (uint32_t w = 0; w < layout.weight_count; ++w) {
    if (of_weight[w].face.size() > 1) {
      group.fold_of_face.resize(layout.face_count, ZBP_NONE);
      for (const uint32_t f : of_weight[w].face) {
        group.fold_of_face[f] = static_cast<uint32_t>(group.folds.size());
      }
      group.folds.push_back(std::move(of_weight[w]));
    }
  }
  group.has_come.resize(group.fold_of_face.size());
}

void fold_kept(Group& group, Task& task) {
  if (group.folds.empty()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(group.folding_mutex);
  for (uint32_t f = task.plan().face_begin; f < task.plan().face_end; ++f) {
    group.has_come[f] = true;
    if (group.fold_of_face[f] == ZBP_NONE) {
      continue;
    }
    Fold& fold = group.folds[group.fold_of_face[f]];
    while (fold.next < fold.face.size() && group.has_come[fold.face[fold.next]]) {
      if (fold.next > 0 && !add_next(group, fold)) {
        fold.face.resize(fold.next);  // what is left stays where it is
        break;
      }
      ++fold.next;
    }
  }
}

}  // namespace zbp
