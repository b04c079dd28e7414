/* zbp_input.h - the input pass (I): one call of it from its arguments to its end.
 *
 * The shim decides nothing of what runs, what is cut, what becomes of a node: that stands in a plan
 * and a split (zbp_plan.h, zbp_split.h), and the shim makes it true.
 *
 * Conventions, also of the shim's other headers. Functions return a status. Unless it is ZBP_OK,
 * *error has what was raised (zbp_error.h), and outputs are not to be used. Functions that return
 * an object return NULL then. A function that has done all its work still raises where its warning
 * is an error. No C++ exception leaves a function. All are called with the GIL held. "new" is a new
 * reference, to be released by the caller; arguments are borrowed.
 */
#pragma once

#include <stdbool.h>

#include "core/base/zbp_c.h"
#include "core/pass/zbp_book.h"
#include "core/pass/zbp_kind.h"
#include "shim/torch/zbp_error.h"

ZBP_BEGIN_C

/* The arguments of I, tuples or None where it says so, borrowed.
 *
 * outputs:  tensors, GradientEdges, None. The backward starts from those that take a gradient.
 * grads:    per output a tensor, None, or False for one that is only detached; None: ones for all.
 * inputs:   anything; a tensor that requires a gradient gets one.
 * weights:  leaf tensors; None: every leaf that accumulates.
 * excluded: tensors whose gradients I computes, if they are weights. */
typedef struct zbp_input_args {
    zbp_policy policy;
    PyObject *outputs, *grads, *inputs, *weights, *excluded;
} zbp_input_args;

/* Makes a Python object of a group, which it steals. NULL with a Python error set. */
typedef PyObject *(*zbp_wrap)(void *arg, zbp_group *group);

/* Checks and converts the arguments, then runs I. New tuple (dinputs, groups): a gradient
 * or None per input, a list. The inputs' .grad is set or added to.
 *
 * *has_begun_out: false where the arguments were refused, and nothing was touched. After an error
 * in I the graph has its edges back, no gradient of an input was set, and what ran has released its
 * saved tensors, as after a failed ordinary backward. But a hook that sees the accumulation of an
 * input may raise: then the graph is consumed, and the inputs before have their gradients. */
ZBP_MUST_USE PyObject *zbp_input_call(const zbp_input_args *args, zbp_wrap wrap, void *arg,
                                      bool *has_begun_out, zbp_error *error);

/* New None: from now on no node of a type, a str, is split, or a plain step. */
PyObject *zbp_distrust(PyObject *node_type, zbp_error *error);

/* ---- what a Python autograd.Function's backward hands over in I, for W */

/* Hands over function(*saved), which returns the gradients for `weights`; or calls it at once,
 * where no I runs the Function that calls this, or where I computes these gradients.
 *
 * function: callable; or None, to ask: then a bool, True if work would be handed over here.
 * weights:  tuple of ints, the positions of the weights among the arguments of the running
 *           Function's forward; or None for all its weights, then the callable returns None.
 * saved:    tuple of anything; tensors in it are held as the tasks' other tensors are.
 *
 * New reference: a tuple with a gradient or None per position, None for what was handed over and
 * for what nobody wants. Errors: ValueError (a position is none, nothing was called), or what the
 * callable raised. */
PyObject *zbp_defer(PyObject *function, PyObject *weights, PyObject *saved, zbp_error *error);

ZBP_END_C
