// W: products and kept gradients straight into the weights where nobody watches, everything else in
// one engine run. See docs/architecture.md.

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "shim/detach.h"
#include "shim/kinds.h"
#include "shim/start.h"
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
  return has_hooks(accumulator) || accumulator.tensor_post_acc_grad_hooks() != nullptr;
}

/// A hook that was put on a transposed weight since I is owed its gradient.
void heed_new_hooks(Group& group) {
  for (Task& task : group.tasks) {
    for (Face& face : task.face) {
      Edge behind;
      if (face.transposed && !is_plain_transposition(face.edge, &behind)) {
        give_up_transposition(face);
      }
    }
  }
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
    if (weight.arrived || is_watched(*weight.accumulator)) {
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
  if (!grad.defined() || !output_grad.defined() || grad.dim() != 2 || grad.requires_grad() ||
      grad.scalar_type() != output_grad.scalar_type() || grad.device() != output_grad.device() ||
      is_subclass(grad) || is_subclass(accumulator.variable)) {
    return false;
  }
  const auto [left, right] = factors(task, face);
  if (grad.size(0) != left.size(0) || grad.size(1) != right.size(1) || grad.is_alias_of(left) ||
      grad.is_alias_of(right)) {
    return false;
  }
  grad.addmm_(left, right);
  return true;
}

void add_directly(Group& group, Task& task, WeightPassOptions options) {
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
    if (face.delivered || !weight.accumulator->variable.requires_grad()) {
      continue;  // or frozen since, where an accumulator would add nothing either
    }
    if (!(options.fuse && add_product(task, face, *weight.accumulator))) {
      variable_list grad{face_grad(task, i, outputs)};
      torch::autograd::validate_outputs(
          {Edge(weight.accumulator, 0)}, grad,
          [&](const std::string& message) { return "a weight task returned an " + message; });
      const bool may_take = task.kind == Kind::whole && !options.retain;
      accumulate(*weight.accumulator, grad[0], may_take ? &task.kept[i] : nullptr);
    }
    face.delivered = true;
  }
}

void run_directly(Group& group, WeightPassOptions options) {
  for (Task& task : group.tasks) {
    add_directly(group, task, options);
  }
  for (Weight& weight : group.weights) {
    weight.added = true;
  }
  join_streams(group);
  if (!options.retain) {
    group.release();
  }
}

/// The graph of one W, put in front of the accumulators for the time of one engine run.
class WeightGraph {
 public:
  explicit WeightGraph(bool retain) : retain_(retain), error_(std::make_shared<FirstError>()) {}

  void add(const GroupPtr& group);
  void run();

 private:
  /// What takes the places of a group's weights and of its nodes outside the closure.
  struct Mirror {
    const GroupPtr& group;
    std::vector<NodeRef<Sink>> sinks;  // null for a weight that has been added
    std::vector<NodeRef<Proxy>> proxies;

    Edge to_weight(int32_t weight) const;
  };
  void make_sinks(Mirror& mirror);
  void make_proxies(Mirror& mirror);
  void add_task(const Mirror& mirror, uint32_t t);

  const bool retain_;
  const std::shared_ptr<FirstError> error_;
  edge_list starts_;
  std::vector<Node*> represented_;
};

/// An edge to the sink of a weight whose gradient is still to be computed, else an invalid one.
Edge WeightGraph::Mirror::to_weight(int32_t weight) const {
  const bool is_wanted = sinks[weight] && !group->weights[weight].arrived;
  return is_wanted ? Edge(sinks[weight], 0) : Edge();
}

void WeightGraph::add(const GroupPtr& group) {
  Mirror mirror{group, {}, {}};
  make_sinks(mirror);
  make_proxies(mirror);
  for (uint32_t t = 0; t < group->tasks.size(); ++t) {
    add_task(mirror, t);
  }
}

void WeightGraph::make_sinks(Mirror& mirror) {
  const GroupPtr& group = mirror.group;
  const size_t count = group->weights.size();
  group->missing = std::count_if(group->weights.begin(), group->weights.end(),
                                 [](const Weight& weight) { return !weight.added; });
  const bool release = !retain_ && group->missing == count;
  mirror.sinks.resize(count);
  for (size_t i = 0; i < count; ++i) {
    if (group->weights[i].added) {
      continue;
    }
    mirror.sinks[i] = make_node<Sink>(group, i, error_, retain_, release);
    represented_.push_back(group->weights[i].accumulator.get());
    if (group->weights[i].arrived) {
      auto resend = make_node<Resend>(group, i);
      resend->next_edges().emplace_back(mirror.sinks[i], 0);
      starts_.emplace_back(std::move(resend), 0);
    }
  }
}

void WeightGraph::make_proxies(Mirror& mirror) {
  const std::vector<Outside>& outside = mirror.group->outside;
  for (const Outside& o : outside) {
    mirror.proxies.push_back(make_node<Proxy>(ref_of(*o.node), retain_));
    represented_.push_back(o.node);
  }
  for (size_t i = 0; i < outside.size(); ++i) {
    for (const Outside::Hop& hop : outside[i].hops) {
      mirror.proxies[i]->next_edges()[hop.slot] =
          hop.weight >= 0
              ? mirror.to_weight(hop.weight)
              : Edge(mirror.proxies[hop.outside], outside[i].node->next_edge(hop.slot).input_nr);
    }
  }
}

void WeightGraph::add_task(const Mirror& mirror, uint32_t t) {
  auto node = make_node<TaskNode>(mirror.group, t);
  const c10::ArrayRef<Face> face = mirror.group->tasks[t].face;
  for (uint32_t f = 0; f < face.size(); ++f) {
    Edge& edge = node->next_edges().emplace_back();
    if (face[f].weight < 0) {
      edge = Edge(mirror.proxies[face[f].outside], face[f].edge.input_nr);
    } else if (!face[f].delivered) {
      edge = mirror.to_weight(face[f].weight);
      if (edge.is_valid()) {
        mirror.sinks[face[f].weight]->served.emplace_back(t, f);
      }
    }
  }
  starts_.emplace_back(std::move(node), 0);
}

void WeightGraph::run() {
  if (starts_.empty()) {
    return;
  }
  variable_list turns(starts_.size());  // the nodes need no gradient to start from
  run_engine(make_node<Start>(std::move(starts_), std::move(turns), std::move(represented_)),
             /*keep_graph=*/retain_);
  error_->rethrow();
}

/// The group is complete: nothing is held any more, and its stage outputs lose their history.
void close(Group& group, Group::State state) {
  group.state = state;
  group.release();
  const auto weights = std::exchange(group.weights, {});
  for (const auto& output : std::exchange(group.outputs, {})) {
    if (auto tensor = output.lock()) {
      detach_output(at::Tensor(std::move(tensor)));
    }
  }
}

void make_ready_again(Group& group) {
  for (Weight& weight : group.weights) {
    weight.added = false;
    weight.hooked = false;
  }
  for (Task& task : group.tasks) {
    for (Face& face : task.face) {
      face.delivered = false;
    }
  }
}

/// After a W that raised: what is complete stays complete and a retry passes over it; of the rest, what
/// a retry does not need goes.
void settle(Group& group, bool retain) {
  if (group.state != Group::State::input_done || retain) {
    return;
  }
  const auto is_added = [](const Weight& weight) { return weight.added; };
  const auto is_computed = [](const Weight& weight) { return weight.added || weight.arrived; };
  if (std::all_of(group.weights.begin(), group.weights.end(), is_added)) {
    close(group, Group::State::done_unreported);
    return;
  }
  group.failed = true;
  if (std::all_of(group.weights.begin(), group.weights.end(), is_computed)) {
    group.release();
  }
}

/// A retry that meets a node without its saved tensors cannot complete its group: says which weights.
[[noreturn]] void rethrow_named(const std::vector<GroupPtr>& groups) {
  std::string lost;
  for (const GroupPtr& group : groups) {
    for (const Weight& weight : group->weights) {
      if (group->failed && !weight.added && !weight.arrived) {
        lost += c10::str(lost.empty() ? "" : ", ", weight.accumulator->variable.scalar_type(), " ",
                         weight.accumulator->variable.sym_sizes());
      }
    }
  }
  try {
    throw;
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    TORCH_CHECK(
        lost.empty() || message.find(torch::autograd::ERR_BACKWARD_TWICE) == std::string::npos,
        "the weight pass failed before, between the split nodes and these weights, and what the "
        "nodes there had saved is gone; the gradients of this microbatch cannot be added any more "
        "to the weights of ",
        lost, "; run the microbatch again");
    throw;
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

void run_weight_pass(const std::vector<GroupPtr>& groups, WeightPassOptions options) {
  const bool is_retry = std::any_of(groups.begin(), groups.end(),
                                    [](const GroupPtr& group) { return group->failed; });
  try {
    const at::AutoGradMode no_grad(false);
    WeightGraph graph(options.retain);
    for (const GroupPtr& group : groups) {
      if (group->state == Group::State::done_unreported) {
        continue;
      }
      heed_new_hooks(*group);
      if (runs_directly(*group)) {
        run_directly(*group, options);
      } else {
        graph.add(group);
      }
    }
    graph.run();
  } catch (...) {
    for (const GroupPtr& group : groups) {
      settle(*group, options.retain);
    }
    if (is_retry) {
      rethrow_named(groups);
    }
    throw;
  }
  for (const GroupPtr& group : groups) {
    if (options.retain && group->state == Group::State::input_done) {
      make_ready_again(*group);
    } else {
      close(*group, Group::State::weight_done);
    }
  }
}

}  // namespace zbp
