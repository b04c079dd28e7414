#include "shim/explain/zbp_account.h"

#include <algorithm>
#include <mutex>

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/explain/reach.h"
#include "shim/pass/dtensor.h"
#include "shim/pass/kinds.h"
#include "shim/pass/path.h"
#include "shim/pass/saved.h"
#include "shim/torch/python.h"

namespace {

using namespace zbp;

bool is_among(const Watched& watched, c10::ArrayRef<Watched> list) {
  return !list.empty() && &watched >= list.begin() && &watched < list.end();
}

const char* role_of(const Watched& watched, const Task& task) {
  if (&watched == &task.other) {
    return "matrix";
  }
  if (is_among(watched, task.output_grads)) {
    return "output gradient";
  }
  const auto is_computed = [&](const Work& work) { return is_among(watched, work.grads); };
  if (is_among(watched, task.kept) ||
      std::any_of(task.works.begin(), task.works.end(), is_computed)) {
    return watched.tensor().dim() > 1 ? "kept gradient" : "light gradient";
  }
  return "saved";
}

void tell(const zbp_account_visitor& visitor, const char* role, const at::Tensor& tensor,
          zbp_places weights) {
  const at::Tensor held = local_part(tensor);
  const Sizes sizes = tensor.is_nested() ? Sizes() : numbers(tensor.sym_sizes());
  THPObjectPtr device(THPDevice_New(tensor.device()));
  if (!device) {
    throw python_error();
  }
  const zbp_account_tensor told{
      role,
      storage_of(held),
      bytes_of(held),
      {sizes.data(), sizes.size()},
      reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())),
      device.get(),
      weights};
  check_told(visitor.tensor(visitor.arg, &told));
}

bool is_of(const Watched& watched, const Work& work) {
  return is_among(watched, work.grads) || (work.call && is_among(watched, work.call->saved));
}

/// Whether the gradient that the task gives at face number `f` is computed from the tensor.
bool serves(const Watched& watched, const Task& task, size_t f) {
  for (const Work& work : task.works) {
    if (is_of(watched, work)) {
      return std::find(work.faces.begin(), work.faces.end(), static_cast<int32_t>(f)) !=
             work.faces.end();
    }
  }
  if (is_among(watched, task.kept)) {
    return &watched == &task.kept[f];
  }
  return &watched != &task.other || task.plan(f).slot == task.matrix_slot;
}

/// The weights whose gradients are computed from the tensor.
zbp_places weights_of(const Watched& watched, const Task& task, Reach& reach) {
  reach.begin();
  for (size_t f = 0; f < task.face.size(); ++f) {
    if (serves(watched, task, f)) {
      reach.add(task, f);
    }
  }
  return reach.weights();
}

void tell(const zbp_account_visitor& visitor, const Task& task, Reach& reach) {
  const std::string name = task.node ? task.node->name() : "";
  check_told(visitor.task(visitor.arg, task.node ? name.c_str() : nullptr,
                          task.works.empty() ? name_of(task.kind()) : "handed over"));
  for_each_watched(task, [&](const Watched& watched) {
    if (watched.tensor().defined()) {
      tell(visitor, role_of(watched, task), watched.tensor(), weights_of(watched, task, reach));
    }
  });
}

/// What outside node number `o` has saved and W will read. Unless it lies behind hooks: that nobody can see without
/// running them. Nor while a thread runs the node, which may be another microbatch's too.
void tell_outside(const zbp_account_visitor& visitor, const Group& group, size_t o, Reach& reach) {
  Node& node = *group.outside[o].node;
  if (saves_nothing(node)) {
    return;
  }
  check_told(visitor.task(visitor.arg, node.name().c_str(), "outside"));
  variable_list saved;
  const auto all = all_saved_by(node).first;
  if (const std::unique_lock<std::mutex> lock(NodeParts::mutex_of(node), std::try_to_lock); lock) {
    for (const torch::autograd::SavedVariable* one : all) {
      saved.push_back(one->get_raw_data().value_or(at::Tensor()));
    }
  }
  reach.begin();
  reach.add_outside(o);
  const zbp_places weights = reach.weights();
  for (const at::Tensor& tensor : saved) {
    if (tensor.defined()) {
      tell(visitor, "saved", tensor, weights);
    }
  }
}

/// What a W that raised has computed for weight number `place` and could not add.
void tell_waiting(const zbp_account_visitor& visitor, const Weight& weight, uint32_t place) {
  check_told(visitor.task(visitor.arg, nullptr, "waiting"));
  tell(visitor, "waiting gradient", weight.grad, {&place, 1});
}

bool reads_weights(const Task& task) {
  const auto takes_parameters = [](const Work& work) {
    return work.call && !work.call->parameters.empty();
  };
  return task.kind() == Kind::deferred || task.packed || task.plan().leaves_packed ||
         std::any_of(task.works.begin(), task.works.end(), takes_parameters);
}

}  // namespace

int zbp_group_account(const zbp_group* handle, const zbp_account_visitor* visitor,
                      zbp_error* error) {
  return guarded(error, [&] {
    const GroupPtr owned = handle->group;
    const Group& group = *owned;
    if (!zbp_book_claim(&owned->book)) {
      refuse(PyExc_RuntimeError,
             "what a parameter group holds cannot be listed while its weight pass runs; wait for "
             "stage_backward_weight to return");
    }
    // Making Python objects may run other Python code, and that a W.
    const std::unique_ptr<zbp_book, decltype(&zbp_book_give_back)> claim(&owned->book,
                                                                         &zbp_book_give_back);
    THPObjectPtr weights(wrap_weights(group));
    check_told(visitor->group(visitor->arg, weights.get()));
    Reach reach(group);
    for (const Task& task : group.tasks) {
      tell(*visitor, task, reach);
    }
    for (size_t o = 0; o < group.outside.size(); ++o) {
      tell_outside(*visitor, group, o, reach);
    }
    for (size_t w = 0; w < group.weights.size(); ++w) {
      if (group.weights[w].grad.defined()) {
        tell_waiting(*visitor, group.weights[w], static_cast<uint32_t>(w));
      }
    }
  });
}

int zbp_group_reads_weights(const zbp_group* handle, int* out, zbp_error* error) {
  return guarded(error, [&] {
    const Group& group = *handle->group;
    const auto has_saved = [](const Outside& outside) {
      return !saves_nothing(*outside.node) && !saved_nothing(*outside.node);
    };
    *out = std::any_of(group.tasks.begin(), group.tasks.end(),
                       [](const Task& task) { return reads_weights(task); }) ||
           std::any_of(group.outside.begin(), group.outside.end(), has_saved);
  });
}
