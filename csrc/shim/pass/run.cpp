// One run of the engine for several groups: Start -> task nodes -> proxies -> sinks.

#include "shim/torch/nodes.h"
#include "shim/pass/start.h"
#include "shim/pass/weight_nodes.h"
#include "shim/pass/zbp_weight.h"
#include "shim/torch/error.h"

using namespace zbp;

/// The graph of one run of W, put in front of the accumulators.
struct zbp_run {
  explicit zbp_run(bool retain) : retain_(retain), error_(std::make_shared<FirstError>()) {}

  void add(const GroupPtr& group);
  void go();

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
  variable_list grads_;  // one per start; a task node needs none
  std::vector<Node*> represented_;
};

/// An edge to the sink of a weight whose gradient is still to be computed, else an invalid one.
Edge zbp_run::Mirror::to_weight(int32_t weight) const {
  const bool is_wanted = zbp_book_wants(&group->book, static_cast<uint32_t>(weight));
  return is_wanted ? Edge(sinks[weight], 0) : Edge();
}

void zbp_run::add(const GroupPtr& group) {
  Mirror mirror{group, {}, {}};
  make_sinks(mirror);
  make_proxies(mirror);
  for (uint32_t t = 0; t < group->tasks.size(); ++t) {
    add_task(mirror, t);
  }
}

void zbp_run::make_sinks(Mirror& mirror) {
  const GroupPtr& group = mirror.group;
  const size_t count = group->weights.size();
  zbp_book_begin_run(&group->book, retain_);
  mirror.sinks.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const zbp_book_weight& booked = group->book.weight[i];
    if (booked.is_added) {
      continue;
    }
    mirror.sinks[i] = make_node<Sink>(group, i, error_, retain_);
    represented_.push_back(group->weights[i].accumulator.get());
    if (booked.has_arrived) {
      starts_.emplace_back(mirror.sinks[i], 0);  // a run that failed has left the sum
      grads_.push_back(group->weights[i].grad);
    }
  }
}

void zbp_run::make_proxies(Mirror& mirror) {
  const std::vector<Outside>& outside = mirror.group->outside;
  for (const Outside& o : outside) {
    mirror.proxies.push_back(make_node<Proxy>(o, retain_));
    represented_.push_back(o.node);
  }
  for (size_t i = 0; i < outside.size(); ++i) {
    const auto [begin, end] = hops_of(mirror.group->layout, i);
    for (const zbp_hop* hop = begin; hop != end; ++hop) {
      mirror.proxies[i]->next_edges()[hop->slot] =
          hop->to_weight >= 0 ? mirror.to_weight(hop->to_weight)
                              : Edge(mirror.proxies[hop->to_outside],
                                     outside[i].node->next_edge(hop->slot).input_nr);
    }
  }
}

void zbp_run::add_task(const Mirror& mirror, uint32_t t) {
  auto node = make_node<TaskNode>(mirror.group, t, retain_);
  const Group& group = *mirror.group;
  const Task& task = group.tasks[t];
  bool is_wanted = false;
  for (size_t f = 0; f < task.face.size(); ++f) {
    Edge& edge = node->next_edges().emplace_back();
    const zbp_face& plan = task.plan(f);
    const auto number = static_cast<uint32_t>(task.plan().face_begin + f);
    if (!zbp_book_wants_face(&group.book, &group.layout, number)) {
      continue;
    }
    is_wanted = true;
    if (plan.weight < 0) {
      edge = Edge(mirror.proxies[plan.outside], task.face[f].edge.input_nr);
    } else {
      edge = Edge(mirror.sinks[plan.weight], 0);
      mirror.sinks[plan.weight]->served.push_back(number);
    }
  }
  if (is_wanted) {
    starts_.emplace_back(std::move(node), 0);
    grads_.emplace_back();
  }
}

void zbp_run::go() {
  if (starts_.empty()) {
    return;
  }
  run_engine(make_node<Start>(std::move(starts_), std::move(grads_), std::move(represented_)),
             /*keep_graph=*/retain_);
  error_->rethrow();
}

int zbp_run_new(zbp_how how, zbp_run** run_out, zbp_error* error) {
  return kept_in(error, [&] { *run_out = new zbp_run(how.retain); });
}

void zbp_run_free(zbp_run* run) {
  delete run;
}

int zbp_run_add(zbp_run* run, zbp_group* group, zbp_error* error) {
  return kept_in(error, [&] { run->add(group_of(group).shared_from_this()); });
}

int zbp_run_go(zbp_run* run, zbp_error* error) {
  return kept_in(error, [&] { run->go(); });
}
