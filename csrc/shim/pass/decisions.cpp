#include "shim/pass/decisions.h"

#include <algorithm>

#include "shim/torch/python.h"
#include "shim/pass/walk.h"

namespace zbp {

using torch::autograd::AccumulateGrad;

namespace {

Decision decision_of(int defer, int checkpoint) {
  return {static_cast<Decision::Defer>(defer), static_cast<Decision::Hooked>(checkpoint)};
}

Decision combine(Decision a, Decision b) {
  return {std::max(a.defer, b.defer), std::min(a.hooked, b.hooked)};
}

/// What any other decision wins over.
Decision none() {
  return decision_of(ZBP_DEFER_NOTHING, ZBP_CHECKPOINT_INPUT_PASS);
}

}  // namespace

Answers::Answers(const InputPassArgs& args)
    : for_all_(decision_of(args.policy.defer, args.policy.checkpoint)) {
  const zbp_policy& policy = args.policy;
  if (!policy.defer_of && !policy.checkpoint_of) {
    return;
  }
  {
    const Walk walk(args);
    const zbp_plan& plan = walk.plan();
    for (uint32_t i = 0; i < plan.weight_begin[plan.group_count]; ++i) {
      accumulators_.push_back(ref_of(walk.node(plan.weight[i])));
    }
  }
  for (const NodePtr& node : accumulators_) {
    const at::Tensor& parameter = static_cast<AccumulateGrad&>(*node).variable;
    weight_[node.get()] = decision_of(
        policy.defer_of ? ask(policy.defer_of, parameter) : policy.defer,
        policy.checkpoint_of ? ask(policy.checkpoint_of, parameter) : policy.checkpoint);
  }
}

Decision Answers::of(const Weight& weight) const {
  const auto found = weight_.find(weight.accumulator.get());
  return found == weight_.end() ? for_all_ : found->second;
}

Decisions::Decisions(const Answers& answers, const Group& group)
    : differ_(answers.differ()), for_all_(answers.for_all()) {
  if (differ_) {
    for (const Weight& weight : group.weights) {
      weight_.push_back(answers.of(weight));
    }
    decide_outside(group);
  }
}

Decision Decisions::of(const Task& task) const {
  if (!differ_) {
    return for_all_;
  }
  Decision decision = none();
  for (size_t f = 0; f < task.face.size(); ++f) {
    decision = combine(decision, behind(task.plan(f).weight, task.plan(f).outside));
  }
  return decision;
}

Decision Decisions::behind(int32_t weight, int32_t outside) const {
  return weight >= 0 ? weight_[weight] : outside_[outside];
}

// Each node once, after all that it leads to: linear, whatever the tasks share.
void Decisions::decide_outside(const Group& group) {
  enum class State : uint8_t { unseen, open, decided };
  std::vector<State> state(group.outside.size(), State::unseen);
  outside_.assign(group.outside.size(), none());
  std::vector<size_t> pending;
  for (size_t first = 0; first < group.outside.size(); ++first) {
    pending.push_back(first);
    while (!pending.empty()) {
      const size_t i = pending.back();
      const auto [begin, end] = hops_of(group.layout, i);
      if (state[i] == State::unseen) {
        state[i] = State::open;
        for (const zbp_hop* hop = begin; hop != end; ++hop) {
          if (hop->to_weight < 0 && state[hop->to_outside] == State::unseen) {
            pending.push_back(hop->to_outside);
          }
        }
        continue;
      }
      pending.pop_back();
      if (state[i] == State::open) {
        state[i] = State::decided;
        for (const zbp_hop* hop = begin; hop != end; ++hop) {
          outside_[i] = combine(outside_[i], behind(hop->to_weight, hop->to_outside));
        }
      }
    }
  }
}

}  // namespace zbp
