#include "shim/pass/zbp_call.h"

#include <algorithm>
#include <memory>
#include <optional>

#include <ATen/core/grad_mode.h>

#include "shim/pass/group.h"
#include "shim/torch/error.h"
#include "shim/torch/python.h"
#include "shim/torch/ranges.h"
#include "shim/torch/streams.h"

using namespace zbp;

struct zbp_call {
  std::vector<GroupPtr> groups;
  std::vector<zbp_turn> turns;
  Barrier barrier;
  std::optional<at::AutoGradMode> no_grad;
  std::optional<ProfiledRange> range;
};

namespace {

const at::Tensor& variable_of(const zbp_held* held, uint32_t weight) {
  return group_in(held).weights[weight].accumulator->variable;
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

}  // namespace

int zbp_call_new(zbp_group* const* groups, size_t count, zbp_call** call_out, zbp_error* error) {
  return kept_in(error, [&] {
    auto call = std::make_unique<zbp_call>();
    for (size_t i = 0; i < count; ++i) {
      call->groups.push_back(groups[i]->group);
      call->turns.push_back(zbp_group_turn(groups[i]));
    }
    *call_out = call.release();
  });
}

void zbp_call_free(zbp_call* call) {
  delete call;
}

zbp_turn* zbp_call_turns(zbp_call* call) {
  return call->turns.data();
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

const void* zbp_weight_tensor(const zbp_held* held, uint32_t weight) {
  return variable_of(held, weight).unsafeGetTensorImpl();
}

int zbp_weight_is_computed(const zbp_held* held, uint32_t weight, bool* out, zbp_error* error) {
  return kept_in(error, [&] { *out = variable_of(held, weight).grad_fn() != nullptr; });
}

PyObject* zbp_weight_wrap(const zbp_held* held, uint32_t weight, zbp_error* error) {
  return guarded_object(error, [&] { return wrap_tensor(variable_of(held, weight)); });
}

PyObject* zbp_weight_describe(const zbp_held* held, uint32_t weight, zbp_error* error) {
  return guarded_object(error, [&] { return wrap_text(describe(variable_of(held, weight))); });
}

int zbp_weight_set_main_grad(zbp_held* held, uint32_t weight, PyObject* main_grad,
                             zbp_error* error) {
  return guarded(error, [&] {
    const at::Tensor& variable = variable_of(held, weight);
    const at::Tensor* tensor = as_tensor(main_grad);
    if (!tensor) {
      refuse(PyExc_TypeError, "the main_grad of the weight of ", describe(variable), " is a ",
             type_name(main_grad), "; expected a tensor or None");
    }
    check_fits(*tensor, variable);
    group_of(held).weights[weight].main_grad = *tensor;
  });
}

void zbp_held_forget_main_grads(zbp_held* held) {
  for (Weight& weight : group_of(held).weights) {
    weight.main_grad.reset();
  }
}

int zbp_held_modified(const zbp_held* held, zbp_modified* out, zbp_error* error) {
  return kept_in(error, [&] {
    *out = {};
    if (const auto modified = group_in(held).find_modified()) {
      PyObject* const reader = modified->reader.empty() ? nullptr : wrap_text(modified->reader);
      *out = {modified->role, wrap_text(modified->tensor), reader, modified->seen, modified->now};
    }
  });
}

const void* zbp_held_reads(const zbp_held* held) {
  return group_in(held).reads.get();
}

uint64_t zbp_held_recomputed_for(const zbp_held* held) {
  return group_in(held).recomputed_for();
}

int zbp_reads_modified(const zbp_held* held, uint64_t recomputed_for, zbp_modified* out,
                       zbp_error* error) {
  return kept_in(error, [&] {
    *out = {};
    const auto& reads = group_in(held).reads->weights;
    const auto found = std::find_if(reads.begin(), reads.end(), [&](const Reads::Read& read) {
      return read.sequence_nr >= recomputed_for || read.weight.was_modified();
    });
    if (found != reads.end() && found->sequence_nr < recomputed_for) {
      *out = {ZBP_MODIFIED_RECOMPUTED, wrap_text(found->weight.describe()), nullptr,
              found->weight.seen(), found->weight.now()};
    }
  });
}

int zbp_held_captures(const zbp_held* held, bool* then_out, bool* now_out, zbp_error* error) {
  return kept_in(error, [&] {
    *then_out = group_in(held).was_captured;
    *now_out = is_capturing(group_in(held));
  });
}
