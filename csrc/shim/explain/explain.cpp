#include "shim/explain/zbp_explain.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/pass/scene.h"
#include "shim/pass/walk.h"
#include "shim/torch/error.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

using namespace zbp;
namespace impl = torch::autograd::impl;

int zbp_explain_add(zbp_scene* scene, int what, PyObject* object, zbp_error* error) {
  return guarded(error, [&] {
    const at::Tensor& tensor = *as_tensor(object);
    InputPassArgs& args = scene->args;
    if (!tensor.requires_grad()) {
      return;
    }
    if (what == ZBP_EXPLAIN_OUTPUT) {
      args.roots.push_back(impl::gradient_edge(tensor));
      args.root_grads.push_back(at::ones_like(tensor));
    } else {
      (what == ZBP_EXPLAIN_INPUT ? args.inputs : args.weights).push_back(tensor);
    }
  });
}

int zbp_explain_end(zbp_scene* scene, int status, zbp_error* error) {
  return scene->barrier.end(error, [&] {
    if (status != ZBP_OK) {
      rethrow(*error, status);
    }
  });
}

size_t zbp_scene_group_count(const zbp_scene* scene) {
  return scene->groups.size();
}

zbp_turn zbp_scene_group(zbp_scene* scene, size_t i) {
  return turn_of(*scene->groups[i]);
}

int zbp_is_watched(PyObject* object, int* out, zbp_error* error) {
  return guarded(error, [&] {
    const at::Tensor& tensor = *as_tensor(object);
    const NodePtr accumulator =
        tensor.is_leaf() ? impl::try_get_grad_accumulator(tensor) : NodePtr();
    *out = !impl::hooks(tensor).empty() || impl::post_acc_grad_hooks(tensor) != nullptr ||
           (accumulator && has_hooks(*accumulator));
  });
}
