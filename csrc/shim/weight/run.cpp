// One run of the engine in W, for what hooks, sums, or nodes between a task and its weights ask of
// it: Start -> task nodes -> (proxies of the nodes outside the closure) -> sinks.

#include <ATen/record_function.h>

#include "shim/engine/engine.h"
#include "shim/weight/gradients.h"
#include "shim/group/saved.h"
#include "shim/engine/stand_in.h"
#include "shim/weight/zbp_weight.h"
#include "shim/torch/main_grad.h"
#include "shim/torch/nodes.h"
#include "shim/group/work.h"

using namespace zbp;
using torch::autograd::AccumulateGrad;

namespace {

/// What the nodes of a run share.
///
/// Note [Why a sink does not stop the engine]
/// When the engine stops at an error, gradients that were on their way are lost, and what the nodes
/// between a task and its weights had saved is gone: those weights could never be completed. So a
/// sink keeps its gradient for the next call, notes the first error, and lets the run finish.
class Shared {
 public:
  explicit Shared(bool retain) : retain(retain) {}
  ~Shared() { zbp_error_clear(&error_); }
  C10_DISABLE_COPY_AND_ASSIGN(Shared);

  template <class Body>
  void noting_errors(const Body& body) {
    try {
      body();
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      status_ = keep_exception(&error_);
    }
  }
  void rethrow() { check_status(status_, error_); }

  const bool retain;  // W is to run again: nothing of the tasks' may be taken

 private:
  std::mutex mutex_;
  int status_ = ZBP_OK;
  zbp_error error_{};
};
using SharedPtr = std::shared_ptr<Shared>;

/// Computes what a task owes to its weights and sends it along the task's faces.
class TaskNode : public Node {
 public:
  TaskNode(GroupPtr group, size_t task, SharedPtr shared)
      : Node(group->tasks[task].plan().sequence_nr),
        group_(std::move(group)),
        task_(task),
        shared_(std::move(shared)) {
    if (const auto& device = group_->tasks[task_].device) {
      input_metadata_.emplace_back(*device);
    } else {
      add_input_metadata(undefined_input());
    }
    next_edges().resize(group_->layout.face[group_->tasks[task_].plan().face_end - 1].slot + 1);
  }

  // A group that is complete has no tasks any more.
  std::string name() const override {
    return task_ < group_->tasks.size() ? group_->tasks[task_].name() : "zbpipe::TaskNode";
  }

 protected:
  variable_list apply(variable_list&& /*grads*/) override {
    variable_list grads(num_outputs());
    RECORD_USER_SCOPE("zbpipe::group");
    Task& task = group_->tasks[task_];
    std::optional<c10::Stream> ordered;
    for_each_kept(task, [&](const Kept& kept, auto&&...) { kept.bring_here(ordered); });
    variable_list outputs = task.kind() == ZBP_TASK_DEFERRED ? run_deferred(task) : variable_list();
    for (size_t f = 0; f < task.face.size(); ++f) {
      const uint32_t slot = task.plan(f).slot;
      if (next_edge(slot).is_valid()) {
        run_works_for(*group_, task, f, shared_->retain);
        grads[slot] = face_grad(task, f, outputs);
      }
    }
    return grads;
  }

 private:
  GroupPtr group_;
  size_t task_;
  SharedPtr shared_;
};

/// Runs a node outside the closure for one group.
///
/// Note [Why W mirrors the nodes outside the closure]
/// Their edges would have to lead to sinks. But the node may belong to other groups too, of other
/// microbatches (a weight that was computed once, a cast in autocast's cache), whose I walks it or
/// whose W runs it at the same moment. So the node's own edges are never touched.
class Proxy : public Runner {
 public:
  Proxy(const Outside& outside, bool retain)
      : Runner(*outside.node, !retain, /*track_views=*/false, outside.makes_input) {
    next_edges().resize(original_->next_edges().size());
  }

  variable_list into_main_grad;  // by its edges, the weights with one: its kernels may add to it

 protected:
  variable_list apply(variable_list&& grads) override {
    const AddedByKernels added(into_main_grad);
    variable_list outputs = Runner::apply(std::move(grads));
    added.drop(outputs);
    return outputs;
  }
};

/// Takes the place of a weight's accumulator: receives the sum of all gradients of the weight, adds
/// it as the accumulator would, with all hooks, and tells the book. When it was the last one of its
/// group, the group lets go of what it held.
class Sink : public InPlaceOf {
 public:
  Sink(GroupPtr group, uint32_t weight, SharedPtr shared)
      : InPlaceOf(group->weights[weight].accumulator, UINT64_MAX),
        group_(std::move(group)),
        number_(weight),
        shared_(std::move(shared)) {}

  /// The faces that end here.
  SmallVector<uint32_t, 2> served;

 protected:
  // See Note [Why a sink does not stop the engine].
  variable_list apply(variable_list&& grads) override {
    shared_->noting_errors([&] { add(std::move(grads)); });
    if (at::Tensor& grad = group_->weights[number_].grad; grad.defined()) {
      // It waits for a retry: a Function's is made its own.
      shared_->noting_errors([&] {
        Kept kept(grad);
        Kept* const one = &kept;
        own(one, grad);
        grad = kept.tensor();
      });
    }
    return {};
  }

 private:
  void add(variable_list&& grads) {
    Weight& weight = group_->weights[number_];
    AccumulateGrad& accumulator = *weight.accumulator;
    zbp_book& book = group_->book;
    weight.grad = grads[0];
    book.weight[number_].has_arrived = true;
    if (!book.weight[number_].is_hooked) {
      grads = call_pre_hooks(accumulator, call_tensor_hooks(accumulator, std::move(grads)));
      weight.grad = grads[0];
      book.weight[number_].is_hooked = true;
    }
    // As in the engine: an accumulator with post hooks expects them to hold one more reference.
    const variable_list inputs = accumulator.post_hooks().empty() ? variable_list() : grads;
    grads.clear();
    accumulate(weight, weight.grad, kept_gradient());
    weight.grad.reset();
    if (zbp_book_added(&book, number_)) {
      group_->release();
    }
    // It is added: the hooks behind it are not run again, so each gets its turn whatever the other
    // does.
    shared_->noting_errors([&] {
      // As in libtorch also where no gradient came: a kernel may have added it elsewhere.
      if (const auto& hook = accumulator.tensor_post_acc_grad_hooks()) {
        (*hook)(accumulator.variable);
      }
    });
    call_post_hooks(accumulator, {}, inputs);
  }

  /// Where the only task that serves the weight keeps the gradient that arrives here, if it does.
  Kept* kept_gradient() {
    if (served.size() != 1 || shared_->retain) {
      return nullptr;
    }
    Task& task = group_->tasks[group_->layout.face[served[0]].task];
    return only_kept_grad(task, served[0] - task.plan().face_begin);
  }

  GroupPtr group_;
  uint32_t number_;
  SharedPtr shared_;
};

/// The graph of one run, put in front of the accumulators.
struct Mirror {
  explicit Mirror(bool retain) : shared(std::make_shared<Shared>(retain)) {}

  SharedPtr shared;
  edge_list starts;
  variable_list grads;  // of the first starts: sinks for which a run that failed has left the sum
  std::vector<Node*> represented;

  // Of the group that is being added: null for a weight that has been added.
  std::vector<NodeRef<Sink>> sinks;
  std::vector<NodeRef<Proxy>> proxies;  // null for one that leads to no wanted weight

  void add_sinks(const GroupPtr& group) {
    sinks.assign(group->weights.size(), nullptr);
    for (uint32_t w = 0; w < sinks.size(); ++w) {
      const zbp_book_weight& booked = group->book.weight[w];
      if (booked.is_added) {
        continue;
      }
      sinks[w] = make_node<Sink>(group, w, shared);
      represented.push_back(group->weights[w].accumulator.get());
      if (booked.has_arrived) {
        starts.insert(starts.begin() + static_cast<ptrdiff_t>(grads.size()), Edge(sinks[w], 0));
        grads.push_back(group->weights[w].grad);
      }
    }
  }

  void add_proxies(const Group& group) {
    const auto leads = std::make_unique<bool[]>(group.outside.size());
    zbp_book_find_leading(&group.book, &group.layout, leads.get());
    proxies.assign(group.outside.size(), nullptr);
    for (size_t o = 0; o < proxies.size(); ++o) {
      if (leads[o]) {
        proxies[o] = make_node<Proxy>(group.outside[o], shared->retain);
        represented.push_back(group.outside[o].node);
      }
    }
    for (uint32_t h = 0; h < group.layout.hop_count; ++h) {
      const zbp_hop& hop = group.layout.hop[h];
      if (!proxies[hop.outside]) {
        continue;
      }
      Edge& edge = proxies[hop.outside]->next_edges()[hop.slot];
      if (hop.to_weight < 0 && proxies[hop.to_outside]) {
        edge = Edge(proxies[hop.to_outside],
                    group.outside[hop.outside].node->next_edge(hop.slot).input_nr);
      } else if (hop.to_weight >= 0 &&
                 zbp_book_wants(&group.book, static_cast<uint32_t>(hop.to_weight))) {
        edge = Edge(sinks[hop.to_weight], 0);
        const Weight& weight = group.weights[hop.to_weight];
        if (weight.main_grad.defined() && !is_generated(*group.outside[hop.outside].node)) {
          variable_list& weights = proxies[hop.outside]->into_main_grad;
          weights.resize(std::max<size_t>(weights.size(), hop.slot + 1));
          weights[hop.slot] = weight.accumulator->variable;
        }
      }
    }
  }

  void add_task(const GroupPtr& group, uint32_t t) {
    auto node = make_node<TaskNode>(group, t, shared);
    const Task& task = group->tasks[t];
    bool is_wanted = false;
    for (size_t f = 0; f < task.face.size(); ++f) {
      const zbp_face& plan = task.plan(f);
      Edge& edge = node->next_edges()[plan.slot];
      if (plan.weight < 0 && proxies[plan.outside]) {
        edge = Edge(proxies[plan.outside], task.face[f].edge.input_nr);
      } else if (plan.weight >= 0 &&
                 zbp_book_wants(&group->book, static_cast<uint32_t>(plan.weight))) {
        edge = Edge(sinks[plan.weight], 0);
        sinks[plan.weight]->served.push_back(task.plan().face_begin + static_cast<uint32_t>(f));
      }
      is_wanted = is_wanted || edge.is_valid();
    }
    if (is_wanted) {
      starts.emplace_back(std::move(node), 0);
    }
  }

  void add(const GroupPtr& group) {
    zbp_book_begin_run(&group->book, shared->retain);
    add_sinks(group);
    add_proxies(*group);
    for (uint32_t t = 0; t < group->tasks.size(); ++t) {
      add_task(group, t);
    }
  }

  /// Puts the tasks into an ordinary backward's order. A device's thread may begin the first task
  /// while others are not in its queue yet. Until all are, it hands no gradient on. So the order of
  /// sums does not depend on time, if the first task is the one that is due.
  void sort_starts() {
    const auto tasks = starts.begin() + static_cast<ptrdiff_t>(grads.size());
    std::stable_sort(tasks, starts.end(), [](const Edge& a, const Edge& b) {
      return a.function->sequence_nr() > b.function->sequence_nr();
    });
    grads.resize(starts.size());
  }
};

void run_groups(c10::ArrayRef<zbp_group*> groups, bool retain) {
  Mirror mirror(retain);
  for (zbp_group* group : groups) {
    if (!zbp_book_is_complete(&group->book)) {
      mirror.add(group_of(group).shared_from_this());
    }
  }
  mirror.sinks.clear();
  mirror.proxies.clear();
  if (!mirror.starts.empty()) {
    mirror.sort_starts();
    run_engine(std::move(mirror.starts), std::move(mirror.grads), std::move(mirror.represented),
               /*keep_graph=*/retain);
    mirror.shared->rethrow();
  }
}

}  // namespace

int zbp_run_engine(zbp_group* const* group, size_t count, zbp_how how, zbp_error* error) {
  return kept_in(error, [&] { run_groups({group, count}, how.retain); });
}
