// The steps of I.

#include "shim/engine/engine.h"
#include "shim/group/facts.h"
#include "shim/group/saved.h"
#include "shim/input/scene.h"
#include "shim/torch/detach.h"
#include "shim/torch/gil.h"

namespace zbp {

using torch::autograd::AccumulateGrad;

namespace {

/// What C has made goes with its owner.
template <class T, void (*fini)(T*)>
struct Owned : T {
  Owned() : T{} {}
  ~Owned() { fini(this); }
  C10_DISABLE_COPY_AND_ASSIGN(Owned);
};

/// What I is planned on.
struct Survey {
  explicit Survey(const InputPassArgs& args) : walk(args, graph) {}

  Owned<zbp_graph, zbp_graph_fini> graph;
  const Walk walk;
  Owned<zbp_plan, zbp_plan_fini> plan;
  std::vector<zbp_fact> fact;  // see zbp_kind.h
  Owned<zbp_split, zbp_split_fini> split;
};

bool is_reentrant_checkpoint(Node& node) {
  return is_python_function(node) &&
         call_python("zbpipe._torch.checkpoint", "is_reentrant", {context_of(node)}).get() ==
             Py_True;
}

/// torch's reentrant checkpoint runs a backward of its own, of which no edge tells. One that leads
/// neither to an input nor to a weight, but to a leaf that somebody made for it, would not run.
void refuse_reentrant(const Survey& survey) {
  for (uint32_t id = 0; id < survey.graph.node_count; ++id) {
    Node& node = survey.walk.node(id);
    TORCH_CHECK((survey.plan.flag[id] & (ZBP_NODE_CLOSURE | ZBP_NODE_WEIGHTWARD)) != 0 ||
                    !is_reentrant_checkpoint(node),
                "a reentrant checkpoint leads to no input and to none of the weights, so that no "
                "pass would run its region's backward, and its weights would get no gradient; "
                "checkpoint with use_reentrant=False, or give the tensor that it leads to among "
                "the weights");
  }
}

void note_facts(Survey& survey) {
  const zbp_plan& plan = survey.plan;
  const Walk& walk = survey.walk;
  survey.fact.resize(survey.graph.node_count);
  for (uint32_t i = 0; i < plan.split_begin[plan.group_count]; ++i) {
    survey.fact[plan.split[i]] = fact_of_split(walk.node(plan.split[i]));
  }
  for (uint32_t i = 0; i < plan.outside_begin[plan.group_count]; ++i) {
    survey.fact[plan.outside[i]] = fact_of_outside(walk.node(plan.outside[i]));
  }
}

// ---- groups

Task& new_task(Group& group, NodePtr node) {
  Task& task = group.tasks.emplace_back(group.layout, static_cast<uint32_t>(group.tasks.size()),
                                        std::move(node));
  if (const auto* metadata = late_metadata_of(*task.node)) {
    task.device = std::make_unique<const torch::autograd::InputMetadata>(*metadata);
  }
  return task;
}

GroupPtr make_group(Survey& survey, uint32_t g) {
  const Walk& walk = survey.walk;
  const zbp_plan& plan = survey.plan;
  auto group = std::make_shared<Group>();
  group->layout = std::exchange(survey.split.layout[g], zbp_layout{});
  for (uint32_t i = plan.weight_begin[g]; i < plan.weight_begin[g + 1]; ++i) {
    group->weights.emplace_back().accumulator = ref_as<AccumulateGrad>(walk.node(plan.weight[i]));
  }
  for (uint32_t i = plan.outside_begin[g]; i < plan.outside_begin[g + 1]; ++i) {
    Node& node = walk.node(plan.outside[i]);
    group->outside.push_back({&node, walk.has_other_outputs(node)});
  }
  group->tasks.reserve(group->layout.task_count);
  for (uint32_t i = plan.split_begin[g]; i < plan.split_begin[g + 1]; ++i) {
    Node& node = walk.node(plan.split[i]);
    Task& task = new_task(*group, ref_of(node));
    for (uint32_t f = task.plan().face_begin; f < task.plan().face_end; ++f) {
      task.face.push_back({node.next_edge(group->layout.face[f].slot), {}});
    }
  }
  return group;
}

void add_root_task(const Scene& scene, Group& group, size_t root) {
  const Edge& edge = scene.args.roots[root];
  Task& task = new_task(group, edge.function);
  task.face.push_back({edge, Kept(scene.args.root_grads[root])});
}

/// Where W computes regions again: what of the weights it may read, at their versions of now.
/// Whatever a region gives to one of its nodes was computed of what earlier nodes have read.
std::shared_ptr<const Reads> note_reads(const InputPassArgs& args, const Survey& survey) {
  const zbp_graph& graph = survey.graph;
  const Walk& walk = survey.walk;
  std::vector<uint64_t> first(graph.node_count, UINT64_MAX);
  for (uint32_t i = 0; i < graph.edge_count; ++i) {
    uint64_t& number = first[graph.edge[i].dst];
    number = std::min(number, walk.node(graph.edge[i].src).sequence_nr());
  }
  auto reads = std::make_shared<Reads>();
  const auto note = [&reads](const at::Tensor& weight, uint64_t sequence_nr) {
    if (has_version(weight)) {
      reads->weights.push_back({sequence_nr, Version(weight)});
    }
  };
  for (const at::Tensor& weight : args.frozen) {
    note(weight, 0);  // in no graph
  }
  for (uint32_t id = 0; id < graph.node_count; ++id) {
    if (auto* accumulator = as_accumulator(walk.node(id)); accumulator && !walk.is_input(id)) {
      note(accumulator->variable, first[id]);
    }
  }
  std::sort(
      reads->weights.begin(), reads->weights.end(),
      [](const Reads::Read& a, const Reads::Read& b) { return a.sequence_nr < b.sequence_nr; });
  return reads;
}

void make_groups(Scene& scene, Survey& survey) {
  const bool recomputes = scene.args.policy.checkpoint == ZBP_CHECKPOINT_RECOMPUTE;
  const auto reads = recomputes ? note_reads(scene.args, survey) : nullptr;
  for (uint32_t g = 0; g < survey.plan.group_count; ++g) {
    Group& group = *scene.groups.emplace_back(make_group(survey, g));
    group.reads = reads;
    group.adds_to_main_grad = scene.args.policy.main_grad;
    note_saved_outside(group);
    check_status(zbp_book_init(&group.book, &group.layout));
    group.expect();
  }
  for (uint32_t r = 0; r < survey.split.root_count; ++r) {
    if (survey.split.root_task[r] != ZBP_NONE) {
      add_root_task(scene, *scene.groups[survey.plan.group[survey.walk.roots()[r]]], r);
    }
  }
}

// ---- stand-ins and edges

void make_stand_ins(Scene& scene, const Survey& survey) {
  const zbp_plan& plan = survey.plan;
  scene.stand_ins.resize(survey.graph.node_count);
  for (uint32_t i = 0; i < plan.split_begin[plan.group_count]; ++i) {
    const uint32_t id = plan.split[i];
    Node& node = survey.walk.node(id);
    scene.stand_ins[id] =
        make_node<StandIn>(node, scene.groups[plan.group[id]], survey.split.task[id],
                           survey.walk.has_other_outputs(node));
    scene.stand_ins[id]->next_edges().resize(node.next_edges().size());
  }
}

/// What an edge or a root that leads to the node `target` is in I.
Edge edge_in_run(Scene& scene, const Walk& walk, const Edge& edge, uint32_t target, uint8_t to) {
  switch (to) {
    case ZBP_TO_STAND_IN:
      return Edge(scene.stand_ins[target], edge.input_nr);
    case ZBP_TO_CAPTURE: {
      NodeRef<Capture>& capture = scene.captures[target];
      if (!capture) {
        capture = make_node<Capture>(edge.function, walk.has_other_outputs(*edge.function),
                                     scene.runs_others_code);
      }
      return Edge(capture, edge.input_nr);
    }
    case ZBP_TO_NODE: {
      const auto runner = scene.runners.find(target);
      return runner != scene.runners.end() ? Edge(runner->second, edge.input_nr) : edge;
    }
    default:
      return Edge();
  }
}

/// True for a node that the engine runs in I, itself or by a runner.
bool runs_plainly(const Survey& survey, uint32_t id) {
  const uint8_t flag = survey.plan.flag[id] & (ZBP_NODE_CLOSURE | ZBP_NODE_SPLIT);
  return flag == ZBP_NODE_CLOSURE && !survey.walk.is_input(id);
}

void make_runners(Scene& scene, const Survey& survey) {
  for (uint32_t id = 0; id < survey.graph.node_count; ++id) {
    Node& node = survey.walk.node(id);
    const bool is_in_closure = (survey.plan.flag[id] & ZBP_NODE_CLOSURE) != 0;
    const bool is_hooked = is_in_closure && has_hooks(node);
    if (is_hooked && runs_plainly(survey, id)) {
      scene.runners[id] = make_node<Runner>(node, /*release=*/true, /*track_views=*/true,
                                            survey.walk.has_other_outputs(node));
    }
    scene.runs_others_code |=
        is_in_closure && (is_hooked || !(is_generated(node) || as_accumulator(node)));
  }
}

void edit_edges(Scene& scene, const Survey& survey) {
  for (uint32_t i = 0; i < survey.split.edit_count; ++i) {
    const zbp_edit& edit = survey.split.edit[i];
    const zbp_edge& edge = survey.graph.edge[edit.edge];
    Node& node = survey.walk.node(edge.src);
    Edge there = edge_in_run(scene, survey.walk, node.next_edge(edge.slot), edge.dst, edit.to);
    if (edit.is_of_node) {
      EdgeEdits& edits = edit.to == ZBP_TO_STAND_IN ? scene.detours : scene.cuts;
      edits.replace(node, edge.slot, there);
    }
    if (edit.is_of_stand_in) {
      scene.stand_ins[edge.src]->next_edges()[edge.slot] = std::move(there);
    }
  }
  for (uint32_t i = 0; i < survey.graph.edge_count && !scene.runners.empty(); ++i) {
    const zbp_edge& edge = survey.graph.edge[i];
    if (scene.runners.count(edge.dst) && runs_plainly(survey, edge.src)) {
      Node& node = survey.walk.node(edge.src);
      scene.cuts.replace(
          node, edge.slot,
          edge_in_run(scene, survey.walk, node.next_edge(edge.slot), edge.dst, ZBP_TO_NODE));
    }
  }
  for (const auto& [id, runner] : scene.runners) {
    runner->next_edges() = survey.walk.node(id).next_edges();
  }
}

// ---- the run

void run(Scene& scene, const Survey& survey) {
  edge_list roots;
  variable_list root_grads;
  for (uint32_t r = 0; r < survey.split.root_count; ++r) {
    Edge there = edge_in_run(scene, survey.walk, scene.args.roots[r], survey.walk.roots()[r],
                             survey.split.root_to[r]);
    if (there.is_valid()) {
      roots.push_back(std::move(there));
      root_grads.push_back(scene.args.root_grads[r]);
    }
  }
  if (roots.empty()) {
    return;
  }
  std::vector<Node*> represented;
  for (uint32_t id = 0; id < survey.graph.node_count; ++id) {
    if (scene.stand_ins[id] || scene.captures.count(id) || scene.runners.count(id)) {
      represented.push_back(&survey.walk.node(id));
    }
  }
  // Of a group without split nodes nothing runs in I; a region that it is a part of may.
  const auto pin_outside_of_roots = [&] {
    const zbp_plan& plan = survey.plan;
    for (uint32_t g = 0; g < plan.group_count; ++g) {
      if (plan.split_begin[g] == plan.split_begin[g + 1]) {
        pin_outside(*scene.groups[g]);
      }
    }
  };
  const ReleaseGil no_gil;
  run_engine(std::move(roots), std::move(root_grads), std::move(represented),
             /*keep_graph=*/false, pin_outside_of_roots);
}

// ---- hand over

/// What a task's node still refers to must not keep the closure, nor what the user's hooks hold.
void let_go_of_closure(Task& task) {
  Node& node = *task.node;
  if (is_generated(node)) {
    edge_list edges = node.next_edges();
    size_t f = 0;
    for (size_t slot = 0; slot < edges.size(); ++slot) {
      if (f < task.face.size() && task.plan(f).slot == slot) {
        ++f;  // the faces are in the order of their slots
      } else {
        edges[slot] = Edge();
      }
    }
    node.next_edges().swap(edges);
    // Hooks may be Python's: what they hold goes when the node has them no more.
    std::exchange(node.retains_grad_hooks(), {});
    std::exchange(node.tensor_pre_hooks(), {});
    std::exchange(node.pre_hooks(), {});
    node.add_pre_hook(std::make_unique<ConsumedGuard>());
  }
  if (auto* deferred = std::get_if<Deferred>(&task.work)) {
    deferred->is_alone = true;
  } else if (task.kind() != ZBP_TASK_PRODUCT) {
    task.name_of_gone = node.name();
    task.node = nullptr;  // it may hold memory
  }
}

void detach_outputs(const Scene& scene, const Survey& survey) {
  std::vector<Group*> computing_regions;
  for (const GroupPtr& group : scene.groups) {
    if (group->leaves_packed()) {
      computing_regions.push_back(group.get());
    }
  }
  for (const at::Tensor& output : scene.args.outputs) {
    // A leaf was listed twice; an input that is passed through has its history from elsewhere.
    if (output.is_leaf()) {
      continue;
    }
    const uint32_t id = survey.walk.id_of(torch::autograd::impl::gradient_edge(output));
    if (id != ZBP_NONE && survey.walk.is_input(id)) {
      continue;
    }
    const uint32_t reader =
        id != ZBP_NONE ? survey.walk.group_that_reads(id, survey.plan) : ZBP_NONE;
    std::vector<Group*> readers = computing_regions;
    if (reader != ZBP_NONE && !scene.groups[reader]->leaves_packed()) {
      readers.push_back(scene.groups[reader].get());
    }
    if (readers.empty()) {
      detach_output(output);
      continue;
    }
    const auto shared = std::make_shared<const Group::Output>(output.getIntrusivePtr());
    for (Group* group : readers) {
      group->outputs.push_back(shared);
    }
  }
}

void hand_over(Scene& scene, const Survey& survey) {
  scene.input_grads = input_grads(scene.args, survey.walk, scene.captures, scene.groups);
  for (const GroupPtr& group : scene.groups) {
    group->own(std::exchange(group->waiting, {}), {});
    group->find_streams();
  }
  scene.cuts.undo();
  scene.detours.commit();
  for (const auto& stand_in : scene.stand_ins) {
    if (stand_in) {
      let_go_of_closure(stand_in->task());
      stand_in->retire();
    }
  }
  detach_outputs(scene, survey);
  add_input_grads(scene.args, survey.walk, scene.captures, scene.input_grads);
  scene.captures.clear();
  scene.stand_ins.clear();
}

}  // namespace

// As docs/architecture.md tells it.
void run_input_pass(Scene& scene) {
  Survey survey(scene.args);
  check_status(zbp_plan_build(&survey.plan, &survey.graph));
  refuse_reentrant(survey);
  note_facts(survey);
  const zbp_facts facts{survey.fact.data(), scene.args.policy};
  const std::vector<uint32_t>& roots = survey.walk.roots();
  check_status(zbp_split_build(&survey.split, &survey.graph, &survey.plan, &facts, roots.data(),
                               static_cast<uint32_t>(roots.size())));
  make_groups(scene, survey);
  make_stand_ins(scene, survey);
  make_runners(scene, survey);
  edit_edges(scene, survey);
  run(scene, survey);
  scene.runners.clear();
  hand_over(scene, survey);
}

}  // namespace zbp
