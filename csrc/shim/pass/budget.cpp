#include "shim/pass/budget.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "shim/pass/dtensor.h"
#include "shim/pass/group.h"
#include "shim/pass/kinds.h"

namespace zbp {

namespace {

struct Counted {
  size_t groups = 0;
  uint64_t bytes = 0;
};

/// While the mutex is locked nothing runs that could ask for the GIL, for which its holders may wait with the GIL held:
/// what a tensor's storage is, for a DTensor a matter of Python's, is found out before.
struct Books {
  std::mutex mutex;
  std::unordered_map<const c10::StorageImpl*, Counted> of_storage;
  uint64_t least_waiting = 0;
  zbp_most most{};  // of least_waiting
};

std::atomic<uint64_t> counted_bytes = 0;  // written with the books locked

/// Leaked: groups may be freed after all that is static.
Books& books() {
  static Books& books = *new Books;
  return books;
}

/// A storage, and its bytes.
struct Place {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint64_t bytes;
};

using Places = std::vector<Place>;

void add_place(Places& places, const at::Tensor& whole) {
  const at::Tensor tensor = local_part(whole);
  if (tensor.defined() && tensor.has_storage()) {
    places.push_back({tensor.storage().getWeakStorageImpl(), bytes_of(tensor)});
  }
}

Places places_of(const variable_list& tensors) {
  Places places;
  for (const at::Tensor& tensor : tensors) {
    add_place(places, tensor);
  }
  return places;
}

void add_places(Places& places, const Task& task) {
  for_each_watched(task, [&](const Watched& one) { add_place(places, one.tensor()); });
}

void count(CountedStorages& counted, Places&& places) {
  for (Place& place : places) {
    const auto [entry, is_new] = books().of_storage.try_emplace(place.storage._unsafe_get_target());
    if (is_new) {
      entry->second.bytes = place.bytes;
      counted_bytes += place.bytes;
    }
    ++entry->second.groups;
    counted.push_back(std::move(place.storage));
  }
}

void forget(const CountedStorages& counted) noexcept {
  for (const auto& storage : counted) {
    const auto entry = books().of_storage.find(storage._unsafe_get_target());
    if (entry != books().of_storage.end() && --entry->second.groups == 0) {
      counted_bytes -= entry->second.bytes;
      books().of_storage.erase(entry);
    }
  }
}

uint64_t uncounted_bytes(const Places& places, std::unordered_set<const void*>& seen) {
  uint64_t bytes = 0;
  for (const Place& place : places) {
    const c10::StorageImpl* const storage = place.storage._unsafe_get_target();
    if (books().of_storage.count(storage) == 0 && seen.insert(storage).second) {
      bytes += place.bytes;
    }
  }
  return bytes;
}

/// Of a gradient that goes along the edge; 0 where its size is not known as a number.
uint64_t bytes_along(const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  uint64_t bytes = 0;
  if (!metadata.is_nested_tensor()) {
    bytes = c10::elementSize(c10::typeMetaToScalarType(metadata.options().dtype()));
    for (const c10::SymInt& size : metadata.shape_as_dim_vector()) {
      bytes *= static_cast<uint64_t>(size.maybe_as_int().value_or(0));
    }
  }
  return bytes;
}

/// Of a split node's output gradients and, unless it may stay packed, of what it multiplies them with, which has the
/// shape of another gradient.
uint64_t factor_bytes(const Task& task) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < task.node->num_inputs(); ++i) {
    bytes += bytes_along(Edge(task.node, i));
  }
  const bool is_packed = (fact_of_split(*task.node).flag & ZBP_FACT_PACKED) != 0;
  for (uint32_t slot = 0; !is_packed && slot < task.node->num_outputs(); ++slot) {
    if (task.node->next_edge(slot).is_valid() && !face_at(task, slot)) {
      bytes += bytes_along(task.node->next_edge(slot));
    }
  }
  return bytes;
}

/// What is free for a task of this I, behind Note [Room that is kept free]. Called with the books locked.
uint64_t room_in(const Budget& budget) {
  const uint64_t now = books().least_waiting + budget.least;
  const uint64_t most = zbp_most_of(&books().most);
  const uint64_t to_come = most - std::min(most, now);
  const uint64_t taken = counted_bytes + budget.due + to_come;
  return budget.at_most - std::min(budget.at_most, taken);
}

/// The task has run. Called with the books locked.
void settle(Group& group, Task& task, uint64_t least) {
  group.budget->due -= task.due;
  task.due = 0;
  group.least_held += least;
}

/// Modulo 2^64. Called with the books locked.
void add_to_least_waiting(uint64_t bytes) {
  if (bytes != 0) {
    books().least_waiting += bytes;
    zbp_most_see(&books().most, books().least_waiting);
  }
}

}  // namespace

uint64_t gradient_bytes(const Group& group, const Task& task, size_t face) {
  const uint64_t bytes = bytes_along(task.face[face].edge);
  const int32_t of = task.plan(face).weight;
  const at::Tensor weight = of < 0 ? at::Tensor() : group.weights[of].accumulator->variable;
  if (!is_dtensor(weight) || weight.sym_numel().maybe_as_int().value_or(0) == 0) {
    return bytes;
  }
  // Of a DTensor this rank holds its part.
  return bytes / static_cast<uint64_t>(weight.numel()) *
         static_cast<uint64_t>(local_part(weight).numel());
}

uint64_t gradient_bytes(const Group& group, const Task& task) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < task.face.size(); ++i) {
    bytes += gradient_bytes(group, task, i);
  }
  return bytes;
}

void expect_held(const std::vector<GroupPtr>& groups) {
  if (groups.empty() || !groups[0]->budget) {
    return;
  }
  Budget& budget = *groups[0]->budget;
  for (const GroupPtr& group : groups) {
    for (Task& task : group->tasks) {
      if (task.kind() != Kind::root) {
        const uint64_t gradients = gradient_bytes(*group, task);
        task.due = task.kind() == Kind::whole ? gradients : std::min(gradients, factor_bytes(task));
        budget.due += task.due;
      }
    }
  }
  budget.least = budget.due;
}

uint8_t hold_within_budget(Group& group, Task& task, const Wanted& wanted) {
  zbp_demand demand{};
  demand.asked = wanted.asked;
  demand.bytes[ZBP_HOLD_COMPUTED] = wanted.computed;
  Places always = places_of(wanted.always);
  Places besides = places_of(wanted.besides);
  const std::lock_guard<std::mutex> lock(books().mutex);
  std::unordered_set<const void*> seen;
  const uint64_t always_bytes = uncounted_bytes(always, seen);
  demand.bytes[ZBP_HOLD_PACKED] = wanted.can_stay_packed ? always_bytes : ZBP_NO_WAY;
  demand.bytes[ZBP_HOLD_KEPT] =
      wanted.is_weighed ? always_bytes + uncounted_bytes(besides, seen) : ZBP_NO_WAY;
  settle(group, task, *std::min_element(std::begin(demand.bytes), std::end(demand.bytes)));
  const uint8_t way = zbp_hold_within(room_in(*group.budget), &demand);
  if (way != wanted.asked) {
    group.budget->is_full = true;
  }
  if (way != ZBP_HOLD_COMPUTED) {
    count(group.counted, std::move(always));
  }
  if (way == ZBP_HOLD_KEPT) {
    count(group.counted, std::move(besides));
  }
  return way;
}

void count_held(Group& group, Task& task) {
  if (group.budget) {
    Places places;
    add_places(places, task);
    const std::lock_guard<std::mutex> lock(books().mutex);
    settle(group, task, task.due);
    count(group.counted, std::move(places));
    const auto dead = std::stable_partition(group.counted.begin(), group.counted.end(),
                                            [](const auto& storage) { return !storage.expired(); });
    forget({std::make_move_iterator(dead), std::make_move_iterator(group.counted.end())});
    group.counted.erase(dead, group.counted.end());
  }
}

void begin_to_wait(Group& group) {
  if (group.budget) {
    Places places;
    for (const Task& task : group.tasks) {
      add_places(places, task);
    }
    CountedStorages now;
    const std::lock_guard<std::mutex> lock(books().mutex);
    count(now, std::move(places));
    forget(std::exchange(group.counted, std::move(now)));
    group.waits = true;
    add_to_least_waiting(group.least_held);
  }
}

void forget_held(Group& group) noexcept {
  if (group.budget) {
    const std::lock_guard<std::mutex> lock(books().mutex);
    forget(std::exchange(group.counted, {}));
    if (std::exchange(group.waits, false)) {
      add_to_least_waiting(0 - group.least_held);
    }
  }
}

}  // namespace zbp

uint64_t zbp_held_within_budgets(void) {
  return zbp::counted_bytes;
}
