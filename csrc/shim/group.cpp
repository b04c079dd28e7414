#include "shim/group.h"

#include <unordered_set>
#include <utility>

#include "shim/kinds.h"

namespace zbp {

namespace {

bool has_version(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference();
}

}  // namespace

const void* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

Watched::Watched(const at::Tensor& tensor)
    : tensor_(tensor.defined() && tensor.requires_grad() ? tensor.detach() : tensor),
      version_(has_version(tensor) ? tensor._version() : 0) {}

Watched Watched::with_history(at::Tensor&& tensor) noexcept {
  Watched watched;
  watched.version_ = has_version(tensor) ? tensor._version() : 0;
  watched.tensor_ = std::move(tensor);
  return watched;
}

bool Watched::was_modified() const {
  return has_version(tensor_) && tensor_._version() != version_;
}

void Group::pin_outside() {
  const std::lock_guard<std::mutex> lock(packed_outside_mutex);
  for (const PackedOutside& packed : std::exchange(packed_outside, {})) {
    // Another microbatch's I may see to the same node.
    const std::lock_guard<std::mutex> node_lock(NodeParts::mutex_of(*packed.node));
    const bool is_done = !packed.saved->has_hooks();
    if (!is_done && !(packed.is_left && leave_packed(*packed.saved))) {
      pin(*packed.saved, *packed.node, /*is_read_by_w=*/true);
    }
  }
}

void Group::release() {
  // Freeing may run Python code that looks at this group: it must find it empty, not half freed.
  const auto dead_tasks = std::exchange(tasks, {});
  const auto dead_outside = std::exchange(outside, {});
}

void Reach::visit(int32_t weight, int32_t outside) {
  if (weight >= 0) {
    weight_[weight] = true;
  } else if (outside >= 0 && !outside_[outside]) {
    outside_[outside] = true;
    pending_.push_back(outside);
  }
}

void Reach::add(const Face& face) {
  visit(face.weight, face.outside);
  while (!pending_.empty()) {
    const Outside& outside = group_.outside[pending_.back()];
    pending_.pop_back();
    for (const Outside::Hop& hop : outside.hops) {
      visit(hop.weight, hop.outside);
    }
  }
}

std::vector<const Weight*> Reach::weights() const {
  std::vector<const Weight*> weights;
  for (size_t i = 0; i < weight_.size(); ++i) {
    if (weight_[i]) {
      weights.push_back(&group_.weights[i]);
    }
  }
  return weights;
}

const Watched* Group::find_modified() const {
  const Watched* modified = nullptr;
  for (const Task& task : tasks) {
    for_each_watched(task, [&](const Watched& watched) {
      if (!modified && watched.was_modified()) {
        modified = &watched;
      }
    });
    for (const Work& work : task.works) {
      for (size_t i = 0; work.call && !modified && i < work.call->parameters.size(); ++i) {
        const Watched& parameter = work.call->parameters[i];
        modified = parameter.was_modified() ? &parameter : nullptr;
      }
    }
  }
  return modified;
}

size_t Group::bytes_held() const {
  size_t bytes = 0;
  std::unordered_set<const void*> seen;
  for (const Task& task : tasks) {
    for_each_watched(task, [&](const Watched& watched) {
      const void* storage = storage_of(watched.tensor());
      if (storage && seen.insert(storage).second) {
        bytes += watched.tensor().storage().nbytes();
      }
    });
  }
  return bytes;
}

}  // namespace zbp
