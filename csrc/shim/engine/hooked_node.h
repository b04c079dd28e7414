// The hooks of nodes that the engine runs in I as they are.
#pragma once

#include <memory>

#include "shim/group/kept.h"

namespace zbp {

/// While it lives, what the node's hooks put in the place of a gradient is theirs no more: it may go
/// on, by nodes that hand their gradient on, to one that I keeps. See Note [Whose memory a gradient
/// has]. For that it has hooks of its own around them; the node is borrowed.
class HookedNode {
 public:
  explicit HookedNode(Node& node);
  ~HookedNode();
  HookedNode(const HookedNode&) = delete;
  HookedNode& operator=(const HookedNode&) = delete;

 private:
  Node& node_;
};

}  // namespace zbp
