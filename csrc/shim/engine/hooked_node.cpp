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

/// Before, and behind, the user's hooks of a kind; the kind calls one of the two operators.
template <class Kind>
struct First : Kind {
  explicit First(Seen seen) : seen(std::move(seen)) {}
  variable_list operator()(const variable_list& grads) { return seen_first(seen, grads); }
  variable_list operator()(const variable_list& grads, const variable_list& /*in*/) {
    return seen_first(seen, grads);
  }
  const Seen seen;
};

template <class Kind>
struct Last : Kind {
  explicit Last(Seen seen) : seen(std::move(seen)) {}
  variable_list operator()(const variable_list& grads) { return owned(seen, grads); }
  variable_list operator()(const variable_list& grads, const variable_list& /*in*/) {
    return owned(seen, grads);
  }
  const Seen seen;
};

template <class Kind>
void remove_ours(std::vector<std::unique_ptr<Kind>>& hooks) {
  const auto is_ours = [](const auto& hook) {
    const Kind& h = *hook;
    return typeid(h) == typeid(First<Kind>) || typeid(h) == typeid(Last<Kind>);
  };
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(), is_ours), hooks.end());
}

}  // namespace

HookedNode::HookedNode(Node& node) : node_(node) {
  const auto before = std::make_shared<std::optional<CameIn>>();
  auto& tensors = node.tensor_pre_hooks();
  tensors.insert(tensors.begin(), std::make_unique<First<FunctionPreHook>>(before));
  node.add_pre_hook(std::make_unique<Last<FunctionPreHook>>(before));
  if (!node.post_hooks().empty()) {
    const auto behind = std::make_shared<std::optional<CameIn>>();
    auto& posts = node.post_hooks();
    posts.insert(posts.begin(), std::make_unique<First<FunctionPostHook>>(behind));
    node.add_post_hook(std::make_unique<Last<FunctionPostHook>>(behind));
  }
}

HookedNode::~HookedNode() {
  remove_ours(node_.tensor_pre_hooks());
  remove_ours(node_.pre_hooks());
  remove_ours(node_.post_hooks());
}

}  // namespace zbp
