// What the weight pass asks of the shim before a group runs and when it is through: the rest of zbp_touch.h.

#include <algorithm>
#include <exception>

#include <torch/csrc/autograd/anomaly_mode.h>

#include "shim/torch/nodes.h"
#include "shim/pass/path.h"
#include "shim/pass/weight_nodes.h"
#include "shim/pass/zbp_shim.h"
#include "shim/pass/zbp_touch.h"
#include "shim/torch/detach.h"
#include "shim/torch/error.h"
#include "shim/torch/gil.h"
#include "shim/torch/python.h"
#include "shim/torch/streams.h"
#include "shim/work/work.h"

using namespace zbp;
using torch::autograd::AccumulateGrad;

namespace {

uint8_t seen_on(const Weight& weight) {
  AccumulateGrad& accumulator = *weight.accumulator;
  const bool is_hooked =
      has_hooks(accumulator) || accumulator.tensor_post_acc_grad_hooks() != nullptr;
  return static_cast<uint8_t>((is_hooked ? ZBP_WEIGHT_HOOKED : 0) |
                              (is_subclass(accumulator.variable) ? ZBP_WEIGHT_SPECIAL : 0) |
                              (accumulator.variable.requires_grad() ? 0 : ZBP_WEIGHT_FROZEN));
}

/// True once a hook was put on a node of the path: it is owed its gradient.
bool is_hooked(const Face& face) {
  return !std::all_of(face.path.begin(), face.path.end(),
                      [](Node* node) { return is_plain_step(*node); });
}

void look(Group& group, zbp_book& book) {
  for (uint32_t w = 0; w < book.weight_count; ++w) {
    zbp_book_see_weight(&book, w, seen_on(group.weights[w]));
  }
  for (const Task& task : group.tasks) {
    for (size_t i = 0; i < task.face.size(); ++i) {
      const auto f = static_cast<uint32_t>(task.plan().face_begin + i);
      zbp_book_see_path(&book, f, is_hooked(task.face[i]));
      if (book.face[f].half.panels > 0) {
        zbp_book_see_sum(&book, f, identity_of(sum_of(group.weights[task.plan(i).weight])));
      }
    }
  }
}

/// Which weights of the groups a retry cannot give their gradients any more.
std::string lost_weights(const zbp_turn* turn, size_t count) {
  std::string lost;
  for (size_t g = 0; g < count; ++g) {
    const Group& group = group_of(turn[g].held);
    for (uint32_t w = 0; group.book.has_failed && w < group.book.weight_count; ++w) {
      if (zbp_book_wants(&group.book, w)) {
        const at::Tensor& variable = group.weights[w].accumulator->variable;
        lost +=
            c10::str(lost.empty() ? "" : ", ", variable.scalar_type(), " ", variable.sym_sizes());
      }
    }
  }
  return lost;
}

/// Of an open group that no other call has.
bool only_adds(Group& group) {
  look(group, group.book);
  const auto is_plain = [](const zbp_book_weight& weight) {
    return (weight.seen & ZBP_WEIGHT_SPECIAL) == 0;
  };
  const auto runs_nothing = [&](const Task& task) {
    return task.works.empty() && std::none_of(task.face.begin(), task.face.end(), is_hooked);
  };
  uint32_t face = 0;
  zbp_how how{};
  how.is_anomaly = zbp_in_anomaly_mode();
  return std::all_of(group.book.weight, group.book.weight + group.book.weight_count, is_plain) &&
         std::all_of(group.tasks.begin(), group.tasks.end(), runs_nothing) &&
         !group.leaves_packed() &&
         zbp_book_way(&group.book, &group.layout, how, &face) == ZBP_WAY_DIRECT;
}

}  // namespace

bool zbp_in_anomaly_mode(void) {
  return torch::autograd::AnomalyMode::is_enabled();
}

int zbp_group_only_adds(zbp_group* group, int* out, zbp_error* error) {
  return kept_in(
      error, [&] { *out = zbp_group_state(group) == ZBP_GROUP_READY && only_adds(*group->group); });
}

int zbp_look(zbp_held* held, zbp_book* book, zbp_error* error) {
  return kept_in(error, [&] { look(group_of(held), *book); });
}

const void* zbp_weight_key(zbp_held* held, uint32_t weight) {
  return group_of(held).weights[weight].accumulator.get();
}

int zbp_follow_caller(zbp_held* held, zbp_error* error) {
  return kept_in(error, [&] { follow_caller(group_of(held)); });
}

int zbp_join_streams(zbp_held* held, zbp_error* error) {
  return kept_in(error, [&] { join_streams(group_of(held)); });
}

void zbp_held_release(zbp_held* held) {
  group_of(held).release();
}

void zbp_held_close(zbp_held* held) {
  Group& group = group_of(held);
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

void zbp_held_again(zbp_held* held) {
  for (Task& task : group_of(held).tasks) {
    for (Work& work : task.works) {
      make_ready_again(work);
    }
  }
}

int zbp_error_half_added(zbp_held* held, uint32_t face, zbp_error* error) {
  return kept_in(error, [&] {
    const Group& group = group_of(held);
    const at::Tensor& variable =
        group.weights[group.layout.face[face].weight].accumulator->variable;
    TORCH_CHECK(
        false, "a weight pass failed while it added to the gradient of the weight of ",
        variable.scalar_type(), " ", variable.sym_sizes(),
        ", and since then its gradient was replaced by another tensor or a hook was registered "
        "on its way; the rest of this microbatch's gradient can only be added, unwatched, to the "
        "tensor that has the first part: put that back, or repeat the step from zeroed gradients");
  });
}

void zbp_error_name_lost(zbp_error* error, const zbp_turn* turn, size_t count) {
  zbp_error named{};
  const int status = kept_in(&named, [&] {
    try {
      if (error->raised) {
        std::rethrow_exception(*static_cast<std::exception_ptr*>(error->raised));
      }
    } catch (const std::exception& raised) {
      // python_error among them, of a Function's saved tensors.
      const std::string message = raised.what();
      if (message.find(torch::autograd::ERR_BACKWARD_TWICE) == std::string::npos) {
        return;
      }
      const std::string lost = lost_weights(turn, count);
      TORCH_CHECK(
          lost.empty(),
          "the weight pass failed before, between the split nodes and these weights, and what the "
          "nodes there had saved is gone; the gradients of this microbatch cannot be added any "
          "more to the weights of ",
          lost, "; run the microbatch again");
    } catch (...) {  // others are told as they are
    }
  });
  if (status == ZBP_ETORCH) {
    std::swap(error->raised, named.raised);
  }
  zbp_error_clear(&named);
}
