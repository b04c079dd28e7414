// What may wait for W under a budget, as the core counts it (zbp_room.h): which storages and gradients there are.
//
// Threads: any; several stand-ins of one call of I may ask at the same time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "core/pass/zbp_room.h"
#include "shim/torch/compat.h"

namespace zbp {

struct Group;
struct Task;

/// Of one call of I; its groups share it.
struct Budget {
  explicit Budget(uint64_t bytes) : of_call{bytes, 0, 0} {}

  zbp_budget of_call;  // behind the lock of the room
  // Something did not fit: what is packed from here on stays packed, so that one region at most is both kept and
  // computed again.
  std::atomic<bool> is_full = false;
};

/// The storages that a group has counted. A weak reference to each: while it is counted nobody gets its address.
using CountedStorages = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

/// What the task would hold: `always`, and `besides` if it is not left packed.
struct Wanted {
  uint8_t asked = ZBP_HOLD_KEPT;
  uint64_t computed = 0;   // bytes of the gradients, if I computes them
  bool is_weighed = true;  // false: `besides` is not known, so that it cannot be kept
  bool can_stay_packed = false;
  variable_list always;
  variable_list besides;
};

/// Of the gradient at a face of the task, on this rank; 0 where its size is not known as a number.
uint64_t gradient_bytes(const Group& group, const Task& task, size_t face);

/// Of those at all of them.
uint64_t gradient_bytes(const Group& group, const Task& task);

/// Before the run: reckons what each task of an I's groups will hold at least. Called with the GIL held.
void expect_held(const std::vector<std::shared_ptr<Group>>& groups);

/// Finds the ZBP_HOLD_* for the task, and counts what it holds then, but for gradients that are still to be computed.
/// Called for groups that have a budget.
uint8_t hold_within_budget(Group& group, Task& task, const Wanted& wanted);

/// Counts what the task keeps, if its group has a budget, and no more what the group has let go of. A storage that is
/// counted already costs nothing.
void count_held(Group& group, Task& task);

/// I has succeeded: counts anew what all of the group's tasks hold, which waits from here on.
void begin_to_wait(Group& group);

/// Of a group that is released.
void forget_held(Group& group) noexcept;

}  // namespace zbp
