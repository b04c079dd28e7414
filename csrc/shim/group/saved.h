// What nodes have saved: what W reads of it is taken or pinned, the rest let go of.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include "shim/group/group.h"

namespace zbp {

/// Fills `task` for W from a product or deferred node that is about to run in I with `grads`.
/// Unless the task leaves them packed, saved tensors behind hooks that W reads are unpacked once
/// and put back plainly, so that neither the node nor W unpacks them a second time; a deferred
/// node's always are. A product whose matrices turn out to need more than one multiplication
/// (subclasses, sparse or complex ones) becomes deferred.
void take_matrices(Task& task, Node& node, const variable_list& grads);

/// Lets go of what a deferred node has saved, has read in I, and W does not read.
/// `group` tells weights, which cost nothing to keep, from what was computed.
void let_go_of_unread(Task& task, Node& node, const Group& group);

/// Runs a deferred task's node for the edges that I has left it.
variable_list run_deferred(const Task& task);

/// Unpacks a saved tensor once and puts it back plainly and without history. What W will read
/// shares its version counter with the original; of the rest W needs the shape alone, and it may
/// change.
at::Tensor pin(torch::autograd::SavedVariable& saved, Node& node, bool is_read_by_w);

/// The node that has saved what `node` reads: of an in-place write to a view, the one within it.
NodePtr saver_of(Node& node);

/// Lets go of what a node that has run and released its saved tensors still refers to for them:
/// behind hooks, a leaf's accumulator, which keeps the leaf and its gradient. Called with the GIL
/// held.
void forget_saved(Node& node);

/// Unpacks what the group's outside nodes have saved, once, and frees it of its history; called by
/// I, within its run.
void pin_outside(Group& group);

}  // namespace zbp
