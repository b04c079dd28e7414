/* zbp_raise.h - where the shim's exceptions become Python's. */
#ifndef ZBP_RAISE_H
#define ZBP_RAISE_H

#include <Python.h>

#include "shim/torch/zbp_error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sets the Python error for what a function of the shim left in *error, which is cleared; nothing there: MemoryError,
 * for even the exception had no room. With the GIL. Always NULL. */
PyObject *zbp_error_raise(zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
