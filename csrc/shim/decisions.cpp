#include "shim/decisions.h"

#include <algorithm>

#include "shim/python.h"

namespace zbp {

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

Decisions::Decisions(const zbp_policy& policy, const Group& group)
    : asks_(policy.defer_of || policy.checkpoint_of),
      for_all_(decision_of(policy.defer, policy.checkpoint)) {
  if (!asks_) {
    return;
  }
  for (const Weight& weight : group.weights) {
    const at::Tensor& parameter = weight.accumulator->variable;
    weight_.push_back(decision_of(
        policy.defer_of ? ask(policy.defer_of, parameter) : policy.defer,
        policy.checkpoint_of ? ask(policy.checkpoint_of, parameter) : policy.checkpoint));
  }
  decide_outside(group);
}

Decision Decisions::of(const Task& task) const {
  if (!asks_) {
    return for_all_;
  }
  Decision decision = none();
  for (const Face& face : task.face) {
    decision = combine(decision, behind(face.weight, face.outside));
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
      if (state[i] == State::unseen) {
        state[i] = State::open;
        for (const Outside::Hop& hop : group.outside[i].hops) {
          if (hop.weight < 0 && state[hop.outside] == State::unseen) {
            pending.push_back(hop.outside);
          }
        }
        continue;
      }
      pending.pop_back();
      if (state[i] == State::open) {
        state[i] = State::decided;
        for (const Outside::Hop& hop : group.outside[i].hops) {
          outside_[i] = combine(outside_[i], behind(hop.weight, hop.outside));
        }
      }
    }
  }
}

}  // namespace zbp
