#include "shim/explain/zbp_aside.h"

#include <memory>

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
};

zbp_aside* zbp_set_aside(PyObject* tensors, zbp_error* error) {
  std::unique_ptr<zbp_aside, decltype(&zbp_put_back)> aside(nullptr, &zbp_put_back);
  const int status = guarded(error, [&] {
    auto found = std::make_unique<zbp_aside>();
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors); ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(tensors, i);
      const at::Tensor* tensor = as_tensor(item);
      if (!tensor) {
        refuse(PyExc_TypeError, "tensors[", i, "] is a ", Py_TYPE(item)->tp_name,
               "; expected a tensor");
      }
      if (tensor->is_leaf()) {
        found->leaves.emplace_back(*tensor);
      }
    }
    aside.reset(found.release());
    for (Leaf& leaf : aside->leaves) {
      leaf.exchange();
    }
  });
  return status == ZBP_OK ? aside.release() : nullptr;
}

void zbp_put_back(zbp_aside* aside) {
  if (aside) {
    // Backwards: a tensor that was given twice has given all the first time.
    for (auto leaf = aside->leaves.rbegin(); leaf != aside->leaves.rend(); ++leaf) {
      leaf->exchange();
    }
  }
  delete aside;
}
