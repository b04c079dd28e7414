/* zbp_account.h - what a parameter group holds, one weight task at a time. Conventions: zbp_shim.h. */
#ifndef ZBP_ACCOUNT_H
#define ZBP_ACCOUNT_H

#include <Python.h>

#include "shim/pass/zbp_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* New list with a tuple per weight task:
 *
 *     (node, kind, tensors)
 *
 * node: the name of its autograd node, None if I let go of it. kind: "product", "deferred", "whole"
 * or "root"; "handed over" for a whole node whose Function has left work to W; "waiting" for a weight to which a W that raised could not add its gradient. tensors:
 * list with a tuple per tensor that W will read:
 *
 *     (role, storage, bytes, shape, dtype, device, weights)
 *
 * role: "matrix", "output gradient", "light gradient" (of a vector, computed in I), "kept gradient"
 * (of a matrix, likewise), "saved" (by the node, or
 * what work was given) or "waiting gradient". storage: an int, the same for
 * tensors that share memory, 0 for one without a storage; bytes: of the whole storage. weights: list
 * of the leaf tensors whose gradients are computed from it, each once.
 *
 * A spent group gives an empty list. The tensors themselves are not in it: nothing is unpacked, and
 * nothing but the weights is kept alive. NULL with RuntimeError set while the group's W runs. */
PyObject *zbp_group_account(const zbp_group *group);

/* *out: 1 if the group's W may read weights themselves, or what has their memory, beside what it holds: it runs nodes
 * again, or ones between its tasks and the weights, or unpacks what was saved. 0 otherwise, and for a spent group.
 * Called with the GIL held and no W of the group running. */
ZBP_MUST_USE int zbp_group_reads_weights(const zbp_group *group, int *out);

#ifdef __cplusplus
}
#endif

#endif
