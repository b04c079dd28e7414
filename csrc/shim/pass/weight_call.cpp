// A call of W as the bindings make it: the groups claimed, what has changed since I found; and its end.

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include "shim/pass/zbp_shim.h"
#include "shim/torch/error.h"
#include "shim/torch/python.h"
#include "shim/torch/ranges.h"
#include "shim/torch/streams.h"

using namespace zbp;

namespace {

std::vector<GroupPtr> groups_in(zbp_group* const* groups, size_t count) {
  std::vector<GroupPtr> list;
  for (size_t i = 0; i < count; ++i) {
    list.push_back(groups[i]->group);
  }
  return list;
}

void check_state(zbp_group* const* groups, size_t count) {
  std::unordered_set<const zbp_group*> seen;
  for (size_t i = 0; i < count; ++i) {
    if (groups[i]->group->book.state == ZBP_BOOK_SPENT) {
      refuse(PyExc_RuntimeError, "param_groups[", i,
             "] is spent: its weight pass has already run; pass retain_graph=True to the first "
             "call to run it again");
    }
    if (!seen.insert(groups[i]).second) {
      refuse(PyExc_ValueError, "param_groups[", i, "] is listed twice");
    }
  }
}

void check_leaves(const std::vector<GroupPtr>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& group = *groups[i];
    for (size_t w = 0; w < group.weights.size(); ++w) {
      const at::Tensor& variable = group.weights[w].accumulator->variable;
      if (!group.book.weight[w].is_added && variable.grad_fn()) {
        refuse(
            PyExc_RuntimeError,
            "leaf variable has been moved into the graph interior: ", describe(variable),
            ", for which param_groups[", i,
            "] holds a gradient, was changed in place, since the forward, by something that needs "
            "a gradient; change weights under torch.no_grad(), and run the microbatch again");
      }
    }
  }
}

void check_capture(const std::vector<GroupPtr>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& group = *groups[i];
    if (is_capturing(group) != group.was_captured) {
      refuse(PyExc_RuntimeError, "param_groups[", i, "] was made by an input pass ",
             group.was_captured ? "within" : "outside",
             " the capture of a CUDA graph, and its weight pass is called ",
             group.was_captured ? "outside of it" : "within one",
             ", where it would read memory that a replay overwrites; capture both passes in one "
             "graph, or neither");
    }
  }
}

[[noreturn]] void refuse_modified(size_t i, const Modified& modified) {
  const char* reader = "";
  const char* advice = "";
  switch (modified.role) {
    case Modified::Role::held:
      reader = " holds for the weight pass";
      break;
    case Modified::Role::saved_outside:
      reader = " needs where its weights were computed";
      break;
    case Modified::Role::recomputed:
      reader = " would read to compute a checkpointed region again";
      advice =
          " With checkpoint=\"recompute\" or \"auto\", run the weight pass of all groups of a "
          "microbatch before weights or inputs change, or choose checkpoint=\"keep\".";
      break;
  }
  refuse(PyExc_RuntimeError,
         "one of the variables needed for gradient computation has been modified by an inplace "
         "operation: ",
         modified.tensor, ", which param_groups[", i, "]", reader, ", is at version ", modified.now,
         "; expected version ", modified.seen, " instead.", advice);
}

/// The weights that regions read which W computes again: each list once, up to the last node for which that is done.
void check_recomputed(const std::vector<GroupPtr>& groups) {
  struct Last {
    uint64_t recomputed_for = 0;
    size_t group = 0;
  };
  std::unordered_map<const Reads*, Last> last;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& group = *groups[i];
    if (group.reads) {
      Last& entry = last[group.reads.get()];
      if (const uint64_t now = group.recomputed_for(); now > entry.recomputed_for) {
        entry = {now, i};
      }
    }
  }
  for (const auto& [reads, entry] : last) {
    for (const Reads::Read& read : reads->weights) {
      if (read.sequence_nr >= entry.recomputed_for) {
        break;
      }
      if (read.weight.was_modified()) {
        refuse_modified(entry.group, {Modified::Role::recomputed, read.weight.describe(),
                                      read.weight.seen(), read.weight.now()});
      }
    }
  }
}

void check_unmodified(const std::vector<GroupPtr>& groups) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (const auto modified = groups[i]->find_modified()) {
      refuse_modified(i, *modified);
    }
  }
  check_recomputed(groups);
}

/// The groups' books, in the hands of this call.
class Claims {
 public:
  explicit Claims(const std::vector<GroupPtr>& groups) {
    for (const GroupPtr& group : groups) {
      if (!zbp_book_claim(&group->book)) {
        const size_t i = books_.size();
        give_back();
        refuse(PyExc_RuntimeError, "param_groups[", i,
               "] is already running in another call of stage_backward_weight");
      }
      books_.push_back(&group->book);
    }
  }
  ~Claims() { give_back(); }
  Claims(const Claims&) = delete;
  Claims& operator=(const Claims&) = delete;

 private:
  void give_back() noexcept {
    for (zbp_book* book : books_) {
      zbp_book_give_back(book);
    }
    books_.clear();
  }
  std::vector<zbp_book*> books_;
};

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

struct zbp_call {
  zbp_call(zbp_group* const* handles, size_t count)
      : groups(groups_in(handles, count)), claims(groups) {
    for (const GroupPtr& group : groups) {
      turns.push_back({&group->layout, &group->book, held_by(*group)});
    }
  }
  ~zbp_call() {
    for (const GroupPtr& group : groups) {
      for (Weight& weight : group->weights) {
        weight.main_grad.reset();
      }
    }
  }
  zbp_call(const zbp_call&) = delete;
  zbp_call& operator=(const zbp_call&) = delete;

  /// Those of the groups that are not listed yet, each with a group that it is of.
  std::unordered_map<const void*, size_t>& unlisted() {
    if (!unlisted_) {
      unlisted_.emplace();
      for (size_t i = 0; i < groups.size(); ++i) {
        for (const Weight& weight : groups[i]->weights) {
          unlisted_->emplace(key_of(weight), i);
        }
      }
    }
    return *unlisted_;
  }
  /// Those of all groups, one after the other; until W runs, which may close groups.
  const std::vector<Weight*>& weights() {
    if (weights_.empty()) {
      for (const GroupPtr& group : groups) {
        for (Weight& weight : group->weights) {
          weights_.push_back(&weight);
        }
      }
    }
    return weights_;
  }
  static const void* key_of(const Weight& weight) {
    return weight.accumulator->variable.unsafeGetTensorImpl();
  }

  const std::vector<GroupPtr> groups;
  const Claims claims;  // from here on Python code may run
  std::vector<zbp_turn> turns;
  Barrier barrier;
  std::optional<at::AutoGradMode> no_grad;
  std::optional<ProfiledRange> range;

 private:
  std::optional<std::unordered_map<const void*, size_t>> unlisted_;
  std::vector<Weight*> weights_;
};

int zbp_call_new(zbp_group* const* groups, size_t count, zbp_call** call_out, zbp_error* error) {
  return kept_in(error, [&] {
    check_state(groups, count);
    *call_out = new zbp_call(groups, count);
  });
}

void zbp_call_free(zbp_call* call) {
  delete call;
}

int zbp_call_list(zbp_call* call, size_t i, PyObject* weight, zbp_error* error) {
  return kept_in(error, [&] {
    const at::Tensor* tensor = as_tensor(weight);
    if (!tensor) {
      refuse(PyExc_TypeError, "weights[", i, "] is a ", type_name(weight), "; expected a tensor");
    }
    call->unlisted().erase(tensor->unsafeGetTensorImpl());
  });
}

int zbp_call_check_listed(zbp_call* call, size_t count, zbp_error* error) {
  return kept_in(error, [&] {
    if (call->unlisted().empty()) {
      return;
    }
    const auto& [missing, i] = *call->unlisted().begin();
    for (const Weight& weight : call->groups[i]->weights) {
      if (zbp_call::key_of(weight) == missing) {
        refuse(PyExc_ValueError, "param_groups[", i, "] holds a gradient for a parameter of ",
               describe(weight.accumulator->variable), " that is not among the ", count,
               " weights; pass the weights that stage_backward_input was given");
      }
    }
  });
}

int zbp_call_check(zbp_call* call, zbp_error* error) {
  return guarded(error, [&] {
    check_leaves(call->groups);
    check_unmodified(call->groups);
    check_capture(call->groups);
  });
}

int zbp_call_weight(zbp_call* call, size_t i, PyObject** weight_out, zbp_error* error) {
  return kept_in(error, [&] {
    const auto& weights = call->weights();
    *weight_out = i < weights.size() ? wrap_tensor(weights[i]->accumulator->variable) : nullptr;
  });
}

int zbp_call_set_main_grad(zbp_call* call, size_t i, PyObject* main_grad, zbp_error* error) {
  return guarded(error, [&] {
    Weight& weight = *call->weights()[i];
    const at::Tensor& variable = weight.accumulator->variable;
    const at::Tensor* tensor = as_tensor(main_grad);
    if (!tensor) {
      refuse(PyExc_TypeError, "the main_grad of the weight of ", describe(variable), " is a ",
             type_name(main_grad), "; expected a tensor or None");
    }
    check_fits(*tensor, variable);
    weight.main_grad = *tensor;
  });
}

int zbp_call_begin(zbp_call* call, zbp_error* error) {
  return kept_in(error, [&] {
    call->barrier.begin();
    call->no_grad.emplace(false);
    call->range.emplace("zbpipe::weight_pass");
  });
}

zbp_turn* zbp_call_turns(zbp_call* call) {
  return call->turns.data();
}

int zbp_in_anomaly_mode(void) {
  return torch::autograd::AnomalyMode::is_enabled() ? 1 : 0;
}

int zbp_call_end(zbp_call* call, int status, zbp_error* error) {
  const std::unique_ptr<zbp_call> owned(call);
  owned->range.reset();
  owned->no_grad.reset();
  const int result = owned->barrier.end(error, [&] {
    if (status != ZBP_OK) {
      rethrow(*error, status);
    }
  });
  for (const GroupPtr& group : owned->groups) {
    if (result != ZBP_OK) {
      zbp_book_report_again(&group->book);
    }
  }
  return result;
}
