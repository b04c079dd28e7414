// What is known about nodes: their types, what they have saved, what of it W reads.
#pragma once

#include <torch/csrc/autograd/saved_variable.h>

#include "core/pass/zbp_facts.h"
#include "shim/pass/group.h"
#include "shim/torch/nodes.h"

namespace zbp {

/// What the core decides on: of a split node, and of a node between it and the weights. See zbp_facts.h. Called with
/// the GIL held.
zbp_fact fact_of_split(Node& node);
zbp_fact fact_of_outside(Node& node);

/// In one word, for people.
const char* name_of(Kind kind);

/// True for the edge to a weight, or to what is computed from one, that is a matrix or more.
bool is_matrix(const Edge& edge);

/// Fills `task` for W from a product or deferred node that is about to run in I with `grads`.
/// Unless the task leaves them packed, saved tensors behind hooks that W reads are unpacked once and put
/// back plainly, so that neither the node nor W unpacks them a second time; a deferred node's always are.
/// A product whose matrices turn out to need more than one multiplication (subclasses, sparse or complex
/// ones) becomes deferred.
void take_matrices(Task& task, Node& node, const variable_list& grads);

/// Lets go of what a deferred node has saved, has read in I, and W does not read.
/// `group` tells weights, which cost nothing to keep, from what was computed.
void let_go_of_unread(Task& task, Node& node, const Group& group);

/// Runs a deferred task's node for the edges that I has left it.
variable_list run_deferred(const Task& task);

/// Unpacks a saved tensor once and puts it back plainly and without history. What W will read shares its
/// version counter with the original; of the rest W needs the shape alone, and it may change.
at::Tensor pin(torch::autograd::SavedVariable& saved, Node& node, bool is_read_by_w);

/// The same of what W will read, if it needs it: it is packed, or a view that keeps its base for nothing. Called with
/// the node's mutex held; `before` gets what was there.
at::Tensor pin_locked(torch::autograd::SavedVariable& saved, Node& node,
                      torch::autograd::SavedVariable& before);

/// True if W can unpack what is saved behind hooks. Then it is unpacked now too, where the region that it
/// belongs to keeps what I computes of it for whoever has not unpacked it in I. `arguments` gets what computing the
/// region again reads.
bool leave_packed(const torch::autograd::SavedVariable& saved, std::vector<Version>& arguments);

/// True if a node that has not run yet has no saved tensors that running it would release; false
/// where this is not known. Called with the GIL held.
bool saved_nothing(Node& node);

}  // namespace zbp
