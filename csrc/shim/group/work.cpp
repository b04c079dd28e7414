// W: runs what was handed over. See work.h.

#include "shim/group/work.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>

#include "shim/torch/main_grad.h"

namespace zbp {

namespace {

variable_list call(const Work::Call& call) {
  RECORD_USER_SCOPE("zbpipe::work");
  const at::AutoGradMode no_grad(false);
  const AcquireGil gil;
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  return tensors_in(
      call_python("zbpipe._work", "run",
                  {call.function.ptr(interpreter), call.arguments.ptr(interpreter),
                   call.autocast.ptr(interpreter), checked(PyLong_FromSize_t(call.count))}));
}

/// As the engine would check it where the Function's own gradients are checked.
void check_grads(Work& work, const Task& task) {
  for (size_t i = 0; i < work.faces.size(); ++i) {
    if (work.faces[i] < 0) {
      work.grads[i].reset();
      continue;
    }
    variable_list grad{work.grads[i].tensor()};
    torch::autograd::validate_outputs(
        {task.face[work.faces[i]].edge}, grad, [](const std::string& message) {
          return "a function given to zbpipe.defer returned an " + message;
        });
    work.grads[i] = Kept(grad[0]);
  }
  work.is_checked = true;
}

/// What the callable returned and still has becomes the work's own.
void own_grads(Work& work) {
  variable_list saved;
  for (const Kept& kept : work.call->saved) {
    saved.push_back(kept.tensor());
  }
  const CameIn came_in(saved);
  SmallVector<Kept*, 2> made;
  for (Kept& grad : work.grads) {
    if (grad.tensor().defined() && !came_in.has(grad.tensor())) {
      made.push_back(&grad);
    }
  }
  own(made, {});
}

void run(const Group& group, Work& work, const Task& task, bool retain) {
  if (!work.is_done) {
    SmallVector<Kept, 2> grads(work.faces.size());
    variable_list weights(work.faces.size());
    for (size_t i = 0; i < weights.size(); ++i) {
      const int32_t w = work.faces[i] < 0 ? -1 : task.plan(work.faces[i]).weight;
      if (w >= 0 && group.weights[w].main_grad.defined()) {
        weights[i] = group.weights[w].accumulator->variable;
      }
    }
    const AddedByKernels added(weights);
    variable_list results = call(*work.call);
    results.resize(work.faces.size());  // none, where the callable adds them itself
    added.drop(results);
    // From here on nothing throws: the callable is not called a second time.
    std::transform(results.begin(), results.end(), grads.begin(),
                   [](at::Tensor& grad) { return Kept::with_history(std::move(grad)); });
    work.grads = std::move(grads);
    work.is_done = true;
  }
  if (!work.is_checked) {
    own_grads(work);
    check_grads(work, task);
  }
  if (!retain) {
    work.call = nullptr;
  }
}

/// Each place where a gradient for the face lies.
template <class AnyTask>
auto given_at(AnyTask& task, size_t face) {
  SmallVector<decltype(&task.face[face].grad), 2> given;
  if (task.face[face].grad.tensor().defined()) {
    given.push_back(&task.face[face].grad);
  }
  for (auto& work : std::get<Given>(task.work)) {
    for (size_t i = 0; i < work.grads.size(); ++i) {
      if (work.faces[i] == static_cast<int32_t>(face) && work.grads[i].tensor().defined()) {
        given.push_back(&work.grads[i]);
      }
    }
  }
  return given;
}

}  // namespace

void run_works_for(const Group& group, Task& task, size_t face, bool retain) {
  if (auto* works = std::get_if<Given>(&task.work)) {
    for (Work& work : *works) {
      if (work.serves(face)) {
        run(group, work, task, retain);
      }
    }
  }
}

void make_ready_again(Work& work) {
  work.is_done = work.is_done && !work.call;
  work.is_checked = work.is_done;
  if (!work.is_done) {
    work.grads.clear();
  }
}

at::Tensor given_grad(const Task& task, size_t face) {
  at::Tensor sum;
  for (const Kept* given : given_at(task, face)) {
    sum = sum.defined() ? sum + given->tensor() : given->tensor();
  }
  return sum;
}

Kept* only_kept_grad(Task& task, size_t face) {
  if (task.kind() != ZBP_TASK_WHOLE) {
    return nullptr;  // a root's is the caller's
  }
  const auto given = given_at(task, face);
  return given.size() == 1 ? given[0] : nullptr;
}

}  // namespace zbp
