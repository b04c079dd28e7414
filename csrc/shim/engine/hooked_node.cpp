#include "shim/engine/hooked_node.h"

#include <algorithm>

#include <torch/csrc/autograd/function_hook.h>

namespace zbp {

namespace {

using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;

using Seen = std::shared_ptr<std::optional<CameIn>>;

/// In front of the user's hooks of a kind it sees the gradients, behind them it owns what is new.
class Look : public FunctionPreHook, public FunctionPostHook {
 public:
  Look(Seen seen, bool is_first) : seen_(std::move(seen)), is_first_(is_first) {}

  variable_list operator()(const variable_list& grads) override {
    variable_list own = grads;
    if (is_first_) {
      seen_->emplace(grads);
    } else if (seen_->has_value()) {
      (*seen_)->own(own, grads);
      seen_->reset();
    }
    return own;
  }
  variable_list operator()(const variable_list& grads, const variable_list& /*inputs*/) override {
    return (*this)(grads);
  }

 private:
  const Seen seen_;
  const bool is_first_;
};

/// In front of the `first` hooks, and behind the `last` ones, which may be the same.
template <class Kind>
void put_around(std::vector<std::unique_ptr<Kind>>& first,
                std::vector<std::unique_ptr<Kind>>& last) {
  const auto seen = std::make_shared<std::optional<CameIn>>();
  first.insert(first.begin(), std::make_unique<Look>(seen, true));
  last.push_back(std::make_unique<Look>(seen, false));
}

template <class Kind>
void remove_ours(std::vector<std::unique_ptr<Kind>>& hooks) {
  const auto is_ours = [](const auto& hook) {
    const Kind& h = *hook;
    return typeid(h) == typeid(Look);
  };
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(), is_ours), hooks.end());
}

}  // namespace

HookedNode::HookedNode(Node& node) : node_(node) {
  put_around(node.tensor_pre_hooks(), node.pre_hooks());
  if (!node.post_hooks().empty()) {
    put_around(node.post_hooks(), node.post_hooks());
  }
}

HookedNode::~HookedNode() {
  remove_ours(node_.tensor_pre_hooks());
  remove_ours(node_.pre_hooks());
  remove_ours(node_.post_hooks());
}

}  // namespace zbp
