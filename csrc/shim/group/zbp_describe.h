/* zbp_describe.h - a parameter group from outside: its end, and what W will do and read.
 * Conventions: zbp_input.h. Nothing is unpacked. What is returned keeps nothing but the weights.
 */
#pragma once

#include <Python.h>

#include "core/pass/zbp_book.h"
#include "shim/torch/zbp_error.h"

ZBP_BEGIN_C

void zbp_group_free(zbp_group *group); /* NULL is legal; frees all that W would have needed */

/* For the collector: visits the Python objects that were handed over or stay packed and that the
 * group alone holds; and makes the group one whose weight pass has run: no task is left, nor what
 * one held. Run no Python code before the group lets go. */
int zbp_group_traverse(const zbp_group *group, visitproc visit, void *arg);
void zbp_group_clear(zbp_group *group);

/* New int: bytes of the tensors held for W, each storage once; 0 while W runs. */
PyObject *zbp_group_bytes_held(zbp_group *group, zbp_error *error);

/* New tuple of the group's leaf tensors, none of a spent one. Refused while its W runs, as is the
 * next one. */
PyObject *zbp_group_weights(zbp_group *group, zbp_error *error);

/* New tuple (weights, hops, tasks), without any of the group's tensors but the weights: a tuple of
 * these; the layout's hops, a list of tuples (outside, to_weight, to_outside); and a list with a
 * tuple (name, kind, why, is_packed, faces, tensors) per task. A spent group has no task.
 *
 * name: its node's; None for "waiting". kind: a ZBP_TASK_*; -1 for a whole node whose Function has
 * left work to W; "outside" for a node between the tasks and the weights, which W runs and which
 * has saved something; "waiting" for a weight to which a W that raised could not add its gradient.
 * why: it is of that kind, a ZBP_WHY_*, or None. is_packed: W unpacks something for it.
 *
 * faces: a list of (slot, shape, obstacle, end). slot: the node's edge. shape: of the gradient
 * there, a tuple, -1 where a size is not known as a number; () for a nested one. obstacle: what
 * makes W run the engine from there to the weights, None if nothing does. end: where it leads, a
 * pair (weight, outside) as in zbp_face.
 *
 * tensors: those that W will read, a list of (role, storage, bytes, shape, dtype, device, ends).
 * role: "matrix", "output gradient", "light gradient" (of a vector, computed in I), "kept gradient"
 * (of a matrix, likewise), "saved" (by the node, or what work was given) or "waiting gradient".
 * storage: an int, the same for tensors that share memory, 0 where there is none; bytes: of the
 * whole storage. ends: from which its weights are found, a list. What lies behind hooks is not
 * among them, which nobody can see without running them, nor what an outside node has saved while a
 * thread runs it, which may be another microbatch's too. */
PyObject *zbp_group_describe(zbp_group *group, zbp_error *error);

/* New bool: True if the group's W may read weights themselves, or what has their memory, beside
 * what it holds: it runs nodes again, or ones between its tasks and the weights, or unpacks what
 * was saved. False otherwise, and for a spent group. */
PyObject *zbp_group_reads_weights(zbp_group *group, zbp_error *error);

/* New bool: True if hooks watch the accumulation of `tensor`: its own, its accumulator's, as those
 * of DDP. */
PyObject *zbp_is_watched(PyObject *tensor, zbp_error *error);

ZBP_END_C
