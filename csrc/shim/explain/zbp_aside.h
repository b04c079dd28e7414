/* zbp_aside.h - leaf tensors without what watches them, for the time of a trial. Conventions: zbp_shim.h. */
#ifndef ZBP_ASIDE_H
#define ZBP_ASIDE_H

#include <Python.h>

#include "shim/torch/zbp_error.h"

#include "shim/pass/zbp_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zbp_aside zbp_aside;

ZBP_MUST_USE int zbp_aside_new(zbp_aside **aside_out, zbp_error *error);
/* Adds a tensor; one that is no leaf is passed over. */
ZBP_MUST_USE int zbp_aside_add(zbp_aside *aside, PyObject *tensor, zbp_error *error);

/* Takes from each of its leaves the gradient and the hooks of its accumulation: its own, and those of its accumulator,
 * as DDP's. The tensors and accumulators stay the same objects, and graphs that lead to them stay valid. The caller
 * gives it to zbp_put_back(); until then no other thread may use the tensors. Cannot fail. */
void zbp_set_aside(zbp_aside *aside);

/* Gives back what was taken, in place of gradients and hooks that the tensors got meanwhile, and frees `aside`. NULL is
 * allowed. GIL held; what is dropped may run Python code, with a Python error saved and restored by the caller. */
void zbp_put_back(zbp_aside *aside);

#ifdef __cplusplus
}
#endif

#endif
