// The gradients of stage inputs: whose memory they have, and how they come into the inputs' .grad.

#include <ATen/core/grad_mode.h>

#include "shim/engine/engine.h"
#include "shim/group/dtensor.h"
#include "shim/input/scene.h"
#include "shim/torch/gil.h"

namespace zbp {

namespace impl = torch::autograd::impl;

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

/// Null where the run did not come.
const at::Tensor* captured(const Edge& edge, const Walk& walk, const Captures& captures) {
  const auto capture = edge.is_valid() ? captures.find(walk.id_of(edge)) : captures.end();
  const bool reached = capture != captures.end() && !capture->second->grads.empty();
  return reached ? &capture->second->grads[edge.input_nr] : nullptr;
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

void add_to(const at::Tensor& input, const at::Tensor& grad) {
  at::Tensor& sum = input.mutable_grad();
  if (!sum.defined()) {
    sum = grad;
  } else if (grad.defined()) {
    record_here(grad);
    const at::AutoGradMode no_grad(false);
    if (sum.is_sparse() && !grad.is_sparse()) {
      sum = grad + sum;
    } else {
      sum.add_(grad);
    }
  }
}

/// At once, where there is neither a sum, nor a hook, nor another thread. Else false.
bool adds_at_once(const at::Tensor& leaf, Node& accumulator, const at::Tensor& grad) {
  const std::unique_lock<std::mutex> lock(NodeParts::mutex_of(accumulator), std::try_to_lock);
  if (!lock || leaf.grad().defined() || impl::post_acc_grad_hooks(leaf) ||
      !accumulator.post_hooks().empty()) {
    return false;
  }
  add_to(leaf, grad);
  return true;
}

/// Takes the place of a leaf's accumulator behind the capture: on its stream, under its lock.
class InputSink : public InPlaceOf {
 public:
  InputSink(const at::Tensor& leaf, NodePtr accumulator)
      : InPlaceOf(std::move(accumulator), UINT64_MAX), leaf_(leaf) {}

 protected:
  variable_list apply(variable_list&& grads) override {
    {
      const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(*original_));
      add_to(leaf_, grads[0]);
    }
    if (const auto& hook = impl::post_acc_grad_hooks(leaf_)) {
      (*hook)(leaf_);
    }
    call_post_hooks(*original_, {}, grads);
    return {};
  }

 private:
  const at::Tensor leaf_;
};

}  // namespace

variable_list input_grads(const InputPassArgs& args, const Walk& walk, const Captures& captures,
                          const std::vector<GroupPtr>& groups) {
  variable_list grads;
  for (const Edge& edge : walk.input_edges()) {
    const at::Tensor* const found = captured(edge, walk, captures);
    grads.push_back(!found ? at::Tensor() : found->requires_grad() ? found->detach() : *found);
  }
  const auto in_use = memory_in_use(args, grads, groups);
  const Holders holders = known_holders(args, grads, captures);
  std::unordered_map<const void*, const at::Tensor*> owner;  // by memory
  std::vector<size_t> others;
  for (size_t i = 0; i < grads.size(); ++i) {
    const void* const memory = memory_of(grads[i]);
    if (!memory) {
      continue;
    }
    const auto [found, is_first] = owner.try_emplace(memory, &args.inputs[i]);
    const bool is_others = in_use.count(memory) ||
                           !(is_first || found->second->is_same(args.inputs[i])) ||
                           overlaps_itself(local_part(grads[i]));
    if (is_others || holders.has_others(grads[i])) {
      others.push_back(i);
    }
  }
  for (const size_t i : others) {
    record_here(grads[i]);  // the caller's stream, which waits for those of the captures
    grads[i] = grads[i].clone();
  }
  return grads;
}

void add_input_grads(const InputPassArgs& args, const Walk& walk, const Captures& captures,
                     const variable_list& grads) {
  std::unordered_set<const void*> seen;
  edge_list sinks;
  variable_list of_sinks;
  for (size_t i = 0; i < grads.size(); ++i) {
    const at::Tensor& input = args.inputs[i];
    const Edge& edge = walk.input_edges()[i];
    if (!captured(edge, walk, captures) || !seen.insert(input.unsafeGetTensorImpl()).second) {
      continue;
    }
    if (!input.is_leaf()) {
      if (!input.retains_grad()) {  // else its own hook has done it
        add_to(input, grads[i]);
      }
    } else if (!adds_at_once(input, *edge.function, grads[i])) {
      sinks.emplace_back(make_node<InputSink>(input, edge.function), 0);
      of_sinks.push_back(grads[i]);
    }
  }
  if (!sinks.empty()) {
    const ReleaseGil no_gil;
    run_engine(std::move(sinks), std::move(of_sinks), {}, /*keep_graph=*/false);
  }
}

}  // namespace zbp
