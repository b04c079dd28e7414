#include "shim/engine/hooked_node.h"

#include <algorithm>
#include <optional>

#include <torch/csrc/autograd/function_hook.h>

namespace zbp {

namespace {

using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;

using Seen = std::shared_ptr<std::optional<CameIn>>;

/// What a list of gradients was before the user's hooks, and what it is to be behind them.
variable_list seen_first(const Seen& seen, const variable_list& grads) {
  seen->emplace(grads);
  return grads;
}

variable_list owned(const Seen& seen, const variable_list& grads) {
  variable_list own = grads;
  if (seen->has_value()) {
    (*seen)->own(own, grads);
    seen->reset();
  }
  return own;
}

struct FirstPreHook : FunctionPreHook {
  explicit FirstPreHook(Seen seen) : seen(std::move(seen)) {}
  variable_list operator()(const variable_list& grads) override { return seen_first(seen, grads); }
  const Seen seen;
};

struct LastPreHook : FunctionPreHook {
  explicit LastPreHook(Seen seen) : seen(std::move(seen)) {}
  variable_list operator()(const variable_list& grads) override { return owned(seen, grads); }
  const Seen seen;
};

struct FirstPostHook : FunctionPostHook {
  explicit FirstPostHook(Seen seen) : seen(std::move(seen)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*in*/) override {
    return seen_first(seen, outputs);
  }
  const Seen seen;
};

struct LastPostHook : FunctionPostHook {
  explicit LastPostHook(Seen seen) : seen(std::move(seen)) {}
  variable_list operator()(const variable_list& outputs, const variable_list& /*in*/) override {
    return owned(seen, outputs);
  }
  const Seen seen;
};

template <class First, class Last, class Hooks>
void remove_ours(Hooks& hooks) {
  const auto is_ours = [](const auto& hook) {
    const auto& h = *hook;
    return typeid(h) == typeid(First) || typeid(h) == typeid(Last);
  };
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(), is_ours), hooks.end());
}

}  // namespace

HookedNode::HookedNode(Node& node) : node_(node) {
  const auto before = std::make_shared<std::optional<CameIn>>();
  auto& tensors = node.tensor_pre_hooks();
  tensors.insert(tensors.begin(), std::make_unique<FirstPreHook>(before));
  node.add_pre_hook(std::make_unique<LastPreHook>(before));
  if (!node.post_hooks().empty()) {
    const auto behind = std::make_shared<std::optional<CameIn>>();
    auto& posts = node.post_hooks();
    posts.insert(posts.begin(), std::make_unique<FirstPostHook>(behind));
    node.add_post_hook(std::make_unique<LastPostHook>(behind));
  }
}

HookedNode::~HookedNode() {
  remove_ours<FirstPreHook, LastPreHook>(node_.tensor_pre_hooks());
  remove_ours<FirstPreHook, LastPreHook>(node_.pre_hooks());
  remove_ours<FirstPostHook, LastPostHook>(node_.post_hooks());
}

}  // namespace zbp
