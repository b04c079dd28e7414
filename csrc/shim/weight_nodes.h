// The nodes of the graph that a W runs when hooks, or nodes between a task and its weights, ask for
// the engine:  start -> task nodes -> (nodes outside the closure) -> sinks.
#pragma once

#include <utility>

#include "shim/group.h"

namespace zbp {

/// Where a W starts: has an edge to every task node and gives them nothing but their turn. It exists
/// because gradients that were handed to the engine as roots would be held by it until the end.
class Start : public Node {
 public:
  explicit Start(edge_list&& tasks);

 protected:
  variable_list apply(variable_list&& grads) override;
};

/// Computes what a task owes to its weights and sends it along the task's faces.
class TaskNode : public Node {
 public:
  TaskNode(GroupPtr group, size_t task);

  std::string name() const override;

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  GroupPtr group_;
  size_t task_;
};

/// Takes the place of a weight's accumulator: receives the sum of all gradients of the weight, runs
/// the accumulator with all its hooks, and notes that the weight is done. When it was the last one of
/// its group, the group lets go of what it held.
class Sink : public Node {
 public:
  /// The edges of `tasks` that end here, as (task, face).
  using Served = std::vector<std::pair<uint32_t, uint32_t>>;

  Sink(GroupPtr group, size_t weight, bool retain, bool release);

  Served served;

  std::string name() const override;

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  Weight& weight() {
    return group_->weights[weight_];
  }

  GroupPtr group_;
  size_t weight_;
  bool retain_;   // the tasks are to run again: nothing of theirs may be taken
  bool release_;  // the group lets go of its tasks with its last weight
};

/// Adds `grad` to the weight through its accumulator, without hooks other than the weight's
/// post-accumulate hook. When `task` keeps `grad` for a retry and nobody else has it, and the weight
/// has no gradient yet, the task's reference goes first so that the gradient is taken, not copied.
void accumulate(Weight& weight, at::Tensor grad, Watched* kept);

}  // namespace zbp
