// I: walk, plan, split, run, hand over. See docs/architecture.md.

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>

#include "shim/pass/decisions.h"
#include "shim/torch/detach.h"
#include "shim/pass/dtensor.h"
#include "shim/torch/edits.h"
#include "shim/torch/gil.h"
#include "shim/pass/kinds.h"
#include "shim/pass/path.h"
#include "shim/torch/python.h"
#include "shim/torch/ranges.h"
#include "shim/pass/stand_in.h"
#include "shim/pass/start.h"
#include "shim/torch/streams.h"
#include "shim/pass/walk.h"

namespace zbp {

using torch::autograd::AccumulateGrad;

namespace {

/// Those of the split nodes, by node id. However I ends, none keeps what its node has lent it, and if it
/// has failed, none leaves its node half used.
struct StandIns {
  explicit StandIns(size_t node_count) : by_id(node_count) {}
  ~StandIns();
  StandIns(const StandIns&) = delete;
  StandIns& operator=(const StandIns&) = delete;

  const NodeRef<StandIn>& operator[](uint32_t id) const { return by_id[id]; }
  NodeRef<StandIn>& operator[](uint32_t id) { return by_id[id]; }

  std::vector<NodeRef<StandIn>> by_id;
};

/// The graph while it is split. Unless hand_over() is reached, every edge is put back.
class Split {
 public:
  Split(const InputPassArgs& args, const Walk& walk, const Answers& answers);
  Split(const Split&) = delete;
  Split& operator=(const Split&) = delete;

  void run();
  InputPassResult hand_over();
  const std::vector<GroupPtr>& groups() const { return groups_; }

 private:
  void make_group(uint32_t g);
  void add_outside(uint32_t g);
  void note_saved(Group& group, const Decisions& decisions) const;
  std::shared_ptr<const Reads> note_reads() const;
  void add_task(uint32_t g, uint32_t id, const Decisions& decisions);
  static Task& new_task(Group& group, Kind kind, NodePtr node, uint64_t sequence_nr);
  void add_face(Task& task, const Edge& edge, uint32_t slot, uint32_t target) const;
  void note_path(Face& face, zbp_face& plan) const;
  void redirect_edges();
  void redirect(const zbp_edge& edge);
  Edge detour(const Edge& edge, uint32_t target);
  void add_root(const Edge& root, const at::Tensor& grad);
  void retire_split_nodes();
  void detach_outputs();
  variable_list input_grads() const;
  at::Tensor captured(const Edge& edge) const;
  std::unordered_set<const void*> storages_in_use() const;

  const InputPassArgs& args_;
  const Walk& walk_;
  const Answers& answers_;
  const std::shared_ptr<const Reads> reads_;
  std::vector<GroupPtr> groups_;
  std::vector<int32_t> weight_index_;   // per node id: position in its group's weights
  std::vector<int32_t> outside_index_;  // per node id: position in its group's outside nodes
  StandIns stand_in_;
  std::unordered_map<uint32_t, NodeRef<Capture>> capture_;  // by the id of an input's node
  edge_list roots_;
  variable_list root_grads_;
  uint64_t root_tasks_ = 0;
  EdgeEdits detours_;  // to stand-ins: for good, once I has succeeded
  EdgeEdits cuts_;     // all others: for the time of the run
};

Split::Split(const InputPassArgs& args, const Walk& walk, const Answers& answers)
    : args_(args),
      walk_(walk),
      answers_(answers),
      reads_(note_reads()),
      weight_index_(walk.graph().node_count, -1),
      outside_index_(walk.graph().node_count, -1),
      stand_in_(walk.graph().node_count) {
  for (uint32_t g = 0; g < walk_.plan().group_count; ++g) {
    make_group(g);
  }
  redirect_edges();
  for (size_t i = 0; i < args_.roots.size(); ++i) {
    add_root(args_.roots[i], args_.root_grads[i]);
  }
  for (const GroupPtr& group : groups_) {
    check_status(zbp_book_init(&group->book, &group->layout, nullptr));
  }
}

StandIns::~StandIns() {
  for (const auto& stand_in : by_id) {
    if (stand_in) {
      stand_in->give_up();
    }
  }
}

void Split::make_group(uint32_t g) {
  const zbp_plan& plan = walk_.plan();
  Group& group = *groups_.emplace_back(std::make_shared<Group>());
  for (uint32_t i = plan.weight_begin[g]; i < plan.weight_begin[g + 1]; ++i) {
    weight_index_[plan.weight[i]] = static_cast<int32_t>(group.weights.size());
    group.weights.emplace_back().accumulator = ref_as<AccumulateGrad>(walk_.node(plan.weight[i]));
  }
  group.reads = reads_;
  add_outside(g);
  const Decisions decisions(answers_, group);
  note_saved(group, decisions);
  group.tasks.reserve(plan.split_begin[g + 1] - plan.split_begin[g]);
  for (uint32_t i = plan.split_begin[g]; i < plan.split_begin[g + 1]; ++i) {
    add_task(g, plan.split[i], decisions);
  }
}

void Split::add_outside(uint32_t g) {
  const zbp_plan& plan = walk_.plan();
  Group& group = *groups_[g];
  const auto edges = c10::ArrayRef<uint32_t>(plan.weight_edge + plan.weight_edge_begin[g],
                                             plan.weight_edge + plan.weight_edge_begin[g + 1]);
  for (const uint32_t e : edges) {
    int32_t& index = outside_index_[walk_.graph().edge[e].src];
    if (index < 0) {
      index = static_cast<int32_t>(group.outside.size());
      Node& node = walk_.node(walk_.graph().edge[e].src);
      group.outside.push_back({&node, walk_.has_other_outputs(node)});
    }
  }
  zbp_layout_init(&group.layout, static_cast<uint32_t>(group.weights.size()),
                  static_cast<uint32_t>(group.outside.size()), nullptr);
  for (const uint32_t e : edges) {
    const zbp_edge& edge = walk_.graph().edge[e];
    if (walk_.has(edge.dst, ZBP_NODE_WEIGHTWARD)) {
      check_status(zbp_layout_add_hop(&group.layout,
                                      {static_cast<uint32_t>(outside_index_[edge.src]), edge.slot,
                                       outside_index_[edge.dst], weight_index_[edge.dst]}));
    }
  }
}

/// Where W computes regions again: what of the weights it may read, at their versions of now. Whatever a region gives
/// to one of its nodes was computed of what earlier nodes have read.
std::shared_ptr<const Reads> Split::note_reads() const {
  if (!answers_.differ() && answers_.for_all().hooked != Decision::Hooked::leave) {
    return nullptr;
  }
  const zbp_graph& graph = walk_.graph();
  std::vector<uint64_t> first(graph.node_count, UINT64_MAX);
  for (uint32_t i = 0; i < graph.edge_count; ++i) {
    uint64_t& number = first[graph.edge[i].dst];
    number = std::min(number, walk_.node(graph.edge[i].src).sequence_nr());
  }
  auto reads = std::make_shared<Reads>();
  const auto note = [&reads](const at::Tensor& weight, uint64_t sequence_nr) {
    if (has_version(weight)) {
      reads->weights.push_back({sequence_nr, Version(weight)});
    }
  };
  for (const at::Tensor& weight : args_.frozen) {
    note(weight, 0);  // in no graph
  }
  for (uint32_t id = 0; id < graph.node_count; ++id) {
    if (auto* accumulator = as<AccumulateGrad>(walk_.node(id));
        accumulator && !walk_.is_input(id)) {
      note(accumulator->variable, first[id]);
    }
  }
  std::sort(
      reads->weights.begin(), reads->weights.end(),
      [](const Reads::Read& a, const Reads::Read& b) { return a.sequence_nr < b.sequence_nr; });
  return reads;
}

/// What `node` has saved, and the node that unpacks it: of an in-place write to a view, the one within it.
std::pair<std::vector<torch::autograd::SavedVariable*>, NodePtr> all_saved_by(Node& node) {
  std::vector<torch::autograd::SavedVariable*> saved;
  if (is_python_function(node)) {
    THPObjectPtr context(torch::autograd::functionToPyObject(ref_of(node)));
    if (!context) {
      throw python_error();
    }
    for (auto& one : reinterpret_cast<THPFunction*>(context.get())->saved_variables) {
      saved.push_back(&one);
    }
    return {std::move(saved), ref_of(node)};
  }
  const auto* slices = as<torch::autograd::CopySlices>(node);
  Node& saver = slices && slices->fn ? *slices->fn : node;
  return {saved_by(saver), ref_of(saver)};
}

/// What the group's outside nodes have saved. Behind hooks: I unpacks it, lest W computes a region again. Views that
/// keep their bases for nothing: I makes them let go. Other tensors: their versions, which W's run would find wrong only
/// after it has added some gradients.
void Split::note_saved(Group& group, const Decisions& decisions) const {
  for (size_t i = 0; i < group.outside.size(); ++i) {
    Node& node = *group.outside[i].node;
    if (saves_nothing(node)) {
      continue;
    }
    const bool is_left = decisions.of_outside(i).hooked == Decision::Hooked::leave;
    const auto [all, saver] = all_saved_by(node);
    for (torch::autograd::SavedVariable* saved : all) {
      if (saved->has_hooks()) {
        if (is_generated(node)) {
          group.unpinned_outside.push_back({saver, saved, is_left});
        }
        continue;
      }
      const at::Tensor tensor = saved->unpack(saver);
      // A Function's is its backward's to look at, as it was saved.
      if (tensor.defined() && is_generated(*saver) && keeps_base_unused(tensor)) {
        group.unpinned_outside.push_back({saver, saved, is_left});
      } else if (has_version(tensor)) {
        group.saved_outside.emplace_back(tensor);
      }
    }
  }
}

void Split::add_task(uint32_t g, uint32_t id, const Decisions& decisions) {
  const zbp_plan& plan = walk_.plan();
  Node& node = walk_.node(id);
  Task& task = new_task(*groups_[g], Kind::whole, ref_of(node), node.sequence_nr());
  for (uint32_t i = plan.out_begin[id]; i < plan.out_begin[id + 1]; ++i) {
    const zbp_edge& edge = walk_.graph().edge[plan.out[i]];
    if (walk_.has(edge.dst, ZBP_NODE_WEIGHTWARD)) {
      add_face(task, node.next_edge(edge.slot), edge.slot, edge.dst);
    }
  }
  const Decision decision = decisions.of(task);
  task.set_kind(classify(node, task, decision, task.why));
  const bool is_whole = task.kind() == Kind::whole;
  task.plan().leaves_packed = !is_whole && decision.hooked == Decision::Hooked::leave;
  task.can_run_again = !is_whole || saved_nothing(node);
  task.takes_work = is_whole ? takes_work(node, decision) : ZBP_DEFER_NOTHING;
  stand_in_[id] = make_node<StandIn>(task.node, groups_[g], groups_[g]->tasks.size() - 1);
  stand_in_[id]->next_edges().resize(node.next_edges().size());
}

/// The last task of its group.
Task& Split::new_task(Group& group, Kind kind, NodePtr node, uint64_t sequence_nr) {
  check_status(zbp_layout_add_task(&group.layout, static_cast<uint8_t>(kind), sequence_nr));
  Task& task = group.tasks.emplace_back(group.layout, static_cast<uint32_t>(group.tasks.size()));
  note_place(task, *node);
  task.plan().stream = stream_number(group, task);
  task.node = std::move(node);
  return task;
}

/// A face of the last task of a group: an edge to the node `target`.
void Split::add_face(Task& task, const Edge& edge, uint32_t slot, uint32_t target) const {
  Face& face = task.face.emplace_back();
  face.edge = edge;
  zbp_face plan{0, slot, weight_index_[target], outside_index_[target], ZBP_FACE_SIMPLE};
  if (plan.weight < 0) {
    note_path(face, plan);
  }
  check_status(zbp_layout_add_face(task.layout, plan));
}

/// Follows the face to its weight, if nothing but plain steps lies between them.
void Split::note_path(Face& face, zbp_face& plan) const {
  uint8_t flag = 0;
  const int32_t weight = weight_index_[walk_.id_of(follow_plain_steps(face, flag))];
  // Gradients that meet on the way are to be added there: see Note [The order of sums].
  const auto adds_up = [&](Node* node) { return walk_.adds_up(Edge(ref_of(*node), 0)); };
  if (weight < 0 || count_casts(face) > 1 ||
      std::any_of(face.path.begin(), face.path.end(), adds_up)) {
    face.path.clear();
  } else {
    plan.weight = weight;
    plan.flag = flag;
  }
}

void Split::redirect_edges() {
  const zbp_graph& graph = walk_.graph();
  for (uint32_t i = 0; i < graph.edge_count; ++i) {
    if (walk_.has(graph.edge[i].src, ZBP_NODE_CLOSURE)) {
      redirect(graph.edge[i]);
    }
  }
}

void Split::redirect(const zbp_edge& edge) {
  Node& node = walk_.node(edge.src);
  Edge there = detour(node.next_edge(edge.slot), edge.dst);
  const bool leaves = !there.is_valid();
  if (const auto& stand_in = stand_in_[edge.src]) {
    exchange_edge(*stand_in, edge.slot, std::move(there));
    if (leaves && stand_in->task().kind() != Kind::whole) {
      cuts_.cut(node, edge.slot);
    }
  } else if (stand_in_[edge.dst]) {
    detours_.replace(node, edge.slot, std::move(there));
  } else if (leaves || walk_.is_input(edge.dst)) {
    cuts_.replace(node, edge.slot, std::move(there));
  }
}

/// Where an edge of the closure leads while I runs; invalid if it leaves the closure.
Edge Split::detour(const Edge& edge, uint32_t target) {
  if (walk_.is_input(target)) {
    NodeRef<Capture>& capture = capture_[target];
    if (!capture) {
      capture = make_node<Capture>(edge.function, walk_.has_other_outputs(*edge.function));
    }
    return Edge(capture, edge.input_nr);
  }
  if (stand_in_[target]) {
    return Edge(stand_in_[target], edge.input_nr);
  }
  return walk_.has(target, ZBP_NODE_CLOSURE) ? edge : Edge();
}

void Split::add_root(const Edge& root, const at::Tensor& grad) {
  const uint32_t id = walk_.id_of(root);
  if (Edge there = detour(root, id); there.is_valid()) {
    roots_.push_back(std::move(there));
    root_grads_.push_back(grad);
  } else if (walk_.has(id, ZBP_NODE_WEIGHT_ROOT)) {
    // It starts there before any node runs.
    Task& task = new_task(*groups_[walk_.plan().group[id]], Kind::root, root.function,
                          UINT64_MAX - ++root_tasks_);
    task.input_nr = root.input_nr;
    task.output_grads.emplace_back(grad);
    add_face(task, root, 0, id);
  }
}

void Split::run() {
  if (roots_.empty()) {
    return;
  }
  std::vector<Node*> represented;
  for (const auto& [id, capture] : capture_) {
    represented.push_back(&walk_.node(id));
  }
  for (uint32_t id = 0; id < stand_in_.by_id.size(); ++id) {
    if (stand_in_[id]) {
      represented.push_back(&walk_.node(id));
    }
  }
  // Of a group without split nodes nothing runs in I; a region that it is a part of may.
  const auto pin_outside_of_roots = [this] {
    const zbp_plan& plan = walk_.plan();
    for (uint32_t g = 0; g < plan.group_count; ++g) {
      if (plan.split_begin[g] == plan.split_begin[g + 1]) {
        groups_[g]->pin_outside();
      }
    }
  };
  const ReleaseGil no_gil;
  run_engine(make_node<Start>(std::move(roots_), std::move(root_grads_), std::move(represented),
                              pin_outside_of_roots),
             /*keep_graph=*/false);
}

/// A whole node is not needed any more. It is kept, for those who ask a group for its
/// "intermediates", only if it holds no memory: a Function's context may have tensors as attributes.
bool is_free_to_keep(Node& node) {
  if (!is_python_function(node)) {
    return is_generated(node);
  }
  THPObjectPtr context(torch::autograd::functionToPyObject(ref_of(node)));
  THPObjectPtr attributes(context ? PyObject_GetAttrString(context, "__dict__") : nullptr);
  const bool empty = attributes && PyDict_Check(attributes.get()) && PyDict_Size(attributes) == 0;
  PyErr_Clear();
  return empty;
}

/// What a task's node still refers to must not keep the closure, nor what the user's hooks hold.
void let_go_of_closure(Task& task) {
  if (task.kind() == Kind::whole && !is_free_to_keep(*task.node)) {
    task.node = nullptr;
    return;
  }
  edge_list edges = task.node->next_edges();
  size_t f = 0;
  for (size_t slot = 0; slot < edges.size(); ++slot) {
    if (f < task.face.size() && task.plan(f).slot == slot) {
      ++f;  // the faces are in the order of their slots
    } else {
      edges[slot] = Edge();
    }
  }
  exchange_edges(*task.node, std::move(edges));
  drop_hooks(*task.node);
  task.is_consumed = true;
  task.node->add_pre_hook(std::make_unique<ConsumedGuard>());
}

InputPassResult Split::hand_over() {
  InputPassResult result;
  result.input_grads = input_grads();
  for (const GroupPtr& group : groups_) {
    join_streams(*group);
    group->was_captured = is_capturing(*group);
  }
  cuts_.undo();
  detours_.commit();
  retire_split_nodes();
  detach_outputs();
  result.groups = std::move(groups_);
  return result;
}

void Split::retire_split_nodes() {
  for (const auto& stand_in : stand_in_.by_id) {
    if (stand_in) {
      let_go_of_closure(stand_in->task());
      stand_in->retire();
    }
  }
}

void Split::detach_outputs() {
  for (const at::Tensor& output : args_.outputs) {
    // A leaf was listed twice; an input that is passed through has its history from elsewhere.
    if (output.is_leaf()) {
      continue;
    }
    const Edge edge = torch::autograd::impl::gradient_edge(output);
    if (walk_.is_input(edge)) {
      continue;
    }
    const int32_t reader = walk_.group_that_reads(edge);
    if (reader < 0) {
      detach_output(output);
    } else {
      groups_[reader]->outputs.emplace_back(output.getIntrusivePtr());
    }
  }
}

/// True if several elements lie, or may lie, in one place, as after expand(): nobody could add to them in place.
bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || is_subclass(tensor) || tensor.is_nested() ||
      tensor.sym_numel() == 0) {
    return false;
  }
  SmallVector<std::pair<c10::SymInt, c10::SymInt>, 5> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.sym_size(d) != 1) {
      dims.emplace_back(tensor.sym_stride(d), tensor.sym_size(d));
    }
  }
  std::sort(dims.begin(), dims.end());
  c10::SymInt farthest = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= farthest) {
      return true;
    }
    farthest = farthest + stride * (size - 1);
  }
  return false;
}

/// The gradient of each input, detached, in memory of its own: the caller may add to it in place while
/// other inputs' gradients, the caller's output gradients or a task share the storage.
variable_list Split::input_grads() const {
  const auto shared = storages_in_use();
  std::unordered_map<const void*, const void*> owner;  // storage -> the input's node that has it
  variable_list grads;
  for (const Edge& edge : walk_.input_edges()) {
    at::Tensor& grad = grads.emplace_back(captured(edge));
    const void* storage = storage_of(grad);
    if (!storage) {
      continue;
    }
    grad = grad.requires_grad() ? grad.detach() : grad;
    const auto [place, is_first] = owner.try_emplace(storage, edge.function.get());
    const bool is_others =
        shared.count(storage) || (!is_first && place->second != edge.function.get());
    if (is_others || overlaps_itself(local_part(grad))) {
      grad = grad.clone();
    }
  }
  return grads;
}

at::Tensor Split::captured(const Edge& edge) const {
  if (!edge.is_valid()) {
    return {};
  }
  const auto capture = capture_.find(walk_.id_of(edge));
  const bool reached = capture != capture_.end() && !capture->second->grads.empty();
  return reached ? capture->second->grads[edge.input_nr] : at::Tensor();
}

/// Those of the inputs' gradients that a task or the caller reads as well.
std::unordered_set<const void*> Split::storages_in_use() const {
  std::unordered_set<const void*> candidates;
  for (const auto& [id, capture] : capture_) {
    for (const at::Tensor& grad : capture->grads) {
      candidates.insert(storage_of(grad));
    }
  }
  std::unordered_set<const void*> in_use;
  const auto note = [&](const at::Tensor& tensor) {
    if (const void* storage = storage_of(tensor); candidates.count(storage)) {
      in_use.insert(storage);
    }
  };
  for (const at::Tensor& grad : args_.root_grads) {
    note(grad);
  }
  for (const GroupPtr& group : groups_) {
    for (const Task& task : group->tasks) {
      for_each_watched(task, [&](const Watched& watched) { note(watched.tensor()); });
    }
  }
  in_use.erase(nullptr);
  return in_use;
}

/// torch's reentrant checkpoint runs a backward of its own within I: an accumulation that is nobody's to redirect.
void refuse_reentrant(const Walk& walk) {
  for (uint32_t id = 0; id < walk.graph().node_count; ++id) {
    Node& node = walk.node(id);
    TORCH_CHECK(
        !is_python_function(node) || !is_reentrant_checkpoint(node),
        "a reentrant checkpoint adds the gradients of its region to .grad, where main_grad=True "
        "asks for main_grad, and a whole backward is not told of which weights; checkpoint with "
        "use_reentrant=False");
  }
}

}  // namespace

InputPassResult run_input_pass(const InputPassArgs& args) {
  const Range range("zbpipe::input_pass");
  const Answers answers(args);
  const Walk walk(args);
  if (args.policy.refuse_reentrant) {
    refuse_reentrant(walk);
  }
  Split split(args, walk, answers);
  split.run();
  return split.hand_over();
}

void look_at_input_pass(const InputPassArgs& args,
                        const std::function<void(const std::vector<GroupPtr>&)>& look) {
  const Answers answers(args);
  const Walk walk(args);
  const Split split(args, walk, answers);
  look(split.groups());
}

}  // namespace zbp
