// What a call of W asks of the shim but for what it adds: zbp_weight.h. The rest is alone.cpp and run.cpp.

#include "shim/pass/zbp_weight.h"

#include <algorithm>
#include <memory>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "shim/pass/group.h"
#include "shim/pass/path.h"
#include "shim/torch/detach.h"
#include "shim/torch/error.h"
#include "shim/torch/gil.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"
#include "shim/torch/ranges.h"
#include "shim/torch/streams.h"
#include "shim/work/work.h"

using namespace zbp;
using torch::autograd::AccumulateGrad;

struct zbp_call {
  std::vector<GroupPtr> groups;
  Barrier barrier;
  std::optional<at::AutoGradMode> no_grad;
  std::optional<ProfiledRange> range;
};

namespace {

const at::Tensor& variable_of(const zbp_group* group, uint32_t weight) {
  return group_of(group).weights[weight].accumulator->variable;
}

void check_fits(const at::Tensor& main_grad, const at::Tensor& weight) {
  if (!main_grad.sym_sizes().equals(weight.sym_sizes()) || main_grad.device() != weight.device() ||
      !main_grad.is_floating_point() || main_grad.requires_grad()) {
    refuse(PyExc_ValueError, "the main_grad of the weight of ", describe(weight), " is ",
           describe(main_grad), main_grad.requires_grad() ? " and requires a gradient" : "",
           "; expected a floating-point tensor of the weight's shape and device that requires "
           "none");
  }
}

uint8_t seen_on(const Weight& weight) {
  AccumulateGrad& accumulator = *weight.accumulator;
  const bool is_hooked =
      has_hooks(accumulator) || accumulator.tensor_post_acc_grad_hooks() != nullptr;
  return static_cast<uint8_t>((is_hooked ? ZBP_WEIGHT_HOOKED : 0) |
                              (accumulator.variable.requires_grad() ? 0 : ZBP_WEIGHT_FROZEN));
}

/// True once a hook was put on a node of the path: it is owed its gradient.
bool is_hooked(const Face& face) {
  return !std::all_of(face.path.begin(), face.path.end(),
                      [](Node* node) { return is_plain_step(*node); });
}

void look(Group& group) {
  for (uint32_t w = 0; w < group.book.weight_count; ++w) {
    zbp_book_see_weight(&group.book, w, seen_on(group.weights[w]));
  }
  for (const Task& task : group.tasks) {
    for (size_t i = 0; i < task.face.size(); ++i) {
      if (is_hooked(task.face[i])) {
        zbp_layout_give_up_path(&group.layout, task.plan().face_begin + static_cast<uint32_t>(i));
      }
    }
  }
}

}  // namespace

int zbp_call_new(zbp_group* const* groups, size_t count, zbp_call** call_out, zbp_error* error) {
  return kept_in(error, [&] {
    auto call = std::make_unique<zbp_call>();
    for (size_t i = 0; i < count; ++i) {
      call->groups.push_back(group_of(groups[i]).shared_from_this());
    }
    *call_out = call.release();
  });
}

void zbp_call_free(zbp_call* call) {
  delete call;
}

int zbp_call_begin(zbp_call* call, zbp_error* error) {
  return kept_in(error, [&] {
    call->barrier.begin();
    call->no_grad.emplace(false);
    call->range.emplace("zbpipe::weight_pass");
  });
}

int zbp_call_end(zbp_call* call, int status, zbp_error* error) {
  call->range.reset();
  call->no_grad.reset();
  return call->barrier.end(error, [&] {
    if (status != ZBP_OK) {
      rethrow(*error, status);
    }
  });
}

int zbp_weight_is_computed(const zbp_group* group, uint32_t weight, bool* out, zbp_error* error) {
  return kept_in(error, [&] { *out = variable_of(group, weight).grad_fn() != nullptr; });
}

PyObject* zbp_weight_wrap(const zbp_group* group, uint32_t weight, zbp_error* error) {
  return guarded_object(error, [&] { return wrap_tensor(variable_of(group, weight)); });
}

PyObject* zbp_weight_describe(const zbp_group* group, uint32_t weight, zbp_error* error) {
  return guarded_object(error, [&] { return wrap_text(describe(variable_of(group, weight))); });
}

int zbp_weight_set_main_grad(zbp_group* group, uint32_t weight, PyObject* main_grad,
                             zbp_error* error) {
  return guarded(error, [&] {
    const at::Tensor& variable = variable_of(group, weight);
    const at::Tensor* tensor = as_tensor(main_grad);
    if (!tensor) {
      refuse(PyExc_TypeError, "the main_grad of the weight of ", describe(variable), " is a ",
             type_name(main_grad), "; expected a tensor or None");
    }
    check_fits(*tensor, variable);
    group_of(group).weights[weight].main_grad = *tensor;
  });
}

void zbp_group_forget_main_grads(zbp_group* group) {
  for (Weight& weight : group_of(group).weights) {
    weight.main_grad.reset();
  }
}

int zbp_group_modified(const zbp_group* group, zbp_modified* out, zbp_error* error) {
  return kept_in(error, [&] {
    *out = {};
    if (const auto modified = group_of(group).find_modified()) {
      PyObject* const reader = modified->reader.empty() ? nullptr : wrap_text(modified->reader);
      *out = {modified->role, wrap_text(modified->tensor), reader, modified->seen, modified->now};
    }
  });
}

const void* zbp_group_reads(const zbp_group* group) {
  return group_of(group).reads.get();
}

uint64_t zbp_group_recomputed_for(const zbp_group* group) {
  return group_of(group).recomputed_for();
}

int zbp_reads_modified(const zbp_group* group, uint64_t recomputed_for, zbp_modified* out,
                       zbp_error* error) {
  return kept_in(error, [&] {
    *out = {};
    const auto& reads = group_of(group).reads->weights;
    const auto found = std::find_if(reads.begin(), reads.end(), [&](const Reads::Read& read) {
      return read.sequence_nr >= recomputed_for || read.weight.was_modified();
    });
    if (found != reads.end() && found->sequence_nr < recomputed_for) {
      *out = {ZBP_MODIFIED_RECOMPUTED, wrap_text(found->weight.describe()), nullptr,
              found->weight.seen(), found->weight.now()};
    }
  });
}

int zbp_group_captures(const zbp_group* group, bool* then_out, bool* now_out, zbp_error* error) {
  return kept_in(error, [&] {
    *then_out = group_of(group).was_captured;
    *now_out = is_capturing(group_of(group));
  });
}

bool zbp_in_anomaly_mode(void) {
  return torch::autograd::AnomalyMode::is_enabled();
}

int zbp_look(zbp_group* group, zbp_error* error) {
  return kept_in(error, [&] { look(group_of(group)); });
}

const void* zbp_weight_key(zbp_group* group, uint32_t weight) {
  return group_of(group).weights[weight].accumulator.get();
}

int zbp_follow_caller(zbp_group* group, zbp_error* error) {
  return kept_in(error, [&] { follow_caller(group_of(group)); });
}

int zbp_join_streams(zbp_group* group, zbp_error* error) {
  return kept_in(error, [&] { join_streams(group_of(group)); });
}

void zbp_group_release(zbp_group* group) {
  group_of(group).release();
}

void zbp_group_close(zbp_group* handle) {
  Group& group = group_of(handle);
  group.release();
  const auto weights = std::exchange(group.weights, {});
  if (group.outputs.empty()) {
    return;
  }
  // Others read what autograd knows of a tensor with the GIL and under no other lock.
  const AcquireGil gil;
  for (const auto& output : std::exchange(group.outputs, {})) {
    if (output.use_count() > 1) {
      continue;  // another group reads it yet
    }
    zbp_error error{};
    if (auto tensor = output->lock(); tensor && kept_in(&error, [&] {
                                                  detach_output(at::Tensor(std::move(tensor)));
                                                }) != ZBP_OK) {
      zbp_error_clear(&error);  // it keeps its history, which costs memory alone
    }
  }
}

void zbp_group_again(zbp_group* group) {
  for (Task& task : group_of(group).tasks) {
    for (Work& work : task.works) {
      make_ready_again(work);
    }
  }
}
