#include "shim/explain/zbp_explain.h"

#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/explain/reach.h"
#include "shim/pass/kinds.h"
#include "shim/pass/path.h"
#include "shim/torch/python.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;

const char* name_of(Why why) {
  switch (why) {
    case Why::separable:
      return "separable";
    case Why::post_hook:
      return "post hook";
    case Why::policy_defers_nothing:
      return "policy";
    case Why::function:
      return "function";
    case Why::unknown_type:
      return "unknown";
    case Why::packed:
      return "packed";
    case Why::light:
      return "light";
    case Why::root:
      break;
  }
  return "root";
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
std::optional<std::string> way_of(const Face& face, const zbp_face& plan) {
  if (plan.weight >= 0) {
    return std::nullopt;
  }
  Face probe;
  probe.edge = face.edge;
  uint8_t flag = 0;
  const Edge behind = follow_plain_steps(probe, flag);
  Node& node = *behind.function;
  if (as<torch::autograd::AccumulateGrad>(node)) {
    return count_casts(probe) > 1 ? "it is cast twice on its way"
                                  : "several gradients meet before its cast";
  }
  return c10::str(has_hooks(node) ? "a hook watches " : "it is computed by ", node.name());
}

PyObject* explain(const Task& task, size_t f, Reach& reach) {
  const Face& face = task.face[f];
  const zbp_face& plan = task.plan(f);
  THPObjectPtr shape = new_list();
  const auto& metadata = face.edge.function->input_metadata(face.edge.input_nr);
  if (!metadata.is_nested_tensor()) {
    for (const c10::SymInt& size : metadata.shape_as_dim_vector()) {
      append(shape, PyLong_FromLongLong(size.maybe_as_int().value_or(-1)));
    }
  }
  reach.begin();
  reach.add(task, f);
  THPObjectPtr weights = new_list();
  for (const Weight* weight : reach.weights()) {
    append(weights, THPVariable_Wrap(weight->accumulator->variable));
  }
  const std::optional<std::string> way = way_of(face, plan);
  return Py_BuildValue("INzO", static_cast<unsigned>(plan.slot), PyList_AsTuple(shape),
                       way ? way->c_str() : nullptr, weights.get());
}

PyObject* explain(const Task& task, Reach& reach) {
  THPObjectPtr edges = new_list();
  for (size_t f = 0; f < task.face.size(); ++f) {
    append(edges, explain(task, f, reach));
  }
  return Py_BuildValue("NsssO", torch::autograd::functionToPyObject(task.node),
                       task.node->name().c_str(), name_of(task.kind()), name_of(task.why),
                       edges.get());
}

}  // namespace

PyObject* zbp_explain(PyObject* outputs, PyObject* inputs, PyObject* weights, zbp_policy policy) {
  PyObject* result = nullptr;
  const int status = guarded([&] {
    InputPassArgs args;
    args.policy = policy;
    for (const at::Tensor& output : tensors_in(outputs, "outputs")) {
      args.roots.push_back(impl::gradient_edge(output));
      args.root_grads.push_back(at::ones_like(output));
    }
    args.inputs = tensors_in(inputs, "inputs");
    args.weights = tensors_in(weights, "weights");
    THPObjectPtr list = new_list();
    look_at_input_pass(args, [&](const std::vector<GroupPtr>& groups) {
      for (const GroupPtr& group : groups) {
        THPObjectPtr tasks = new_list();
        Reach reach(*group);
        for (const Task& task : group->tasks) {
          append(tasks, explain(task, reach));
        }
        append(list, tasks.release());
      }
    });
    result = list.release();
  });
  return status == ZBP_OK ? result : nullptr;
}

int zbp_is_watched(PyObject* object, int* out) {
  return guarded([&] {
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
