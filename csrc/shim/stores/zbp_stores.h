/* zbp_stores.h - what zbpipe/stores.py needs of the graph. Conventions: zbp_shim.h. */
#ifndef ZBP_STORES_H
#define ZBP_STORES_H

#include <Python.h>

#include "core/base/zbp_status.h"
#include "shim/torch/zbp_error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Gives `tensor` an edge that leads to the gradient edge of `like`, without a new version: what is computed from it
 * from here on, in place too, has the node of `like` behind it; a leaf stays a leaf. Both are tensors, of the same
 * shape, dtype and device, and `like` has a grad_fn. New capsule for zbp_end_detour(), which holds the tensor and
 * both edges and must live until then; NULL: TypeError or ValueError, and nothing has changed. */
PyObject *zbp_detour(PyObject *tensor, PyObject *like, zbp_error *error);

/* Gives the tensor its edge back, with the hooks that it got meanwhile, if it still has the other one, that is if it
 * was not computed in place. *out: 1 if so. A second time it does nothing, *out: 0. */
ZBP_MUST_USE int zbp_end_detour(PyObject *detour, int *out, zbp_error *error);

/* New list of the weights of the parameter group for which I runs the Function that calls this; empty where none
 * does. */
PyObject *zbp_weights_here(zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
