#include "shim/explain/zbp_explain.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/pass/scene.h"
#include "shim/pass/walk.h"
#include "shim/torch/error.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;

std::vector<at::Tensor> tensors_in(PyObject* seq, const char* name) {
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(seq); ++i) {
    const at::Tensor* tensor = as_tensor(PySequence_Fast_GET_ITEM(seq, i));
    if (!tensor) {
      refuse(PyExc_TypeError, name, "[", i, "] is a ",
             Py_TYPE(PySequence_Fast_GET_ITEM(seq, i))->tp_name, "; expected a tensor");
    }
    if (tensor->requires_grad()) {
      tensors.push_back(*tensor);
    }
  }
  return tensors;
}

}  // namespace

int zbp_explain_new(PyObject* outputs, PyObject* inputs, PyObject* weights, zbp_policy policy,
                    zbp_scene** scene_out, zbp_error* error) {
  std::unique_ptr<zbp_scene> scene;
  int status = guarded(error, [&] {
    scene = std::make_unique<zbp_scene>();
    scene->args.policy = policy;
    for (const at::Tensor& output : tensors_in(outputs, "outputs")) {
      scene->args.roots.push_back(impl::gradient_edge(output));
      scene->args.root_grads.push_back(at::ones_like(output));
    }
    scene->args.inputs = tensors_in(inputs, "inputs");
    scene->args.weights = tensors_in(weights, "weights");
  });
  if (status == ZBP_OK) {
    status = zbp_scene_begin(scene.get(), nullptr, error);
  }
  if (status == ZBP_OK) {
    *scene_out = scene.release();
  }
  return status;
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
  Group& group = *scene->groups[i];
  return {&group.layout, &group.book, held_by(group)};
}

int zbp_is_watched(PyObject* object, int* out, zbp_error* error) {
  return guarded(error, [&] {
    const at::Tensor* tensor = as_tensor(object);
    if (!tensor) {
      refuse(PyExc_TypeError, "tensor is a ", Py_TYPE(object)->tp_name, "; expected a tensor");
    }
    const NodePtr accumulator =
        tensor->is_leaf() ? impl::try_get_grad_accumulator(*tensor) : NodePtr();
    *out = !impl::hooks(*tensor).empty() || impl::post_acc_grad_hooks(*tensor) != nullptr ||
           (accumulator && has_hooks(*accumulator));
  });
}
