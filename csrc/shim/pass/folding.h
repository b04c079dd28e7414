// The gradients that I sums: see Note [Sums in I] in core/pass/zbp_folds.h.
#pragma once

#include "shim/pass/group.h"

namespace zbp {

/// Before I runs, when all tasks of the group are made. Throws std::bad_alloc, the group as it was.
void plan_folds(Group& group);

/// The task, a whole one, has run and keeps its gradients. From any thread.
void fold_kept(Group& group, Task& task);

}  // namespace zbp
