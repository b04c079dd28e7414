// The hooks of nodes that the engine runs in I as they are.
#pragma once

#include "shim/group/kept.h"

namespace zbp {

/// While it lives, what the node's hooks put in the place of a gradient is theirs no more: nodes
/// that hand their gradient on may bring it to one where I keeps it. See Note [Whose memory a
/// gradient has]. It has hooks of its own around the user's. The node is borrowed.
class HookedNode {
 public:
  explicit HookedNode(Node& node);
  ~HookedNode();
  C10_DISABLE_COPY_AND_ASSIGN(HookedNode);

 private:
  Node& node_;
};

}  // namespace zbp
