// The policy's answers for one parameter group.
#pragma once

#include <vector>

#include "shim/kinds.h"

namespace zbp {

class Decisions {
 public:
  /// Asks the policy's functions of each weight of `group`, whose outside nodes are known. GIL held.
  Decisions(const zbp_policy& policy, const Group& group);

  /// Of the answers for the weights behind a task, W wins over I, and keeping over recomputing.
  Decision of(const Task& task) const;

 private:
  Decision behind(int32_t weight, int32_t outside) const;
  void decide_outside(const Group& group);

  bool asks_ = false;
  Decision for_all_;
  std::vector<Decision> weight_;   // only if the policy has functions
  std::vector<Decision> outside_;  // per outside node, of the weights that it leads to
};

}  // namespace zbp
