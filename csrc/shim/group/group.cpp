#include "shim/group/group.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/PyInterpreter.h>

#include "shim/torch/detach.h"
#include "shim/torch/gil.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

/// Where the engine would add up what arrives there, and keep it until all has come.
uint32_t target_of(const zbp_layout& layout, uint32_t f) {
  const zbp_face& face = layout.face[f];
  return face.outside < 0 ? static_cast<uint32_t>(face.weight)
                          : layout.weight_count + static_cast<uint32_t>(face.outside);
}

}  // namespace

at::Tensor Packed::unpack() const {
  const AcquireGil gil;
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  THPObjectPtr tensor = checked(
      PyObject_CallFunctionObjArgs(unpack_hook.ptr(interpreter), data.ptr(interpreter), nullptr));
  const at::Tensor* unpacked = as_tensor(tensor);
  TORCH_CHECK_TYPE(unpacked, "a saved tensor's unpack hook returned a ", type_name(tensor),
                   "; expected a tensor");
  return unpacked->detach();
}

Task::Task(zbp_layout& of_layout, uint32_t of_number, NodePtr of_node)
    : layout(&of_layout), number(of_number), node(std::move(of_node)) {
  if (kind() == ZBP_TASK_PRODUCT) {
    work.emplace<Product>();
  } else if (kind() == ZBP_TASK_DEFERRED) {
    work.emplace<Deferred>();
  }
}

Group::~Group() {
  release();
  detach_outputs();
  zbp_book_close(&book);
  zbp_layout_fini(&layout);
}

variable_list Group::variables() const {
  variable_list all;
  for (const Weight& weight : weights) {
    all.push_back(weight.accumulator->variable);
  }
  return all;
}

void Group::release() noexcept {
  // Freeing may run Python code that looks at this group: it must find it empty, not half freed.
  const auto dead_tasks = std::exchange(tasks, {});
  const auto dead_outside = std::exchange(outside, {});
  const auto dead_reads = std::exchange(reads, nullptr);
  const auto dead_packed = std::exchange(packed_outside, {});
  const auto dead_unpinned = std::exchange(unpinned_outside, {});
  saved_outside.clear();
  outside_recomputed_for = 0;
  for (const Task& task : dead_tasks) {
    if (const auto* deferred = std::get_if<Deferred>(&task.work); deferred && deferred->is_alone) {
      task.node->release_variables();
    }
  }
}

void Group::detach_outputs() noexcept {
  if (outputs.empty()) {
    return;
  }
  // Others read what autograd knows of a tensor with the GIL and under no other lock.
  const AcquireGil gil;
  for (auto& output : std::exchange(outputs, {})) {
    if (output.use_count() > 1) {
      output.reset();  // another group reads it yet
    } else if (auto tensor = output->lock()) {
      zbp_error ignored{};  // then it keeps its history, which costs memory alone
      kept_in(&ignored, [&] { detach_output(at::Tensor(std::move(tensor))); });
      zbp_error_clear(&ignored);
    }
  }
}

uint64_t Group::recomputed_for() const {
  return std::max(outside_recomputed_for, zbp_book_unpacks_up_to(&book, &layout));
}

void Group::expect() {
  if (layout.task_count < 2) {
    return;
  }
  missing.resize(layout.weight_count + layout.outside_count);
  for (uint32_t f = 0; f < layout.face_count; ++f) {
    missing[target_of(layout, f)] += layout.task[layout.face[f].task].kind != ZBP_TASK_ROOT;
  }
}

SmallVector<uint32_t, 2> Group::arrive(const Task& task, c10::ArrayRef<uint32_t> faces) {
  SmallVector<uint32_t, 2> due(faces.begin(), faces.end());
  if (missing.empty()) {
    return due;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  waiting.insert(waiting.end(), due.begin(), due.end());
  due.clear();
  bool is_last = false;
  for (uint32_t f = task.plan().face_begin; f < task.plan().face_end; ++f) {
    is_last = --missing[target_of(layout, f)] == 0 || is_last;
  }
  if (is_last) {
    const auto is_due = [this](uint32_t f) { return missing[target_of(layout, f)] == 0; };
    std::copy_if(waiting.begin(), waiting.end(), std::back_inserter(due), is_due);
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), is_due), waiting.end());
  }
  return due;
}

void Group::own(c10::ArrayRef<uint32_t> faces, c10::ArrayRef<at::Tensor> known) {
  SmallVector<Kept*, 2> grads;
  for (const uint32_t f : faces) {
    Task& task = tasks[layout.face[f].task];
    grads.push_back(&task.face[f - task.plan().face_begin].grad);
  }
  zbp::own(grads, known);
}

void Group::find_streams() {
  for (Task& task : tasks) {
    for_each_kept(task, [&](const Kept& kept, auto&&...) {
      if (kept.stream()) {
        if (!task.device) {  // its node had none, as its output is on the CPU
          const c10::OptionalStreamGuard there(kept.stream());
          task.device = std::make_unique<const torch::autograd::InputMetadata>(kept.tensor());
        }
        streams.add(kept.stream());
      }
    });
    streams.add(stream_of(task));
  }
  for (const Weight& weight : weights) {
    streams.add(stream_of(weight));
  }
  was_captured = streams.are_captured();
}

bool Group::leaves_packed() const {
  // Where I ran nothing, it has not seen to what is outside.
  return recomputed_for() != 0 || !unpinned_outside.empty();
}

}  // namespace zbp
