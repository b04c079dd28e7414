// The nodes that I puts into the graph for the time of one run.
#pragma once

#include <torch/csrc/autograd/anomaly_mode.h>

#include "shim/group/group.h"

namespace zbp {

/// What the engine runs in the place of another node.
class InPlaceOf : public Node {
 public:
  std::string name() const override { return original_ ? original_->name() : "zbpipe::StandIn"; }

 protected:
  InPlaceOf(NodePtr original, uint64_t sequence_nr)
      : Node(sequence_nr), original_(std::move(original)) {
    NodeParts::copy_identity(*original_, *this);
  }

  NodePtr original_;  // a stand-in's is null after its I

 private:
  friend Node& original_of(Node& node);
};

/// The node of the user's graph that `node` has the place of, in I or W; often `node` itself.
Node& original_of(Node& node);

/// Runs the node as the engine does, but that what hooks return and still have is copied: see Note
/// [Whose memory a gradient has]. In I for nodes with hooks that are not split, in W for those
/// between a task and its weights.
class Runner : public InPlaceOf {
 public:
  /// See run_node().
  Runner(Node& original, bool release, bool track_views, bool skip_undefined)
      : InPlaceOf(ref_of(original), original.sequence_nr()),
        release_(release),
        track_views_(track_views),
        skip_undefined_(skip_undefined) {}

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  const bool release_, track_views_, skip_undefined_;
};

/// Takes the place of a split node: the engine runs the stand-in, the stand-in runs the node, with
/// its hooks, and fills the weight task. Its edges are the node's input face.
///
/// Note [Why split nodes need a stand-in]
/// The engine releases the saved tensors of every node that it ran. W still needs those of a
/// deferred node, and a whole node must be given all its edges while the engine follows only some
/// of them. So the engine must not see the node itself.
class StandIn : public InPlaceOf {
 public:
  StandIn(Node& original, GroupPtr group, size_t task, bool skip_undefined);

  /// Forgets node, group and edges, so that nothing is kept once I is over. From then on running
  /// the stand-in is a second backward through the graph.
  void retire() noexcept;

  /// Gives back what the node lent for the run. Unless retired, I has failed: if the node has run,
  /// it is spent, as after a failed ordinary backward. Repeating it does no harm.
  void give_up() noexcept;

  bool is_retired() const { return original_ == nullptr; }

  Task& task() { return group_->tasks[task_]; }
  Group& group() const { return *group_; }
  /// What a Function has unpacked: its node may have let go of it since.
  bool may_unpack_refilled() const { return may_unpack_refilled_; }

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  variable_list run_split(Task& task, variable_list&& grads);
  /// somebodys: gets those of its faces at which a Function has left its gradient.
  variable_list run_whole(Task& task, variable_list&& grads, SmallVector<uint32_t, 2>& somebodys);

  void give_back_metadata() noexcept;

  // The node's, where the engine looks for it at an error; else hooks find it on their node.
  bool has_metadata_ = torch::autograd::AnomalyMode::is_enabled();
  bool may_unpack_refilled_ = false;
  bool has_begun_ = false;
  bool has_run_ = false;

  GroupPtr group_;
  size_t task_;  // index into group_->tasks
  bool skip_undefined_;
};

/// Takes the place of the node behind a stage input, where I ends: runs the hooks that an ordinary
/// backward would run there and keeps the gradients. What lies behind is never walked.
class Capture : public InPlaceOf {
 public:
  /// skip_undefined: see Note [Other outputs of an input's node]. owns: a Function or a hook, which
  /// may write to what has arrived, runs in this I.
  Capture(NodePtr original, bool skip_undefined, bool owns);

  /// One per input of the node that it stands for.
  variable_list grads;

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  const bool skip_undefined_, owns_;
};

/// What is said of a backward through what I has consumed: torch advises retain_graph, which I does
/// not take.
constexpr const char* ERR_CONSUMED =
    "Trying to backward through the graph a second time: an input pass has already run through "
    "this part of it, and keeps no graph for another backward. Give all outputs and losses of one "
    "forward to one call of stage_backward_input.";

/// A gradient of either run would be lost.
constexpr const char* ERR_WITHIN =
    "A hook has run a backward through the graph that an input pass is running through; run it "
    "before the input pass with retain_graph=True, or through a graph of its own";

/// Refuses every run of a node that I has consumed and a group still holds.
class ConsumedGuard : public torch::autograd::FunctionPreHook {
 public:
  variable_list operator()(const variable_list& grads) override;
};

/// True for what is left of a split node after I: a second backward must not get past it.
bool is_consumed(Node& node);

/// The hooks of the tensors that `node` produced, which fire wherever a gradient reaches it, and
/// those of the node, which fire where it runs; in the engine's order. skip_undefined: not those of
/// tensors that have got no gradient here. What post hooks return and still have is copied.
variable_list call_tensor_hooks(Node& node, variable_list grads, bool skip_undefined = false);
variable_list call_pre_hooks(Node& node, variable_list grads);
variable_list call_post_hooks(Node& node, variable_list outputs, const variable_list& inputs);

/// Runs `node` as the engine does, with all its hooks and its edges as they are. substitute: the
/// node that the engine runs in its place. Without `track_views`, what comes out of a node that
/// only changes the layout does not know of what it is a view: see along_path(). skip_undefined: as
/// above.
variable_list run_node(Node& node, Node& substitute, variable_list&& grads, bool release,
                       bool track_views, bool skip_undefined);

}  // namespace zbp
