// What the policy says of weights, groups and tasks.
#pragma once

#include <unordered_map>
#include <vector>

#include "shim/pass/kinds.h"

namespace zbp {

/// What the policy says of each weight that the backward reaches. Its functions are asked before anything
/// is planned: they may run any code, also a backward through the same graph.
class Answers {
 public:
  /// Called with the GIL held. Throws what a function raises.
  explicit Answers(const InputPassArgs& args);

  bool differ() const { return !weight_.empty(); }
  Decision for_all() const { return for_all_; }
  Decision of(const Weight& weight) const;

 private:
  Decision for_all_;
  std::unordered_map<const Node*, Decision> weight_;  // only if the policy has functions
  std::vector<NodePtr> accumulators_;                 // so that nobody gets their addresses
};

/// The answers for one group, whose weights and outside nodes are known.
class Decisions {
 public:
  Decisions(const Answers& answers, const Group& group);

  /// Of the answers for the weights behind a task, W wins over I, and keeping over recomputing.
  Decision of(const Task& task) const;
  Decision of_outside(size_t i) const { return differ_ ? outside_[i] : for_all_; }

 private:
  Decision behind(int32_t weight, int32_t outside) const;
  void decide_outside(const Group& group);

  bool differ_;
  Decision for_all_;
  std::vector<Decision> weight_;   // only if they differ
  std::vector<Decision> outside_;  // per outside node, of the weights that it leads to
};

}  // namespace zbp
