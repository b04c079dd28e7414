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

/* Takes from each leaf of `tensors` (a seq of tensors; others in it are left alone) its gradient and the hooks of its
 * accumulation: its own, and those of its accumulator, as DDP's. The tensors and accumulators stay the same objects,
 * and graphs that lead to them stay valid. The caller owns the result and gives it to zbp_put_back(); until then no
 * other thread may use the tensors. NULL, and nothing taken: TypeError for what is no tensor,
 * MemoryError. */
ZBP_MUST_USE zbp_aside *zbp_set_aside(PyObject *tensors, zbp_error *error);

/* Gives all of it back, in place of gradients and hooks that the tensors got meanwhile, and frees `aside`. NULL is
 * allowed. GIL held; what is dropped may run Python code, with a Python error saved and restored by the caller. */
void zbp_put_back(zbp_aside *aside);

#ifdef __cplusplus
}
#endif

#endif
