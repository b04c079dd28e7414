#include "shim/pass/zbp_weight.h"

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
