/* zbp_work.h - what a Python autograd.Function's backward hands over in I, for W. Conventions: zbp_input.h. */
#ifndef ZBP_WORK_H
#define ZBP_WORK_H

#include <Python.h>

#include "core/base/zbp_status.h"
#include "shim/pass/zbp_input.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Hands over function(*saved), which returns the gradients for `weights`; or calls it at once, where
 * no I runs the Function that calls this, or where I computes these gradients.
 *
 * function: callable.
 * weights:  tuple of ints, the positions of the weights among the arguments of the running Function's
 *           forward; or None for all its weights, then the callable returns None.
 * saved:    tuple of anything; tensors in it are held as the tasks' other tensors are.
 *
 * New reference: a tuple with a gradient or None per position, None for what was handed over and for
 * what nobody wants. Errors: ValueError (a position is none, nothing was called), or what the callable
 * raised. */
PyObject *zbp_defer(PyObject *function, PyObject *weights, PyObject *saved, zbp_error *error);

/* *out: 1 if zbp_defer() would hand over work for `weights` here; 0 if it would call it at once, or not
 * at all. */
ZBP_MUST_USE int zbp_will_defer(PyObject *weights, int *out, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
