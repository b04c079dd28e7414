// A call of W but for what it adds: zbp_weight.h. The rest is gradients.cpp and run.cpp.

#include "shim/weight/zbp_weight.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "shim/group/facts.h"
#include "shim/group/saved.h"
#include "shim/torch/detach.h"
#include "shim/torch/gil.h"
#include "shim/torch/main_grad.h"
#include "shim/torch/nodes.h"
#include "shim/group/work.h"

using namespace zbp;
using torch::autograd::AccumulateGrad;

namespace {

/// The groups of a call, and their streams. While it lives, the groups may have places where
/// main_grad adds.
struct Call {
  Call(zbp_group* const* groups, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      group.push_back(&group_of(groups[i]));
      streams.add(group.back()->streams);
    }
  }
  ~Call() {
    for (Group* one : group) {
      for (Weight& weight : one->weights) {
        weight.main_grad.reset();
      }
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(Call);

  SmallVector<Group*, 4> group;
  Streams streams;
};

// ---- what has changed since I

void check_leaves(const Group& group, size_t g) {
  for (size_t w = 0; w < group.weights.size(); ++w) {
    const at::Tensor& weight = group.weights[w].accumulator->variable;
    if (!group.book.weight[w].is_added && weight.grad_fn()) {
      refuse(PyExc_RuntimeError,
             "leaf variable has been moved into the graph interior: ", describe(weight),
             ", for which param_groups[", g,
             "] holds a gradient, was changed in place, since the forward, by something that needs "
             "a gradient; change weights under torch.no_grad(), and run the microbatch again");
    }
  }
}

/// tensor: what was changed, in words. what: what the group does with it. reader: a sentence on who
/// reads it, or nothing.
[[noreturn]] void refuse_modified(size_t g, const std::string& tensor, uint32_t seen, uint32_t now,
                                  const char* what, const std::string& reader, const char* advice) {
  refuse(PyExc_RuntimeError,
         "one of the variables needed for gradient computation has been modified by an inplace "
         "operation: ",
         tensor, ", which param_groups[", g, "] ", what, ", is at version ", now,
         "; expected version ", seen, " instead.", reader, " ", advice);
}

std::string reader_in(const Group& group, const Task& task) {
  std::string words = " It is read by " + task.name();
  const char* between = " for the weight of ";
  for (size_t f = 0; f < task.face.size(); ++f) {
    if (task.plan(f).weight >= 0) {
      words += between + describe(group.weights[task.plan(f).weight].accumulator->variable);
      between = " and of ";
    }
  }
  return words + ".";
}

void check_held(const Group& group, const Task& task, size_t g) {
  const auto check = [&](const Kept& kept, auto&&...) {
    if (kept.was_modified()) {
      refuse_modified(g, describe(kept.tensor()), kept.kept_version(),
                      static_cast<uint32_t>(kept.tensor()._version()), "holds for the weight pass",
                      reader_in(group, task),
                      "If something overwrites it between the two passes, clone it before. If a "
                      "later node of the same backward does, leave the weight to the input pass "
                      "with policy(exclude=[weight]), or give that node a clone.");
    }
  };
  for_each_kept(task, check);
  for (const Work& work : works_of(task)) {
    if (work.call) {
      std::for_each(work.call->parameters.begin(), work.call->parameters.end(), check);
    }
  }
}

[[noreturn]] void refuse_emptied(size_t g, const at::Tensor& tensor, const std::string& reader) {
  refuse(PyExc_RuntimeError, "param_groups[", g, "] reads the values of ", describe(tensor), " in ",
         reader,
         ", and their memory has been freed since the input pass. Bring it back before the "
         "weight pass, or leave the weight to the input pass with policy(exclude=[weight]).");
}

/// Weights that somebody took away since I, and what W still needs of them.
void check_there(const Group& group, size_t g) {
  bool is_one_emptied = false;
  for (size_t w = 0; w < group.weights.size(); ++w) {
    AccumulateGrad& accumulator = *group.weights[w].accumulator;
    const at::Tensor& weight = accumulator.variable;
    is_one_emptied = is_one_emptied || is_emptied(weight);
    if (!group.book.weight[w].is_added && !weight.is_nested() &&
        !accumulator.input_metadata(0).is_same_shape(weight)) {
      refuse(PyExc_RuntimeError, "the weight pass of param_groups[", g, "] adds a gradient of ",
             describe(Edge(group.weights[w].accumulator, 0)), " to a weight that has become ",
             describe(weight),
             " since the forward. Bring its data back before the weight pass, and take it away "
             "again after.");
    }
  }
  for (const Task& task : group.tasks) {
    // Not the parameters themselves: one may be there for its main_grad alone.
    for_each_kept(task, [&](const Kept& kept, auto&&...) {
      if (is_emptied(kept.tensor())) {
        refuse_emptied(g, kept.tensor(), task.name());
      }
    });
  }
  for (size_t o = 0; is_one_emptied && o < group.outside.size(); ++o) {
    const Outside& outside = group.outside[o];
    for_each_saved_outside(*outside.node, [&](const SavedVariable& saved) {
      if (const auto tensor = saved.get_raw_data(); tensor && is_emptied(*tensor)) {
        refuse_emptied(g, *tensor, outside.node->name());
      }
    });
  }
}

void check_versions(c10::ArrayRef<Version> versions, size_t g, const char* what,
                    const char* advice) {
  for (const Version& version : versions) {
    if (version.was_modified()) {
      refuse_modified(g, version.describe(), version.seen(), version.now(), what, "", advice);
    }
  }
}

void check_recomputed(c10::ArrayRef<Version> versions, size_t g) {
  check_versions(versions, g, "would read to compute a checkpointed region again",
                 "With checkpoint=\"recompute\", run the weight pass of all groups of a microbatch "
                 "before weights or inputs change, or choose checkpoint=\"keep\".");
}

void check_unmodified(const Group& group, size_t g) {
  const auto check_packed = [g](const Packed& packed) { check_recomputed(packed.arguments, g); };
  for (const Task& task : group.tasks) {
    check_held(group, task, g);
    for_each_packed(task, check_packed);
  }
  for (const PackedPtr& packed : group.packed_outside) {
    check_packed(*packed);
  }
  check_versions(
      group.saved_outside, g, "needs where its weights were computed",
      "Run the weight pass before it changes, or leave the weight to the input pass with "
      "policy(exclude=[weight]).");
}

/// Checks the weights that regions read which W computes again for the group.
void check_reads(const Group& group, size_t g) {
  const uint64_t last = group.reads ? group.recomputed_for() : 0;
  for (size_t i = 0; last > 0 && i < group.reads->weights.size(); ++i) {
    const Reads::Read& read = group.reads->weights[i];
    if (read.sequence_nr >= last) {
      break;
    }
    check_recomputed(read.weight, g);
  }
}

void check_capture(const Group& group, size_t g) {
  if (const bool then = group.was_captured; then != group.streams.are_captured()) {
    refuse(PyExc_RuntimeError, "param_groups[", g, "] was made by an input pass ",
           then ? "within" : "outside",
           " the capture of a CUDA graph, and its weight pass is called ",
           then ? "outside of it" : "within one",
           ", where it would read memory that a replay overwrites; capture both passes in one "
           "graph, or neither");
  }
}

// ---- main_grad

void find_main_grads(const Call& call) {
  variable_list weights;
  for (const Group* group : call.group) {
    const variable_list its = group->variables();
    weights.insert(weights.end(), its.begin(), its.end());
  }
  const variable_list places =
      tensors_in(call_python(OF_MAIN_GRADS, "places", {checked(wrap_tensors(weights))}));
  size_t number = 0;
  for (Group* group : call.group) {
    for (Weight& weight : group->weights) {
      weight.main_grad = places[number++];
    }
  }
}

void check(const Call& call, bool main_grad) {
  for (const auto& check_group :
       {check_leaves, check_there, check_unmodified, check_reads, check_capture}) {
    for (size_t g = 0; g < call.group.size(); ++g) {
      check_group(*call.group[g], g);
    }
  }
  if (main_grad) {
    find_main_grads(call);
  }
}

// ---- hooks

bool is_elsewhere(const Task& task, size_t f, const std::optional<c10::Stream>& stream) {
  bool is_elsewhere = false;
  for_each_kept(task, [&](const Kept& kept, Role /*role*/, const auto& serves) {
    is_elsewhere =
        is_elsewhere || (kept.tensor().defined() && serves(f) && kept.stream() != stream);
  });
  return is_elsewhere;
}

uint8_t seen_on(const Weight& weight) {
  AccumulateGrad& accumulator = *weight.accumulator;
  const bool is_hooked =
      has_hooks(accumulator) || accumulator.tensor_post_acc_grad_hooks() != nullptr;
  return static_cast<uint8_t>((is_hooked ? ZBP_WEIGHT_HOOKED : 0) |
                              (accumulator.variable.requires_grad() ? 0 : ZBP_WEIGHT_FROZEN));
}

}  // namespace

int zbp_weight_call(zbp_group* const* groups, size_t count, zbp_how how, bool main_grad,
                    zbp_error* error) {
  const auto body = [&] {
    const Call call(groups, count);
    check(call, main_grad);
    const at::AutoGradMode no_grad(false);
    RECORD_USER_SCOPE("zbpipe::weight_pass");
    how.is_anomaly = torch::autograd::AnomalyMode::is_enabled();
    const int status = [&] {
      const ReleaseGil no_gil;
      call.streams.follow_caller();
      const int first = zbp_pass_weights(groups, count, how, error);
      call.streams.join();  // also after an error: part of the gradients may have been added
      return first;
    }();
    check_status(status, *error);
  };
  return guarded(error, body, /*raises_warnings=*/false);
}

int zbp_group_see_hooks(zbp_group* handle, zbp_error* error) {
  return kept_in(error, [&] {
    Group& group = group_of(handle);
    for (uint32_t w = 0; w < group.book.weight_count; ++w) {
      group.book.weight[w].seen = seen_on(group.weights[w]);
    }
    for (const Task& task : group.tasks) {
      for (size_t f = 0; f < task.face.size(); ++f) {
        // Once a hook was put on a node of the path: it is owed its gradient.
        const auto path = path_of(task, f);
        if (!std::all_of(path.begin(), path.end(), [](Node* n) { return is_plain_step(*n); })) {
          zbp_layout_give_up_path(&group.layout, task.plan().face_begin + static_cast<uint32_t>(f));
        }
        const int32_t w = task.plan(f).weight;
        if (w >= 0 && !group.streams.empty() &&
            is_elsewhere(task, f, stream_of(group.weights[w]))) {
          group.book.weight[w].seen |= ZBP_WEIGHT_ELSEWHERE;
        }
      }
    }
  });
}

const void* zbp_weight_key(const zbp_group* group, uint32_t weight) {
  return group_of(group).weights[weight].accumulator.get();
}

void zbp_group_release(zbp_group* group) {
  group_of(group).release();
}

void zbp_group_close(zbp_group* handle) {
  Group& group = group_of(handle);
  group.release();
  const auto weights = std::exchange(group.weights, {});
  group.detach_outputs();
}

void zbp_group_again(zbp_group* group) {
  for (Task& task : group_of(group).tasks) {
    if (auto* works = std::get_if<Given>(&task.work)) {
      std::for_each(works->begin(), works->end(), make_ready_again);
    }
  }
}
