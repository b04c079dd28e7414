// What a parameter group holds for W.
#include "instruments/shim/handle.h"

#include <torch/csrc/PyInterpreter.h>

#include "shim/group/group.h"

namespace zbp {

namespace {

void add_all(c10::ArrayRef<Watched> list, const char* label, int32_t task, References& references) {
  for (const Watched& watched : list) {
    references.add(watched.tensor(), label, task);
  }
}

void add_work(const Work& work, int32_t task, References& references) {
  if (work.call) {
    c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
    add_all(work.call->saved, "saved for the work of task", task, references);
    add_all(work.call->parameters, "saved for the work of task", task, references);
    references.add(work.call->function.ptr(interpreter), "work of weight task", task);
    references.add(work.call->arguments.ptr(interpreter), "saved for the work of task", task);
  }
  add_all(work.grads, "gradient from the work of task", task, references);
}

void add_task(const Task& task, int32_t number, References& references) {
  references.add(task.node.get(), "weight task", number);
  for (const Face& face : task.face) {
    references.add(face.edge.function.get(), "weight face of task", number);
    references.add(face.grad.tensor(), "kept gradient of weight task", number);
  }
  if (const auto* given = std::get_if<Given>(&task.work)) {
    for (const Work& work : given->works) {
      add_work(work, number, references);
    }
  } else if (const auto* deferred = std::get_if<Deferred>(&task.work)) {
    add_all(deferred->output_grads, "output gradient of weight task", number, references);
    add_all(deferred->saved, "saved tensor of weight task", number, references);
  } else {
    const Product& product = std::get<Product>(task.work);
    references.add(product.output_grad.tensor(), "output gradient of weight task", number);
    if (const auto* matrix = std::get_if<Watched>(&product.other)) {
      references.add(matrix->tensor(), "matrix of weight task", number);
    } else {  // a deferred node tells of its own
      c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
      const Packed& packed = *std::get<PackedPtr>(product.other);
      references.add(packed.data.ptr(interpreter), "packed matrix of weight task", number);
      references.add(packed.unpack_hook.ptr(interpreter), "packed matrix of weight task", number);
    }
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
