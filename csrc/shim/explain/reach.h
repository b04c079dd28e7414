// A group's weights behind some of its faces, and how they and shapes are told.
#pragma once

#include "core/pass/zbp_reach.h"
#include "shim/explain/zbp_account.h"
#include "shim/pass/group.h"
#include "shim/torch/error.h"
#include "shim/torch/python.h"

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
  /// And behind outside node number `o`.
  void add_outside(size_t o) {
    zbp_reach_add_outside(&reach_, &group_.layout, static_cast<uint32_t>(o));
  }
  /// In the group's order; borrowed until the next question.
  zbp_places weights() {
    zbp_reach_weights(&reach_);
    return {reach_.weight, reach_.weight_count};
  }

 private:
  const Group& group_;
  zbp_reach reach_{};
};

using Sizes = SmallVector<int64_t, 6>;

inline Sizes numbers(c10::SymIntArrayRef sizes) {
  Sizes numbers;
  for (const c10::SymInt& size : sizes) {
    numbers.push_back(size.maybe_as_int().value_or(-1));
  }
  return numbers;
}

/// What a visitor returned.
inline void check_told(int status) {
  if (status < 0) {
    throw python_error();
  }
}

}  // namespace zbp
