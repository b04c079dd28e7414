#include "shim/explain/zbp_explain.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/explain/reach.h"
#include "shim/pass/kinds.h"
#include "shim/pass/scene.h"
#include "shim/pass/walk.h"
#include "shim/torch/error.h"
#include "shim/torch/python.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;

const char* name_of_why(uint8_t why) {
  switch (why) {
    case ZBP_WHY_SEPARABLE:
      return "separable";
    case ZBP_WHY_POST_HOOK:
      return "post hook";
    case ZBP_WHY_POLICY:
      return "policy";
    case ZBP_WHY_FUNCTION:
      return "function";
    case ZBP_WHY_UNKNOWN:
      return "unknown";
    case ZBP_WHY_PACKED:
      return "packed";
    case ZBP_WHY_LIGHT:
      return "light";
    default:
      return "root";
  }
}

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

/// What makes W go through the engine to get from the face to its weight; nothing if it need not.
std::optional<std::string> obstacle_of(const Face& face, const zbp_face& plan) {
  switch (plan.obstacle) {
    case ZBP_OBSTACLE_NONE:
      return std::nullopt;
    case ZBP_OBSTACLE_CAST:
      return "it is cast twice on its way";
    case ZBP_OBSTACLE_SUM:
      return "several gradients meet before its cast";
    default:
      break;
  }
  Node* node = face.edge.function.get();
  for (uint8_t i = 0; i < plan.steps; ++i) {
    node = node->next_edge(0).function.get();
  }
  return c10::str(has_hooks(*node) ? "a hook watches " : "it is computed by ", node->name());
}

void tell(const zbp_explain_visitor& visitor, const Task& task, size_t f, Reach& reach) {
  const Face& face = task.face[f];
  const zbp_face& plan = task.plan(f);
  const auto& metadata = face.edge.function->input_metadata(face.edge.input_nr);
  const Sizes sizes =
      metadata.is_nested_tensor() ? Sizes() : numbers(metadata.shape_as_dim_vector());
  const std::optional<std::string> way = obstacle_of(face, plan);
  reach.begin();
  reach.add(task, f);
  const zbp_explain_edge edge{
      plan.slot, {sizes.data(), sizes.size()}, way ? way->c_str() : nullptr, reach.weights()};
  check_told(visitor.edge(visitor.arg, &edge));
}

void tell(const zbp_explain_visitor& visitor, const Task& task, Reach& reach) {
  THPObjectPtr node(torch::autograd::functionToPyObject(task.node));
  if (!node) {
    throw python_error();
  }
  check_told(visitor.task(visitor.arg, node.get(), task.node->name().c_str(), name_of(task.kind()),
                          name_of_why(task.plan().why)));
  for (size_t f = 0; f < task.face.size(); ++f) {
    tell(visitor, task, f, reach);
  }
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

int zbp_explain_end(zbp_scene* scene, int status, zbp_error* error,
                    const zbp_explain_visitor* visitor) {
  const std::unique_ptr<zbp_scene> owned(scene);
  return owned->barrier.end(error, [&] {
    if (status != ZBP_OK) {
      rethrow(*error, status);
    }
    for (const GroupPtr& group : owned->groups) {
      THPObjectPtr weights(wrap_weights(*group));
      check_told(visitor->group(visitor->arg, weights.get()));
      Reach reach(*group);
      for (const Task& task : group->tasks) {
        tell(*visitor, task, reach);
      }
    }
  });
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
