/* parts.h - the parts of the extension module, each in a file of its own.
 *
 * What a part offers is a table of functions; or zbp_add_*(module) adds it to the module, and
 * returns 0, or -1 with a Python error set.
 */
#pragma once

#include <Python.h>

#include "shim/input/zbp_input.h"

/* What a function of the shim returned, or NULL with what it raised as the Python error. */
static inline PyObject *zbp_or_raise(PyObject *object, zbp_error *error)
{
    return object != NULL ? object : zbp_error_raise(error);
}

int zbp_add_holders(PyObject *module);
int zbp_add_memory(PyObject *module);

extern PyMethodDef zbp_leaks_functions[], zbp_passes_functions[], zbp_release_functions[];

/* Calls of I and W that have raised, and that have begun and not ended, of all threads and of this
 * one. Written and read with the GIL. */
extern size_t zbp_failures, zbp_running;
extern _Thread_local size_t zbp_running_here;

/* Adds the type ParamGroup. New reference, or NULL with an error set. */
PyTypeObject *zbp_add_group(PyObject *module);

/* A new ParamGroup, of that type: a zbp_wrap. Steals group; frees it on an error. */
PyObject *zbp_group_wrap(void *group_type, zbp_group *group);

/* The group in a ParamGroup; to_run: for its W. Precondition: object is one. Borrowed from it. */
zbp_group *zbp_group_in(PyObject *object, bool to_run);

/* zbpipe._C's state: the type ParamGroup, which it owns. */
static inline PyTypeObject **zbp_group_type(PyObject *module)
{
    return (PyTypeObject **)PyModule_GetState(module);
}
