#include "shim/group/group.h"

#include <torch/csrc/PyInterpreter.h>

#include "shim/torch/gil.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

std::variant<Given, Product, Deferred> work_of(uint8_t kind) {
  switch (kind) {
    case ZBP_TASK_PRODUCT:
      return Product{};
    case ZBP_TASK_DEFERRED:
      return Deferred{};
    default:
      return Given{};
  }
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
    : layout(&of_layout), number(of_number), node(std::move(of_node)), work(work_of(kind())) {}

std::optional<size_t> Task::face_at(uint32_t slot) const {
  const int32_t f = zbp_layout_face_at(layout, number, slot);
  return f >= 0 ? std::optional(static_cast<size_t>(f)) : std::nullopt;
}

Deferred& Task::defer_product() {
  plan().kind = ZBP_TASK_DEFERRED;
  plan().why = ZBP_WHY_MATRICES;
  return work.emplace<Deferred>();
}

Group::~Group() {
  release();
  zbp_book_fini(&book);
  zbp_layout_fini(&layout);
}

void Group::release() noexcept {
  // Freeing may run Python code that looks at this group: it must find it empty, not half freed.
  const auto dead_tasks = std::exchange(tasks, {});
  const auto dead_outside = std::exchange(outside, {});
  const auto dead_reads = std::exchange(reads, nullptr);
  saved_outside.clear();
  arguments_outside.clear();
  outside_recomputed_for = 0;
  for (const Task& task : dead_tasks) {
    if (const auto* deferred = std::get_if<Deferred>(&task.work); deferred && deferred->is_alone) {
      task.node->release_variables();
    }
  }
}

uint64_t Group::recomputed_for() const {
  return std::max(outside_recomputed_for, zbp_book_unpacks_up_to(&book, &layout));
}

bool Group::leaves_packed() const {
  // Where I ran nothing, it has not seen to what is outside.
  return recomputed_for() != 0 || !unpinned_outside.empty();
}

}  // namespace zbp
