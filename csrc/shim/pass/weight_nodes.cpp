#include "shim/pass/weight_nodes.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "shim/torch/ranges.h"
#include "shim/pass/product.h"
#include "shim/pass/saved.h"
#include "shim/pass/stand_in.h"
#include "shim/work/work.h"

namespace zbp {

using torch::autograd::AccumulateGrad;

void FirstError::note(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) {
    error_ = std::move(error);
  }
}

void FirstError::rethrow() {
  if (error_) {
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

TaskNode::TaskNode(GroupPtr group, size_t task, bool retain)
    : Node(group->tasks[task].sequence_nr()),
      group_(std::move(group)),
      task_(task),
      retain_(retain) {
  const Task& t = group_->tasks[task_];
  if (t.place) {
    input_metadata_.emplace_back(*t.place);
  } else {
    add_input_metadata(undefined_input());
  }
}

// A group that is complete has no tasks any more. In a retry a task can come late: all its weights
// have been added before.
std::string TaskNode::name() const {
  const bool is_named = task_ < group_->tasks.size() && group_->tasks[task_].node;
  return is_named ? group_->tasks[task_].node->name() : "zbpipe::TaskNode";
}

variable_list TaskNode::apply(variable_list&& /*grads*/) {
  if (task_ >= group_->tasks.size()) {
    return variable_list(num_outputs());
  }
  const ProfiledRange range("zbpipe::group");
  Task& task = group_->tasks[task_];
  variable_list outputs;
  if (task.kind() == Kind::deferred) {
    outputs = run_deferred(task);
  }
  variable_list grads(task.face.size());
  for (size_t i = 0; i < grads.size(); ++i) {
    if (next_edge(i).is_valid()) {
      run_works_for(task, i, retain_);
      grads[i] = face_grad(task, i, outputs);
    }
  }
  return grads;
}

Proxy::Proxy(const Outside& outside, bool retain)
    : InPlaceOf(ref_of(*outside.node), outside.node->sequence_nr()),
      makes_input_(outside.makes_input),
      retain_(retain) {
  next_edges().resize(original_->next_edges().size());
}

variable_list Proxy::apply(variable_list&& grads) {
  try {
    return run_node(*original_, *this, std::move(grads), !retain_, /*track_views=*/false,
                    makes_input_);
  } catch (...) {
    if (torch::autograd::AnomalyMode::is_enabled()) {
      original_->metadata()->print_stack(original_->name());
    }
    throw;
  }
}

Sink::Sink(GroupPtr group, size_t weight, std::shared_ptr<FirstError> error, bool retain)
    : InPlaceOf(group->weights[weight].accumulator, UINT64_MAX),
      group_(std::move(group)),
      weight_(weight),
      error_(std::move(error)),
      retain_(retain) {}

// See Note [Why a sink does not stop the engine].
variable_list Sink::apply(variable_list&& grads) {
  noting_errors([&] { add(std::move(grads)); });
  return {};
}

template <class Body>
void Sink::noting_errors(const Body& body) {
  try {
    body();
  } catch (python_error& error) {
    error.persist();
    error_->note(std::current_exception());
  } catch (...) {
    error_->note(std::current_exception());
  }
}

void Sink::add(variable_list&& grads) {
  AccumulateGrad& accumulator = *weight().accumulator;
  zbp_book& book = group_->book;
  const auto number = static_cast<uint32_t>(weight_);
  weight().grad = grads[0];
  zbp_book_arrived(&book, number);
  if (!book.weight[weight_].is_hooked) {
    grads = call_pre_hooks(accumulator, call_tensor_hooks(accumulator, std::move(grads)));
    weight().grad = grads[0];
    zbp_book_hooked(&book, number);
  }
  // As in the engine: an accumulator with post hooks expects them to hold one more reference.
  const variable_list inputs = accumulator.post_hooks().empty() ? variable_list() : grads;
  grads.clear();
  accumulate(weight(), weight().grad, kept_gradient());
  mark_added();
  // It is added: the hooks behind it are not run again, so each gets its turn whatever the other does.
  noting_errors([&] {
    // As in libtorch also where no gradient came: a kernel may have added it elsewhere.
    if (const auto& hook = accumulator.tensor_post_acc_grad_hooks()) {
      (*hook)(accumulator.variable);
    }
  });
  call_post_hooks(accumulator, {}, inputs);
}

void Sink::mark_added() {
  weight().grad.reset();
  if (zbp_book_added(&group_->book, static_cast<uint32_t>(weight_))) {
    group_->release();
  }
}

/// Where the only task that serves the weight keeps the gradient that arrives here, if it does.
Watched* Sink::kept_gradient() {
  if (served.size() != 1 || retain_) {
    return nullptr;
  }
  const uint32_t face = served[0];
  Task& task = group_->tasks[group_->layout.face[face].task];
  return only_kept_grad(task, face - task.plan().face_begin);
}

void accumulate(Weight& weight, const at::Tensor& grad, Watched* kept) {
  AccumulateGrad& accumulator = *weight.accumulator;
  if (!grad.defined() || !accumulator.variable.requires_grad()) {
    return;
  }
  const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(accumulator));
  if (weight.main_grad.defined()) {
    weight.main_grad.add_(grad);
    return;
  }
  at::Tensor& place = accumulator.variable.mutable_grad();
  const bool can_be_taken =
      kept && kept->tensor().is_same(grad) && !place.defined() && grad.has_storage() &&
      grad.storage().use_count() == 1 &&
      torch::autograd::utils::obeys_layout_contract(grad, accumulator.variable);
  // Memory that somebody else has too (a view of what a task keeps, of the caller's own gradient) must
  // not be taken for the weight's own: with no reference expected it is copied.
  const bool is_shared = grad.has_storage() && grad.storage().use_count() > 1;
  const int holders = 1 + (accumulator.post_hooks().empty() ? 0 : 1) + (can_be_taken ? 1 : 0);
  const int references = is_shared ? 0 : holders;
  AccumulateGrad::accumulateGrad(accumulator.variable, place, grad, references,
                                 [&place](at::Tensor&& updated) { place = std::move(updated); });
  if (can_be_taken) {
    kept->reset();
  }
}

}  // namespace zbp
