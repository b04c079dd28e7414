/* zbp_release.h - what the release helpers (zbpipe/release.py) cannot have from Python.
 *
 * Conventions as in zbp_input.h. With the GIL held; tensors are borrowed. What has no storage is
 * refused with a TypeError.
 */
#pragma once

#include <Python.h>

#include "core/base/zbp_c.h"
#include "shim/torch/zbp_error.h"

ZBP_BEGIN_C

/* New int: the bytes of the tensor's storage; 0 if they are not torch's alone to free (lent by
 * numpy, DLPack or another process, or shared by lazy clones); -1 if it has given up its memory. */
PyObject *zbp_own_bytes(PyObject *tensor, zbp_error *error);

/* New tensor with the sizes, dtype, memory and version counter of `values`, and with the gradient
 * edge of `place`, which is a tensor, or None for none. why: NULL; or the twin has no memory, and
 * the .grad of `place`. Its storage says that it has as many bytes as that of `values`; reading it
 * raises a RuntimeError of these words (UTF-8, copied). */
PyObject *zbp_twin(PyObject *values, PyObject *place, const char *why, zbp_error *error);

ZBP_END_C
