// Work that the backward of a Python autograd.Function hands over in I, to be run in W.
//
// Note [Who takes work]
// While a node runs, libtorch says which (get_current_node, of the thread). While I runs a
// Function, that is the stand-in of its node; then what the backward hands over goes into the
// stand-in's task. In every other case the work runs at once: in an ordinary backward the node is
// the Function's own, in a backward within I (a reentrant checkpoint) that of the inner graph, in W
// a proxy of it. So there is nothing to switch on and off, and nothing that two microbatches,
// models or threads could mix up.
//
// Ownership: the task owns the callable and its arguments, and lets go of them as soon as the
// callable has returned. What it returned is the task's until its weights have it, so that a W that
// is repeated after an error does not call it again.
#pragma once

#include "shim/group/group.h"

namespace zbp {

/// Runs, if it has not run, each work that contributes to face number `face`; `retain`: it can be
/// run again. Called without the GIL. Throws what the callable raises; then that work has not run.
void run_works_for(const Group& group, Task& task, size_t face, bool retain);

void make_ready_again(Work& work);

/// What I has kept and work has computed for face number `face` of a whole task; of a root, its
/// gradient.
at::Tensor given_grad(const Task& task, size_t face);

/// Where that is, if it is in one place; else null, as for tasks of other kinds.
Kept* only_kept_grad(Task& task, size_t face);

}  // namespace zbp
