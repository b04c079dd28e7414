// What a parameter group holds for W.
#include "instruments/shim/handle.h"

#include <torch/csrc/PyInterpreter.h>

#include "shim/group/group.h"

namespace zbp {

namespace {

const char* label_of(Role role) {
  switch (role) {
    case Role::matrix:
      return "matrix of weight task";
    case Role::output_grad:
      return "output gradient of weight task";
    case Role::saved:
      return "saved tensor of weight task";
    case Role::kept_grad:
      return "kept gradient of weight task";
    case Role::saved_for_work:
    case Role::view_for_work:
      return "saved for the work of task";
    default:
      return "gradient from the work of task";
  }
}

void add_task(const Task& task, int32_t number, References& references) {
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  references.add(task.node.get(), "weight task", number);
  for (const Face& face : task.face) {
    references.add(face.edge.function.get(), "weight face of task", number);
  }
  for_each_kept(task, [&](const Kept& watched, Role role, const auto&) {
    references.add(watched.tensor(), label_of(role), number);
  });
  for (const Work& work : works_of(task)) {
    if (work.call) {
      for (const Kept& kept : work.call->parameters) {
        references.add(kept.tensor(), label_of(Role::saved_for_work), number);
      }
      references.add(work.call->function.ptr(interpreter), "work of weight task", number);
      references.add(work.call->arguments.ptr(interpreter), label_of(Role::saved_for_work), number);
    }
  }
  const auto* product = std::get_if<Product>(&task.work);  // a deferred node tells of its own
  if (const auto* packed = product ? std::get_if<PackedPtr>(&product->other) : nullptr) {
    references.add((*packed)->data.ptr(interpreter), "packed matrix of weight task", number);
    references.add((*packed)->unpack_hook.ptr(interpreter), "packed matrix of weight task", number);
  }
}

}  // namespace

void add_held_by(const zbp_group* handle, References& references) {
  if (zbp_book_is_claimed(&handle->book)) {
    references.add_unseen("parameter groups whose weight pass was running");
    return;
  }
  const Group& group = group_of(handle);
  int32_t number = 0;
  for (const Task& task : group.tasks) {
    add_task(task, number++, references);
  }
  number = 0;
  for (const Weight& weight : group.weights) {
    references.add(weight.accumulator.get(), "accumulator", number);
    references.add(weight.grad, "waiting gradient", number);
    references.add(weight.main_grad, "main gradient", number++);
  }
}

}  // namespace zbp
