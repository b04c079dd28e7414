// What is known about nodes, for the core to decide on.
#pragma once

#include "core/pass/zbp_facts.h"
#include "shim/pass/group.h"
#include "shim/torch/nodes.h"

namespace zbp {

/// What the core decides on: of a split node, and of a node between it and the weights. See zbp_facts.h. Called with
/// the GIL held.
zbp_fact fact_of_split(Node& node);
zbp_fact fact_of_outside(Node& node);

/// True for the edge to a weight, or to what is computed from one, that is a matrix or more.
bool is_matrix(const Edge& edge);

/// True if a node that has not run yet has no saved tensors that running it would release; false
/// where this is not known. Called with the GIL held.
bool saved_nothing(Node& node);

}  // namespace zbp
