#include "shim/pass/budget.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <new>
#include <utility>

#include "shim/pass/dtensor.h"
#include "shim/pass/group.h"
#include "shim/pass/kinds.h"

namespace zbp {

namespace {

/// While the mutex is locked nothing runs that could ask for the GIL, for which its holders may wait with the GIL held:
/// what a tensor's storage is, for a DTensor a matter of Python's, is found out before.
struct Room {
  std::mutex mutex;
  zbp_room of_process{};
};

/// Leaked: groups may be freed after all that is static.
Room& room() {
  static Room& room = *new Room;
  return room;
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

uint64_t address_of(const c10::weak_intrusive_ptr<c10::StorageImpl>& storage) {
  return reinterpret_cast<uintptr_t>(storage._unsafe_get_target());
}

zbp_place number_of(const Place& place) {
  return {address_of(place.storage), place.bytes};
}

/// Called with the room locked, as all that follows.
void count(CountedStorages& counted, Places&& places) {
  if (counted.capacity() - counted.size() < places.size()) {
    counted.reserve(std::max(counted.size() + places.size(), 2 * counted.capacity()));
  }
  for (Place& place : places) {
    if (zbp_room_count(&room().of_process, number_of(place)) != ZBP_OK) {
      throw std::bad_alloc();
    }
    counted.push_back(std::move(place.storage));
  }
}

void forget(const CountedStorages& counted) noexcept {
  for (const auto& storage : counted) {
    zbp_room_forget(&room().of_process, address_of(storage));
  }
}

/// Of what is not counted yet: what is always held, and that with what is held besides.
std::pair<uint64_t, uint64_t> weigh(const Places& always, const Places& besides) {
  std::vector<zbp_place> places;
  for (const Places* part : {&always, &besides}) {
    std::transform(part->begin(), part->end(), std::back_inserter(places), number_of);
  }
  std::pair<uint64_t, uint64_t> bytes;
  zbp_room_weigh(&room().of_process, places.data(), always.size(), places.size(), &bytes.first,
                 &bytes.second);
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
  zbp_budget& budget = groups[0]->budget->of_call;
  for (const GroupPtr& group : groups) {
    for (Task& task : group->tasks) {
      if (task.kind() != Kind::root) {
        const uint64_t gradients = gradient_bytes(*group, task);
        task.due = task.kind() == Kind::whole ? gradients : std::min(gradients, factor_bytes(task));
        zbp_budget_expect(&budget, task.due);
      }
    }
  }
}

uint8_t hold_within_budget(Group& group, Task& task, const Wanted& wanted) {
  zbp_demand demand{};
  demand.asked = wanted.asked;
  demand.bytes[ZBP_HOLD_COMPUTED] = wanted.computed;
  Places always = places_of(wanted.always);
  Places besides = places_of(wanted.besides);
  const std::lock_guard<std::mutex> lock(room().mutex);
  const auto [always_bytes, all_bytes] = weigh(always, besides);
  demand.bytes[ZBP_HOLD_PACKED] = wanted.can_stay_packed ? always_bytes : ZBP_NO_WAY;
  demand.bytes[ZBP_HOLD_KEPT] = wanted.is_weighed ? all_bytes : ZBP_NO_WAY;
  const uint8_t way =
      zbp_room_choose(&room().of_process, &group.budget->of_call, &group.share, &task.due, &demand);
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
    const std::lock_guard<std::mutex> lock(room().mutex);
    zbp_room_settle(&group.budget->of_call, &group.share, &task.due, task.due);
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
    const std::lock_guard<std::mutex> lock(room().mutex);
    try {
      count(now, std::move(places));
    } catch (...) {
      forget(now);
      throw;
    }
    forget(std::exchange(group.counted, std::move(now)));
    zbp_room_wait(&room().of_process, &group.share);
  }
}

void forget_held(Group& group) noexcept {
  if (group.budget) {
    const std::lock_guard<std::mutex> lock(room().mutex);
    forget(std::exchange(group.counted, {}));
    zbp_room_leave(&room().of_process, &group.share);
  }
}

}  // namespace zbp

uint64_t zbp_held_within_budgets(void) {
  return zbp_room_bytes(&zbp::room().of_process);
}
