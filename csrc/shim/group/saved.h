// What nodes have saved: what W reads of it is pinned or stays packed, the rest is let go of.
//
// Whoever looks at a node's saved variables has its lock (Saver): another thread's W may release
// them. As in libtorch, an unpack hook may run under it. No lock of zbpipe's is held meanwhile.
#pragma once

#include "shim/group/group.h"
#include "shim/torch/python.h"
#include "shim/torch/separable.h"

namespace zbp {

/// The node that has saved what a node reads, while it is locked: of an in-place write to a view,
/// the one within it.
class Saver {
 public:
  /// Waits, and lets go of the GIL meanwhile if the thread has it. Unless `waits`, is_locked()
  /// tells whether it is.
  explicit Saver(Node& node, bool waits = true);

  bool is_locked() const { return node_ != nullptr; }
  Node& node() const { return *node_; }
  /// Borrowed from the node. Called with the GIL held.
  std::vector<SavedVariable*> all() const { return saved_by(*node_); }

  /// Replaces one of them. What was there goes behind the lock: that may run Python code.
  void put(SavedVariable& saved, SavedVariable fresh);
  /// Leaves it packed for W: without the hook that packed, and without the leaf that was.
  void leave(SavedVariable& saved, PackedPtr packed);
  /// Unpacks it, and puts it back plainly and without history, so that nobody unpacks it again.
  /// What is read by W shares its version counter with the original, and is no buffer that an
  /// unpack hook fills anew. Of the rest W needs the shape alone, and it may change.
  at::Tensor pin(SavedVariable& saved, bool is_read_by_w = true);
  /// Unpacks it, and pins it if it is behind hooks.
  at::Tensor unpack(SavedVariable& saved, bool is_read_by_w = true);

 private:
  std::vector<SavedVariable> gone_;
  std::unique_lock<std::mutex> around_, within_;
  NodePtr node_;
};

/// True for an unpack hook by which torch.utils.checkpoint computes a region again. Called with the
/// GIL held.
bool is_checkpoints(const c10::SafePyObject& unpack_hook);

/// What Python hooks have packed in `saved`, if W is to unpack it; else null. A selectively
/// checkpointed region, and what is within one, is computed again only once, so I unpacks it. So
/// it does within a GraphExecGroup, whose runs share one recomputation.
PackedPtr packed_in(const SavedVariable& saved);

/// True if what the node unpacks may be filled anew before W.
bool may_unpack_refilled(Node& node);

/// Fills `task` for W from a product or deferred node that is about to run in I with `grads`.
/// Unless the task leaves them packed, saved tensors behind hooks that W reads are unpacked once
/// and put back plainly, so that neither the node nor W unpacks them a second time; a deferred
/// node's always are. A product whose matrices turn out to need more than one multiplication
/// (subclasses, sparse or complex ones) becomes deferred.
void take_matrices(Task& task, const Separable& separable, const variable_list& grads,
                   const Group& group);

/// Lets go of what the node, which has run, has saved and W does not read.
/// `group` tells weights, which cost nothing to keep, from what was computed.
void let_go_of_unread(Task& task, const Separable& separable, const Group& group);

/// Lets go of what a node that has released its saved tensors still refers to for them: behind
/// hooks, a leaf's accumulator, which keeps the leaf and its gradient.
void forget_leaves(Node& node, const Separable& separable);

/// A tensor of that shape, whose values nobody reads.
at::Tensor filled(const Blank& blank);

/// Runs a deferred task's node for the edges that I has left it.
variable_list run_deferred(const Task& task);

/// Calls `visit`, under the node's lock, with what it has saved, packed or not; not at all while a
/// thread runs the node. Called with the GIL held.
void for_each_saved_outside(Node& node, c10::function_ref<void(const SavedVariable&)> visit);

/// Notes what W will read of what the group's outside nodes have saved, before I runs. Called with
/// the GIL held.
void note_saved_outside(Group& group);

/// Unpacks what the group's outside nodes have saved, once, and frees it of its history; called by
/// I, within its run. Each is unpacked on its node's stream.
void pin_outside(Group& group);

}  // namespace zbp
