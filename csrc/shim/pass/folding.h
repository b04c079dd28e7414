// Gradients of one weight that I computes at several places, summed in I.
//
// Note [Sums in I]
// A weight that is used n times (a recurrent layer's, a tied one) would be held n times from I to W where its nodes
// run whole. They are added up as W would add them, so to the same bits: from the last node of the forward to the
// first, as far as all before have come. The sum stands at the first face, the others have none. A face that is not
// added ends it, and so does the first one, to whatever weight, of which W must run nodes on the way: what these give
// comes after it. Added is what leads to the weight by transpositions at most, on one stream, of nodes to which nobody
// can give other output gradients.
#pragma once

#include "shim/pass/group.h"

namespace zbp {

/// Before I runs, when all tasks of the group are made.
void plan_folds(Group& group);

/// The task, a whole one, has run and keeps its gradients. From any thread.
void fold_kept(Group& group, Task& task);

}  // namespace zbp
