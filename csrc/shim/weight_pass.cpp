// W: products and kept gradients straight into the weights where nobody watches, everything else in
// one engine run. See docs/architecture.md.

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/edits.h"
#include "shim/kinds.h"
#include "shim/streams.h"
#include "shim/weight_nodes.h"

namespace zbp {

using torch::autograd::AccumulateGrad;

namespace {

/// The two matrices whose product is the gradient at `face`, in the weight's orientation when the
/// face is transposed. For Y = A B: dA = dY Bᵀ, dB = Aᵀ dY.
std::pair<at::Tensor, at::Tensor> factors(const Task& task, const Face& face) {
  const at::Tensor& grad = task.output_grads[0].tensor();
  const at::Tensor& other = task.other.tensor();
  if (task.weight_is_left) {
    return face.transposed ? std::pair(other, grad.t()) : std::pair(grad, other.t());
  }
  return face.transposed ? std::pair(grad.t(), other) : std::pair(other.t(), grad);
}

at::Tensor product_grad(const Task& task, const Face& face) {
  if (!task.output_grads[0].tensor().defined()) {
    return {};
  }
  if (face.slot != task.matrix_slot) {
    return task.output_grads[0].tensor();  // the added matrix or bias; the engine's rules reduce it
  }
  const auto [left, right] = factors(task, face);
  return left.mm(right);
}

variable_list run_deferred(const Task& task) {
  variable_list grads;
  grads.reserve(task.output_grads.size());
  for (const Watched& grad : task.output_grads) {
    grads.push_back(grad.tensor());
  }
  return NodeParts::apply_to(*task.node, std::move(grads));
}

/// The gradient for face number `i`; `outputs` are a deferred node's.
at::Tensor face_grad(const Task& task, size_t i, variable_list& outputs) {
  switch (task.kind) {
    case Kind::product:
      return product_grad(task, task.face[i]);
    case Kind::deferred:
      return std::move(outputs[task.face[i].slot]);
    case Kind::whole:
      return task.kept[i].tensor();
    case Kind::root:
      break;
  }
  return task.output_grads[0].tensor();
}

bool is_watched(AccumulateGrad& accumulator) {
  return !accumulator.tensor_pre_hooks().empty() || !accumulator.pre_hooks().empty() ||
      !accumulator.post_hooks().empty() || !accumulator.retains_grad_hooks().empty() ||
      accumulator.tensor_post_acc_grad_hooks() != nullptr;
}

/// True if the group's gradients can be added without the engine: every face ends at a weight and
/// nobody could tell the difference.
bool runs_directly(const Group& group) {
  for (const Task& task : group.tasks) {
    for (const Face& face : task.face) {
      if (face.weight < 0) {
        return false;
      }
    }
  }
  for (const Weight& weight : group.weights) {
    if (is_watched(*weight.accumulator)) {
      return false;
    }
  }
  return !torch::autograd::AnomalyMode::is_enabled();
}

/// Adds a product to a gradient that exists, in place and without a temporary.
bool add_product(const Task& task, const Face& face, AccumulateGrad& accumulator) {
  if (task.kind != Kind::product || face.slot != task.matrix_slot) {
    return false;
  }
  const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(accumulator));
  at::Tensor& grad = accumulator.variable.mutable_grad();
  const at::Tensor& output_grad = task.output_grads[0].tensor();
  if (!grad.defined() || !output_grad.defined() || grad.layout() != at::kStrided ||
      grad.dim() != 2 || grad.requires_grad() || grad.scalar_type() != output_grad.scalar_type() ||
      grad.device() != output_grad.device() || at::isTensorSubclassLike(grad) ||
      at::isTensorSubclassLike(accumulator.variable)) {
    return false;
  }
  const auto [left, right] = factors(task, face);
  if (grad.size(0) != left.size(0) || grad.size(1) != right.size(1)) {
    return false;
  }
  grad.addmm_(left, right);
  return true;
}

void add_directly(Group& group, Task& task, bool retain) {
  std::optional<c10::Stream> stream;
  if (task.place) {
    stream = task.place->stream();
  }
  const c10::OptionalStreamGuard guard(stream);
  variable_list outputs;  // of a deferred node, which gives all its gradients at once
  if (task.kind == Kind::deferred) {
    outputs = run_deferred(task);
  }
  for (size_t i = 0; i < task.face.size(); ++i) {
    Face& face = task.face[i];
    Weight& weight = group.weights[face.weight];
    if (face.delivered) {
      continue;
    }
    if (!add_product(task, face, *weight.accumulator)) {
      variable_list grad{face_grad(task, i, outputs)};
      torch::autograd::validate_outputs({Edge(weight.accumulator, 0)}, grad, [&](const std::string& message) {
        return "a weight task returned an " + message;
      });
      const bool may_take = task.kind == Kind::whole && !retain;
      accumulate(weight, std::move(grad[0]), may_take ? &task.kept[i] : nullptr);
    }
    face.delivered = true;
  }
}

void run_directly(Group& group, bool retain) {
  for (Task& task : group.tasks) {
    add_directly(group, task, retain);
  }
  for (Weight& weight : group.weights) {
    weight.added = true;
  }
  join_streams(group);
}

/// The graph of one W, put in front of the accumulators for the time of one engine run.
class WeightGraph {
 public:
  explicit WeightGraph(bool retain) : retain_(retain) {}

  void add(const GroupPtr& group);
  void run();

 private:
  const bool retain_;
  edge_list tasks_;
  EdgeEdits edits_;
};

void WeightGraph::add(const GroupPtr& group) {
  const size_t count = group->weights.size();
  size_t missing = 0;
  for (const Weight& weight : group->weights) {
    missing += weight.added ? 0 : 1;
  }
  group->missing = missing;
  const bool release = !retain_ && missing == count;

  std::vector<NodeRef<Sink>> sinks(count);
  for (size_t i = 0; i < count; ++i) {
    if (!group->weights[i].added) {
      sinks[i] = make_node<Sink>(group, i, retain_, release);
    }
  }
  const auto edge_to = [&](int32_t weight) {
    return sinks[weight] ? Edge(sinks[weight], 0) : Edge();
  };
  for (const OutsideEdge& outside : group->outside) {
    edits_.replace(*outside.node, outside.slot,
                   outside.weight < 0 ? Edge() : edge_to(outside.weight));
  }
  for (uint32_t t = 0; t < group->tasks.size(); ++t) {
    const Task& task = group->tasks[t];
    auto node = make_node<TaskNode>(group, t);
    for (uint32_t f = 0; f < task.face.size(); ++f) {
      const Face& face = task.face[f];
      if (face.weight < 0) {
        node->next_edges().push_back(face.edge);
        continue;
      }
      node->next_edges().push_back(face.delivered ? Edge() : edge_to(face.weight));
      if (sinks[face.weight] && !face.delivered) {
        sinks[face.weight]->served.emplace_back(t, f);
      }
    }
    tasks_.emplace_back(std::move(node), 0);
  }
}

void WeightGraph::run() {
  const Edge start(make_node<Start>(std::move(tasks_)), 0);
  torch::autograd::Engine::get_default_engine().execute(
      {start}, {at::zeros({}, at::kFloat)}, /*keep_graph=*/retain_, /*create_graph=*/false,
      /*accumulate_grad=*/true);
}

bool all_added(const Group& group) {
  for (const Weight& weight : group.weights) {
    if (!weight.added) {
      return false;
    }
  }
  return true;
}

void finish(Group& group, bool retain, Group::State state) {
  if (!retain) {
    group.release();
    group.weights.clear();
    group.state = state;
    return;
  }
  for (Weight& weight : group.weights) {
    weight.added = false;
  }
  for (Task& task : group.tasks) {
    for (Face& face : task.face) {
      face.delivered = false;
    }
  }
}

/// After a W that raised: what is complete stays complete, a retry passes over it.
void finish_complete(const std::vector<GroupPtr>& groups, bool retain) {
  for (const GroupPtr& group : groups) {
    if (!retain && group->state == Group::State::input_done && all_added(*group)) {
      finish(*group, retain, Group::State::done_unreported);
    }
  }
}

}  // namespace

variable_list compute_task(const Task& task) {
  variable_list outputs;
  if (task.kind == Kind::deferred) {
    outputs = run_deferred(task);
  }
  variable_list grads;
  grads.reserve(task.face.size());
  for (size_t i = 0; i < task.face.size(); ++i) {
    grads.push_back(face_grad(task, i, outputs));
  }
  return grads;
}

void run_weight_pass(const std::vector<GroupPtr>& groups, bool retain) {
  try {
    const at::AutoGradMode no_grad(false);
    WeightGraph graph(retain);
    bool needs_engine = false;
    for (const GroupPtr& group : groups) {
      if (group->state == Group::State::done_unreported) {
        continue;
      }
      if (runs_directly(*group)) {
        run_directly(*group, retain);
        if (!retain) {
          group->release();
        }
      } else {
        graph.add(group);
        needs_engine = true;
      }
    }
    if (needs_engine) {
      graph.run();
    }
  } catch (...) {
    finish_complete(groups, retain);
    throw;
  }
  for (const GroupPtr& group : groups) {
    finish(*group, retain, Group::State::weight_done);
  }
}

}  // namespace zbp
