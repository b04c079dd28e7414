// A group's weights behind some of its faces.
#pragma once

#include "core/pass/zbp_reach.h"
#include "shim/pass/group.h"
#include "shim/torch/error.h"

namespace zbp {

/// Any number of questions about one group; borrows it. See zbp_reach.h.
class Reach {
 public:
  explicit Reach(const Group& group) : group_(group) {
    check_status(zbp_reach_init(&reach_, &group.layout, nullptr));
  }
  ~Reach() { zbp_reach_fini(&reach_); }
  Reach(const Reach&) = delete;
  Reach& operator=(const Reach&) = delete;

  /// A new question: behind no face yet.
  void begin() { zbp_reach_begin(&reach_); }
  /// And behind face number `f` of the task.
  void add(const Task& task, size_t f) {
    zbp_reach_add(&reach_, &group_.layout, static_cast<uint32_t>(task.plan().face_begin + f));
  }
  /// In the group's order.
  std::vector<const Weight*> weights() {
    zbp_reach_weights(&reach_);
    std::vector<const Weight*> weights;
    for (uint32_t i = 0; i < reach_.weight_count; ++i) {
      weights.push_back(&group_.weights[reach_.weight[i]]);
    }
    return weights;
  }

 private:
  const Group& group_;
  zbp_reach reach_{};
};

}  // namespace zbp
