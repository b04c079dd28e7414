#include "shim/group.h"

#include <unordered_set>

#include "shim/kinds.h"

namespace zbp {

namespace {

using WatchedList = c10::ArrayRef<Watched>;

bool has_version(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference();
}

}  // namespace

Watched::Watched(const at::Tensor& tensor)
    : tensor_(tensor.defined() && tensor.requires_grad() ? tensor.detach() : tensor),
      version_(has_version(tensor) ? tensor._version() : 0) {}

bool Watched::was_modified() const {
  return has_version(tensor_) && tensor_._version() != version_;
}

void Group::release() {
  tasks.clear();
  outside.clear();
}

const Watched* Group::find_modified() const {
  for (const Task& task : tasks) {
    if (task.other.was_modified()) {
      return &task.other;
    }
    for (const WatchedList list : {WatchedList(task.output_grads), WatchedList(task.kept)}) {
      for (const Watched& watched : list) {
        if (watched.was_modified()) {
          return &watched;
        }
      }
    }
  }
  return nullptr;
}

size_t Group::bytes_held() const {
  size_t bytes = 0;
  std::unordered_set<const void*> seen;
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.has_storage() &&
        seen.insert(tensor.storage().unsafeGetStorageImpl()).second) {
      bytes += tensor.storage().nbytes();
    }
  };
  for (const Task& task : tasks) {
    add(task.other.tensor());
    for (const WatchedList list : {WatchedList(task.output_grads), WatchedList(task.kept)}) {
      for (const Watched& watched : list) {
        add(watched.tensor());
      }
    }
    if (task.kind == Kind::deferred) {
      for (const at::Tensor& tensor : saved_for_weights(task)) {
        add(tensor);
      }
    }
  }
  return bytes;
}

}  // namespace zbp
