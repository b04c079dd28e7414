// The nodes of the graph that a W runs when hooks, or nodes between a task and its weights, ask for
// the engine:  Start -> task nodes -> (proxies of the nodes outside the closure) -> sinks.
#pragma once

#include <exception>
#include <mutex>
#include <utility>

#include "shim/pass/stand_in.h"

namespace zbp {

/// The first error of a run that went on all the same. Shared by the sinks of the run.
///
/// Note [Why a sink does not stop the engine]
/// When the engine stops at an error, gradients that were on their way are lost, and what the nodes
/// between a task and its weights had saved is gone: those weights could never be completed. So a
/// sink keeps its gradient for the next call, notes the error, and lets the run finish.
class FirstError {
 public:
  void note(std::exception_ptr error);
  void rethrow();

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

/// Computes what a task owes to its weights and sends it along the task's faces.
class TaskNode : public Node {
 public:
  /// retain: W is to run again.
  TaskNode(GroupPtr group, size_t task, bool retain);

  std::string name() const override;

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  GroupPtr group_;
  size_t task_;
  bool retain_;
};

/// Runs a node outside the closure for one group.
///
/// Note [Why W mirrors the nodes outside the closure]
/// Their edges would have to lead to sinks. But the node may belong to other groups too, of other
/// microbatches (a weight that was computed once, a cast in autocast's cache), whose I walks it or whose
/// W runs it at the same moment. So the node's own edges are never touched.
class Proxy : public InPlaceOf {
 public:
  Proxy(const Outside& outside, bool retain);

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  bool makes_input_;
  bool retain_;
};

/// Takes the place of a weight's accumulator: receives the sum of all gradients of the weight, adds it
/// as the accumulator would, with all hooks, and notes that the weight is done. When it was the last
/// one of its group, the group lets go of what it held.
class Sink : public InPlaceOf {
 public:
  Sink(GroupPtr group, size_t weight, std::shared_ptr<FirstError> error, bool retain);

  /// The faces that end here.
  std::vector<uint32_t> served;

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  template <class Body>
  void noting_errors(const Body& body);
  void add(variable_list&& grads);
  void mark_added();
  Watched* kept_gradient();
  Weight& weight() { return group_->weights[weight_]; }

  GroupPtr group_;
  size_t weight_;
  std::shared_ptr<FirstError> error_;
  bool retain_;  // the tasks are to run again: nothing of theirs may be taken
};

/// Where the weight's gradients are added; undefined if there is nothing yet.
inline const at::Tensor& sum_of(const Weight& weight) {
  return weight.main_grad.defined() ? weight.main_grad : weight.accumulator->variable.grad();
}

/// Adds `grad` to the weight's gradient, as its accumulator does, without any hook; or to its main_grad.
/// When `kept` is this same gradient, nobody else has its memory, and the weight has none yet, the gradient
/// is taken and not copied, and `kept` is let go. On an exception nothing was added, `grad` and `kept` are
/// whole.
void accumulate(Weight& weight, const at::Tensor& grad, Watched* kept);

}  // namespace zbp
