// A call of W as Python makes it: its arguments checked, the groups claimed, main_grad found; and its end.

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

void check_weights(zbp_group* const* groups, size_t count, PyObject* weights) {
  std::unordered_map<const void*, size_t> wanted;  // the groups' weights, and a group of each
  for (size_t i = 0; i < count; ++i) {
    for (const Weight& weight : groups[i]->group->weights) {
      wanted.emplace(weight.accumulator->variable.unsafeGetTensorImpl(), i);
    }
  }
  for (Py_ssize_t i = 0; i < size_of(weights); ++i) {
    const at::Tensor* tensor = as_tensor(item(weights, i));
    if (!tensor) {
      refuse(PyExc_TypeError, "weights[", i, "] is a ", type_name(item(weights, i)),
             "; expected a tensor");
    }
    wanted.erase(tensor->unsafeGetTensorImpl());
  }
  if (wanted.empty()) {
    return;
  }
  const auto& [missing, i] = *wanted.begin();
  for (const Weight& weight : groups[i]->group->weights) {
    if (weight.accumulator->variable.unsafeGetTensorImpl() == missing) {
      refuse(PyExc_ValueError, "param_groups[", i, "] holds a gradient for a parameter of ",
             describe(weight.accumulator->variable), " that is not among the ", size_of(weights),
             " weights; pass the weights that stage_backward_input was given");
    }
  }
}

void check_leaves(zbp_group* const* groups, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const Group& group = *groups[i]->group;
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

void check_capture(zbp_group* const* groups, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const Group& group = *groups[i]->group;
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
          " With checkpoint=\"recompute\", run the weight pass of all groups of a microbatch "
          "before "
          "weights or inputs change, or choose checkpoint=\"keep\".";
      break;
  }
  refuse(PyExc_RuntimeError,
         "one of the variables needed for gradient computation has been modified by an inplace "
         "operation: ",
         modified.tensor, ", which param_groups[", i, "]", reader, ", is at version ", modified.now,
         "; expected version ", modified.seen, " instead.", advice);
}

/// The weights that regions read which W computes again: each list once, up to the last node for which that is done.
void check_recomputed(zbp_group* const* groups, size_t count) {
  struct Last {
    uint64_t recomputed_for = 0;
    size_t group = 0;
  };
  std::unordered_map<const Reads*, Last> last;
  for (size_t i = 0; i < count; ++i) {
    const Group& group = *groups[i]->group;
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

void check_unmodified(zbp_group* const* groups, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (const auto modified = groups[i]->group->find_modified()) {
      refuse_modified(i, *modified);
    }
  }
  check_recomputed(groups, count);
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

/// For the time of one W, where the weights' main_grad are. Refuses one that does not fit; then no
/// weight has been touched.
class MainGrads {
 public:
  MainGrads(const std::vector<GroupPtr>& groups, bool enabled) : groups_(groups) {
    if (!enabled) {
      return;
    }
    try {
      visit([](Weight& weight) { weight.main_grad = find(weight.accumulator->variable); });
      visit([](Weight& weight) { announce(weight); });
    } catch (...) {
      visit([](Weight& weight) { weight.main_grad.reset(); });
      throw;
    }
  }
  ~MainGrads() {
    visit([](Weight& weight) { weight.main_grad.reset(); });
  }
  MainGrads(const MainGrads&) = delete;
  MainGrads& operator=(const MainGrads&) = delete;

 private:
  template <class Visit>
  void visit(const Visit& visit_weight) const {
    for (const GroupPtr& group : groups_) {
      std::for_each(group->weights.begin(), group->weights.end(), visit_weight);
    }
  }

  static at::Tensor find(const at::Tensor& variable) {
    THPObjectPtr parameter(THPVariable_Wrap(variable));
    THPObjectPtr value(parameter ? PyObject_GetAttrString(parameter, "main_grad") : nullptr);
    if (!value && PyErr_ExceptionMatches(PyExc_AttributeError)) {
      PyErr_Clear();
      return {};
    }
    if (!value) {
      throw python_error();
    }
    if (value.get() == Py_None) {
      return {};
    }
    const at::Tensor* tensor = as_tensor(value);
    if (!tensor) {
      refuse(PyExc_TypeError, "the main_grad of the weight of ", describe(variable), " is a ",
             type_name(value), "; expected a tensor or None");
    }
    if (!tensor->sym_sizes().equals(variable.sym_sizes()) ||
        tensor->device() != variable.device() || !tensor->is_floating_point() ||
        tensor->requires_grad()) {
      refuse(
          PyExc_ValueError, "the main_grad of the weight of ", describe(variable), " is ",
          describe(*tensor), tensor->requires_grad() ? " and requires a gradient" : "",
          "; expected a floating-point tensor of the weight's shape and device that requires none");
    }
    return *tensor;
  }

  /// So that hooks that would add .grad to main_grad see that there is nothing left to add.
  static void announce(const Weight& weight) {
    constexpr const char* flag = "grad_added_to_main_grad";
    if (!weight.main_grad.defined()) {
      return;
    }
    THPObjectPtr parameter(THPVariable_Wrap(weight.accumulator->variable));
    if (!parameter || (PyObject_HasAttrString(parameter, flag) &&
                       PyObject_SetAttrString(parameter, flag, Py_True) < 0)) {
      throw python_error();
    }
  }

  const std::vector<GroupPtr>& groups_;
};

}  // namespace

struct zbp_call {
  zbp_call(zbp_group* const* handles, size_t count)
      : groups(groups_in(handles, count)), claims(groups) {
    for (const GroupPtr& group : groups) {
      turns.push_back({&group->layout, &group->book, held_by(*group)});
    }
  }
  zbp_call(const zbp_call&) = delete;
  zbp_call& operator=(const zbp_call&) = delete;

  const std::vector<GroupPtr> groups;
  const Claims claims;  // from here on Python code may run
  std::vector<zbp_turn> turns;
  std::optional<MainGrads> main_grads;
  Barrier barrier;
  std::optional<at::AutoGradMode> no_grad;
  std::optional<Range> range;
};

int zbp_call_new(zbp_group* const* groups, size_t count, PyObject* weights, int main_grad,
                 zbp_call** call_out) {
  std::unique_ptr<zbp_call> call;
  const int status = guarded([&] {
    check_state(groups, count);
    call = std::make_unique<zbp_call>(groups, count);
    if (weights) {
      check_weights(groups, count, weights);
    }
    check_leaves(groups, count);
    check_unmodified(groups, count);
    check_capture(groups, count);
    call->main_grads.emplace(call->groups, main_grad != 0);
  });
  if (status != ZBP_OK) {
    return status;
  }
  if (call->barrier.begin() != ZBP_OK) {
    return ZBP_EPYTHON;
  }
  call->no_grad.emplace(false);
  call->range.emplace("zbpipe::weight_pass");
  *call_out = call.release();
  return ZBP_OK;
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
  const int result = owned->barrier.end([&] {
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
