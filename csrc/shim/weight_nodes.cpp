#include "shim/weight_nodes.h"

#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "shim/stand_in.h"

namespace zbp {

using torch::autograd::AccumulateGrad;

Start::Start(edge_list&& tasks) : Node(UINT64_MAX, std::move(tasks)) {
  add_input_metadata(at::TensorOptions(at::kFloat), {}, false, false, at::kFloat);
}

variable_list Start::apply(variable_list&& /*grads*/) {
  return variable_list(num_outputs());
}

TaskNode::TaskNode(GroupPtr group, size_t task)
    : Node(group->tasks[task].sequence_nr), group_(std::move(group)), task_(task) {
  const Task& t = group_->tasks[task_];
  if (t.place) {
    input_metadata_.emplace_back(*t.place);
  } else {
    add_input_metadata(undefined_input());
  }
}

std::string TaskNode::name() const {
  const Task& t = group_->tasks[task_];
  return t.node ? t.node->name() : "zbpipe::TaskNode";
}

variable_list TaskNode::apply(variable_list&& /*grads*/) {
  return compute_task(group_->tasks[task_]);
}

Sink::Sink(GroupPtr group, size_t weight, bool retain, bool release)
    : Node(UINT64_MAX),
      group_(std::move(group)),
      weight_(weight),
      retain_(retain),
      release_(release) {
  NodeParts::copy_identity(*this->weight().accumulator, *this);
}

std::string Sink::name() const {
  return group_->weights[weight_].accumulator->name();
}

variable_list Sink::apply(variable_list&& grads) {
  AccumulateGrad& accumulator = *weight().accumulator;
  variable_list in =
      call_pre_hooks(accumulator, call_tensor_hooks(accumulator, std::move(grads)));
  // As in the engine: an accumulator with post hooks expects them to hold one more reference.
  const variable_list inputs = accumulator.post_hooks().empty() ? variable_list() : in;

  Watched* kept = nullptr;
  if (served.size() == 1 && !retain_) {
    Task& task = group_->tasks[served[0].first];
    kept = task.kind == Kind::whole ? &task.kept[served[0].second] : nullptr;
  }
  at::Tensor grad = std::move(in[0]);
  in.clear();
  accumulate(weight(), std::move(grad), kept);

  weight().added = true;
  for (const auto& [task, face] : served) {
    group_->tasks[task].face[face].delivered = true;
  }
  if (group_->missing.fetch_sub(1) == 1 && release_) {
    group_->release();
  }
  call_post_hooks(accumulator, {}, inputs);
  return {};
}

void accumulate(Weight& weight, at::Tensor grad, Watched* kept) {
  AccumulateGrad& accumulator = *weight.accumulator;
  const bool can_be_taken = kept && grad.defined() && grad.has_storage() &&
      kept->tensor().is_same(grad) && !accumulator.variable.grad().defined() &&
      grad.storage().use_count() == 1 &&
      torch::autograd::utils::obeys_layout_contract(grad, accumulator.variable);
  if (can_be_taken) {
    kept->reset();
  }
  variable_list grads;
  grads.push_back(std::move(grad));
  accumulator.apply(std::move(grads));
}

}  // namespace zbp
