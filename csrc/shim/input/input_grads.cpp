// Whose memory the gradient of a stage input has.

#include "shim/group/dtensor.h"
#include "shim/input/scene.h"

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

/// The memory of inputs' gradients that a task has too, or one of the caller's output gradients.
std::unordered_set<const void*> memory_in_use(const InputPassArgs& args, const variable_list& grads,
                                              const std::vector<GroupPtr>& groups) {
  std::unordered_set<const void*> candidates, in_use;
  for (const at::Tensor& grad : grads) {
    candidates.insert(memory_of(grad));
  }
  candidates.erase(nullptr);
  const auto note = [&](const at::Tensor& tensor) {
    if (const void* memory = memory_of(tensor); candidates.count(memory)) {
      in_use.insert(memory);
    }
  };
  for (const at::Tensor& grad : args.root_grads) {
    note(grad);
  }
  for (const GroupPtr& group : groups) {
    for (const Task& task : group->tasks) {
      for_each_kept(task, [&](const Kept& kept, auto&&...) { note(kept.tensor()); });
    }
  }
  return in_use;
}

/// What the captures, the list and an input that retains its gradient have of it.
Holders known_holders(const InputPassArgs& args, const variable_list& grads,
                      const Captures& captures) {
  Holders holders(grads);
  for (const auto& [id, capture] : captures) {
    for (const at::Tensor& grad : capture->grads) {
      holders.add(grad);
    }
  }
  for (const at::Tensor& input : args.inputs) {
    if (input.retains_grad()) {
      holders.add(input.grad());
    }
  }
  return holders;
}

}  // namespace

variable_list input_grads(const InputPassArgs& args, const Walk& walk, const Captures& captures,
                          const std::vector<GroupPtr>& groups) {
  variable_list grads;
  for (const Edge& edge : walk.input_edges()) {
    const at::Tensor grad = captured(edge, walk, captures);
    grads.push_back(grad.defined() && grad.requires_grad() ? grad.detach() : grad);
  }
  const auto in_use = memory_in_use(args, grads, groups);
  const Holders holders = known_holders(args, grads, captures);
  std::unordered_map<const void*, const Edge*> owner;  // by memory
  std::vector<size_t> others;
  for (size_t i = 0; i < grads.size(); ++i) {
    const void* const memory = memory_of(grads[i]);
    if (!memory) {
      continue;
    }
    const Edge& edge = walk.input_edges()[i];
    const auto [found, is_first] = owner.try_emplace(memory, &edge);
    const bool is_others = in_use.count(memory) || !(is_first || *found->second == edge) ||
                           overlaps_itself(local_part(grads[i]));
    if (is_others || holders.has_others(grads[i])) {
      others.push_back(i);
    }
  }
  for (const size_t i : others) {
    if (const auto here = stream_here(grads[i])) {
      record(grads[i], *here);  // the caller's, which waits for those of the captures
    }
    grads[i] = grads[i].clone();
  }
  return grads;
}

}  // namespace zbp
