#include "shim/pass/group.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include <torch/csrc/autograd/variable.h>

#include "shim/pass/dtensor.h"
#include "shim/pass/kinds.h"
#include "shim/torch/python.h"

namespace zbp {

bool has_version(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference();
}

Version::Version(const at::Tensor& tensor)
    : counter_(torch::autograd::impl::version_counter(tensor)),
      seen_(counter_.current_version()),
      type_(tensor.scalar_type()),
      device_(tensor.device()) {
  if (!tensor.is_nested()) {
    const c10::SymIntArrayRef sizes = tensor.sym_sizes();
    sizes_.assign(sizes.begin(), sizes.end());
  }
}

std::string Version::describe() const {
  return c10::str(type_, " ", c10::SymIntArrayRef(sizes_), " on ", device_);
}

size_t bytes_of(const at::Tensor& tensor) {
  const bool has_bytes = tensor.defined() && tensor.has_storage();
  return has_bytes ? static_cast<size_t>(tensor.storage().sym_nbytes().maybe_as_int().value_or(0))
                   : 0;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

uint64_t identity_of(const at::Tensor& grad) {
  return grad.defined() ? reinterpret_cast<uint64_t>(storage_of(local_part(grad))) : 0;
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

std::optional<size_t> face_at(const Task& task, uint32_t slot) {
  for (size_t f = 0; f < task.face.size(); ++f) {
    if (task.plan(f).slot == slot) {
      return f;
    }
  }
  return std::nullopt;
}

void Group::pin_outside() {
  const std::lock_guard<std::mutex> lock(unpinned_outside_mutex);
  for (const UnpinnedOutside& unpinned : std::exchange(unpinned_outside, {})) {
    Node& node = *unpinned.node;
    torch::autograd::SavedVariable before;  // freed behind the lock: that may run Python code
    // Another microbatch's I may see to the same node.
    const std::lock_guard<std::mutex> node_lock(NodeParts::mutex_of(node));
    if (unpinned.saved->has_hooks() && unpinned.is_left &&
        leave_packed(*unpinned.saved, arguments_outside)) {
      outside_recomputed_for = std::max(outside_recomputed_for, node.sequence_nr());
      continue;
    }
    const at::Tensor saved = pin_locked(*unpinned.saved, node, before);
    if (has_version(saved)) {
      saved_outside.emplace_back(saved);
    }
  }
}

Group::~Group() {
  release();
  zbp_book_fini(&book);
  zbp_layout_fini(&layout);
}

void Group::release() noexcept {
  // Freeing may run Python code that looks at this group: it must find it empty, not half freed.
  const auto dead_tasks = std::exchange(tasks, {});
  const auto dead_outside = std::exchange(outside, {});
  const auto dead_reads = std::exchange(reads, nullptr);
  saved_outside.clear();
  arguments_outside.clear();
  outside_recomputed_for = 0;
  for (const Task& task : dead_tasks) {
    if (task.is_consumed && task.kind() == Kind::deferred) {
      task.node->release_variables();
    }
  }
}

namespace {

Modified modified(const Watched& watched) {
  return {Modified::Role::held, describe(watched.tensor()), watched.kept_version(),
          static_cast<uint32_t>(watched.tensor()._version())};
}

std::optional<Modified> find_modified(const std::vector<Version>& versions, Modified::Role role) {
  const auto found = std::find_if(versions.begin(), versions.end(),
                                  [](const Version& version) { return version.was_modified(); });
  if (found == versions.end()) {
    return std::nullopt;
  }
  return Modified{role, found->describe(), found->seen(), found->now()};
}

}  // namespace

std::optional<Modified> Group::find_modified() const {
  using Role = Modified::Role;
  for (const Task& task : tasks) {
    const Watched* first = nullptr;
    const auto look = [&first](const Watched& watched) {
      first = first || !watched.was_modified() ? first : &watched;
    };
    for_each_watched(task, look);
    for (const Work& work : task.works) {
      if (work.call) {
        std::for_each(work.call->parameters.begin(), work.call->parameters.end(), look);
      }
    }
    if (first) {
      return modified(*first);
    }
    if (auto argument = zbp::find_modified(task.arguments, Role::recomputed)) {
      return argument;
    }
  }
  auto argument = zbp::find_modified(arguments_outside, Role::recomputed);
  return argument ? argument : zbp::find_modified(saved_outside, Role::saved_outside);
}

uint64_t Group::recomputed_for() const {
  return std::max(outside_recomputed_for, zbp_book_unpacks_up_to(&book, &layout));
}

size_t Group::bytes_held() const {
  size_t bytes = 0;
  std::unordered_set<const void*> seen;
  for (const Task& task : tasks) {
    for_each_watched(task, [&](const Watched& watched) {
      if (seen.insert(storage_of(watched.tensor())).second) {
        bytes += bytes_of(watched.tensor());
      }
    });
  }
  return bytes;
}

}  // namespace zbp
