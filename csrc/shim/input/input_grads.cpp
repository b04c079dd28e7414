// Whose memory the gradient of a stage input has.

#include <algorithm>

#include "shim/group/dtensor.h"
#include "shim/torch/nodes.h"
#include "shim/input/scene.h"
#include "shim/input/walk.h"

namespace zbp {

namespace {

/// True if several elements lie, or may lie, in one place, as after expand(): nobody could add to
/// them in place.
bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || is_subclass(tensor) || tensor.is_nested() ||
      tensor.sym_numel() == 0) {
    return false;
  }
  SmallVector<std::pair<c10::SymInt, c10::SymInt>, 5> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.sym_size(d) != 1) {
      dims.emplace_back(tensor.sym_stride(d), tensor.sym_size(d));
    }
  }
  std::sort(dims.begin(), dims.end());
  c10::SymInt farthest = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= farthest) {
      return true;
    }
    farthest = farthest + stride * (size - 1);
  }
  return false;
}

at::Tensor captured(const Edge& edge, const Walk& walk, const Captures& captures) {
  if (!edge.is_valid()) {
    return {};
  }
  const auto capture = captures.find(walk.id_of(edge));
  const bool reached = capture != captures.end() && !capture->second->grads.empty();
  return reached ? capture->second->grads[edge.input_nr] : at::Tensor();
}

/// Those of the inputs' gradients that a task has too, or one of the caller's output gradients.
std::unordered_set<const void*> storages_in_use(const InputPassArgs& args, const Captures& captures,
                                                const std::vector<GroupPtr>& groups) {
  std::unordered_set<const void*> candidates;
  for (const auto& [id, capture] : captures) {
    for (const at::Tensor& grad : capture->grads) {
      candidates.insert(storage_of(grad));
    }
  }
  std::unordered_set<const void*> in_use;
  const auto note = [&](const at::Tensor& tensor) {
    if (const void* storage = storage_of(tensor); candidates.count(storage)) {
      in_use.insert(storage);
    }
  };
  for (const at::Tensor& grad : args.root_grads) {
    note(grad);
  }
  for (const GroupPtr& group : groups) {
    for (const Task& task : group->tasks) {
      for_each_watched(task, [&](const Watched& watched, auto&&...) { note(watched.tensor()); });
    }
  }
  in_use.erase(nullptr);
  return in_use;
}

}  // namespace

variable_list input_grads(const InputPassArgs& args, const Walk& walk, const Captures& captures,
                          const std::vector<GroupPtr>& groups) {
  const auto shared = storages_in_use(args, captures, groups);
  std::unordered_map<const void*, const void*> owner;  // storage -> the input's node that has it
  variable_list grads;
  for (const Edge& edge : walk.input_edges()) {
    at::Tensor& grad = grads.emplace_back(captured(edge, walk, captures));
    const void* storage = storage_of(grad);
    if (!storage) {
      continue;
    }
    grad = grad.requires_grad() ? grad.detach() : grad;
    const auto [found, is_first] = owner.try_emplace(storage, edge.function.get());
    const bool is_others =
        shared.count(storage) || (!is_first && found->second != edge.function.get());
    if (is_others || overlaps_itself(local_part(grad))) {
      grad = grad.clone();
    }
  }
  return grads;
}

}  // namespace zbp
