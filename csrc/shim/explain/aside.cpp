#include "shim/explain/zbp_aside.h"

#include <utility>
#include <vector>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/torch/python.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;

/// A leaf, and what it has given away; or, until the first exchange and after the second, nothing.
struct Leaf {
  explicit Leaf(const at::Tensor& tensor)
      : tensor(tensor), accumulator(impl::try_get_grad_accumulator(tensor)) {}

  /// Exchanges what is kept here with what the tensor has. Throws nothing.
  void exchange() noexcept {
    if (auto* meta = impl::get_autograd_meta(tensor)) {
      std::swap(meta->grad_, grad);
      std::swap(meta->hooks_, hooks);
      std::swap(meta->cpp_hooks_list_, cpp_hooks);
      std::swap(meta->post_acc_grad_hooks_, post_hooks);
    }
    if (accumulator) {
      std::swap(accumulator->pre_hooks(), node_pre_hooks);
      std::swap(accumulator->post_hooks(), node_post_hooks);
    }
  }

  at::Tensor tensor;
  NodePtr accumulator;  // null where no graph leads to the tensor yet: then it has no hooks either
  at::Tensor grad;
  decltype(torch::autograd::AutogradMeta::hooks_) hooks;
  decltype(torch::autograd::AutogradMeta::cpp_hooks_list_) cpp_hooks;
  decltype(torch::autograd::AutogradMeta::post_acc_grad_hooks_) post_hooks;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> node_pre_hooks;
  std::vector<std::unique_ptr<torch::autograd::FunctionPostHook>> node_post_hooks;
};

}  // namespace

struct zbp_aside {
  std::vector<Leaf> leaves;
  bool is_taken = false;
};

int zbp_aside_new(zbp_aside** aside_out, zbp_error* error) {
  return kept_in(error, [&] { *aside_out = new zbp_aside; });
}

int zbp_aside_add(zbp_aside* aside, PyObject* object, zbp_error* error) {
  return kept_in(error, [&] {
    const at::Tensor& tensor = *as_tensor(object);
    if (tensor.is_leaf()) {
      aside->leaves.emplace_back(tensor);
    }
  });
}

void zbp_set_aside(zbp_aside* aside) {
  aside->is_taken = true;
  for (Leaf& leaf : aside->leaves) {
    leaf.exchange();
  }
}

void zbp_put_back(zbp_aside* aside) {
  if (aside && aside->is_taken) {
    // Backwards: a tensor that was given twice has given all the first time.
    for (auto leaf = aside->leaves.rbegin(); leaf != aside->leaves.rend(); ++leaf) {
      leaf->exchange();
    }
  }
  delete aside;
}
