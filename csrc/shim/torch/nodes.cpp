#include "shim/torch/nodes.h"

#include <atomic>
#include <unordered_set>

#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_function.h>

#include "shim/torch/names.h"

namespace zbp {

// at::isTensorSubclassLike() would also say yes to every tensor under a dispatch mode.
bool is_subclass(const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet keys(
      {DispatchKey::Python, DispatchKey::Batched, DispatchKey::FuncTorchBatched,
       DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize});
  return tensor.key_set().has_any(keys) || tensor.layout() != at::kStrided;
}

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty() || !node.post_hooks().empty();
}

bool is_generated(const Node& node) {
  return is_like<torch::autograd::generated::MmBackward0>(node, "11MmBackward0E");
}

bool is_python_function(const Node& node) {
  return typeid(node).name() == name_of<torch::autograd::PyNode>();
}

namespace {

/// Replaced with the GIL, read without. None is destroyed: they are few.
std::atomic<const std::unordered_set<std::string>*> distrusted = nullptr;

}  // namespace

void distrust(const char* type) {
  const auto* known = distrusted.load();
  auto* more = known ? new auto(*known) : new std::unordered_set<std::string>;
  more->insert(type);
  distrusted = more;
}

bool is_distrusted(const Node& node) {
  const auto* known = distrusted.load(std::memory_order_acquire);
  return known && known->count(node.name()) != 0;
}

}  // namespace zbp
