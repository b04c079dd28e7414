// Which Function runs here, and which of its edges are those of the weights that it names.
#pragma once

#include <Python.h>

#include "shim/pass/stand_in.h"

namespace zbp {

/// The Function whose backward runs on this thread, as its node. In I a stand-in may run it, in W a proxy does;
/// then what is asked for is what they follow.
struct Running {
  NodePtr node;                 // null if no Function runs
  StandIn* stand_in = nullptr;  // I's
  const Node* proxy = nullptr;  // W's

  /// True if a gradient for this edge of the node has somewhere to go.
  bool asks_for(size_t slot) const;
};

Running running_here();

/// The node of the user's graph that `node` has the place of, in I or W; often `node` itself.
Node& original_of(Node& node);

struct Targets {
  SmallVector<int32_t, 2> slots;  // the node's edges; -1 for a weight that takes no gradient
  bool is_single = false;
  bool are_all = false;  // all the weights that there are: the callable returns nothing
};

/// From what zbp_defer() is given as `weights`. Refuses what is no argument of the Function.
Targets parse_weights(PyObject* weights, const Running& running);

/// True if a gradient is asked for, of one of the weights, where no stand-in tells.
///
/// Note [Weights that nobody has named]
/// Of a Function that adds all gradients itself, nobody says which of its arguments are weights. A stand-in
/// knows, and a proxy runs for nothing else. In other backwards there is no doubt where all of the arguments
/// are asked for, or none. Otherwise those count that are leaves, or come from leaves alone: rather a call in
/// vain than a gradient that is lost.
bool asks_for_weights(const Targets& targets, const Running& running);

}  // namespace zbp
