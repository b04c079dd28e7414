#include "shim/torch/nodes.h"

#include <cstring>
#include <string_view>

#include <torch/csrc/autograd/function_hook.h>

namespace zbp {

// at::isTensorSubclassLike() would also say yes to every tensor under a dispatch mode.
bool is_subclass(const at::Tensor& tensor) {
  using c10::DispatchKey;
  return tensor.layout() != at::kStrided ||
         tensor.key_set().has_any(c10::DispatchKeySet(
             {DispatchKey::Python, DispatchKey::Batched, DispatchKey::FuncTorchBatched,
              DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize}));
}

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         !node.retains_grad_hooks().empty() || !node.post_hooks().empty();
}

namespace {

bool begins(const char* text, std::string_view with) {
  return std::strncmp(text, with.data(), with.size()) == 0;
}

}  // namespace

bool is_generated(const Node& node) {
  return begins(typeid(node).name(), "N5torch8autograd9generated");
}

bool is_python_function(const Node& node) {
  return begins(typeid(node).name(), "N5torch8autograd6PyNodeE");
}

}  // namespace zbp
