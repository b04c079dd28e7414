/* zbp_error.h - what a function of the shim has raised. */
#pragma once

#include "core/base/zbp_c.h"

ZBP_BEGIN_C

typedef struct _object PyObject; /* Python.h has it, which tests without Python do not include */

/* An exception on its way to where it becomes Python's, which is the bindings; so that what runs
 * without the GIL, and C that knows no Python, can raise too. Held by the caller; zeroed is none.
 * What it keeps is freed by zbp_error_clear or zbp_error_raise. The first exception stays. */
typedef struct zbp_error {
    void *raised;
} zbp_error;

void zbp_error_clear(zbp_error *error);

/* Sets the Python error for what a function of the shim left in *error, which is cleared; nothing
 * there: MemoryError, for even the exception had no room. With the GIL. Always NULL. */
PyObject *zbp_error_raise(zbp_error *error);

ZBP_END_C
