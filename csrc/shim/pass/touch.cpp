// What the weight pass asks of the shim before a group runs and when it is through: zbp_weight.h.

#include <algorithm>
#include <exception>

#include <torch/csrc/autograd/anomaly_mode.h>

#include "shim/torch/nodes.h"
#include "shim/pass/path.h"
#include "shim/pass/weight_nodes.h"
#include "shim/pass/zbp_weight.h"
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
