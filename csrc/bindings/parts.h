/* parts.h - the parts of the extension module, each in a file of its own.
 *
 * Each zbp_add_*(module) adds what its part offers to the module. Returns 0, or -1 with a Python error set.
 */
#ifndef ZBP_PARTS_H
#define ZBP_PARTS_H

#include <Python.h>

#include "shim/explain/zbp_account.h"
#include "shim/pass/zbp_shim.h"
#include "shim/torch/zbp_raise.h"

/* What a function of the shim returned, or NULL with what it raised as the Python error. */
static inline PyObject *zbp_or_raise(PyObject *object, zbp_error *error)
{
    return object != NULL ? object : zbp_error_raise(error);
}

/* Raises it. Always -1. */
static inline int zbp_fail(zbp_error *error)
{
    zbp_error_raise(error);
    return -1;
}

int zbp_add_explain(PyObject *module);
int zbp_add_holders(PyObject *module);
int zbp_add_leaks(PyObject *module);
int zbp_add_memory(PyObject *module);
int zbp_add_modules(PyObject *module);
int zbp_add_passes(PyObject *module);
int zbp_add_release(PyObject *module);
int zbp_add_storages(PyObject *module);
int zbp_add_stores(PyObject *module);
int zbp_add_work(PyObject *module);

/* A choice of a policy: a number up to `last`, or a function that returns one, which *function then is (borrowed; else
 * NULL). Returns 0, or -1 with an error set. */
int zbp_parse_choice(PyObject *value, const char *name, int last, int *number, PyObject **function);

/* Appends value, which it steals and which may be NULL with an error set. Returns 0, or -1 with an error set. */
int zbp_append_new(PyObject *list, PyObject *value);

/* New tuple of ints; new list of those of `weights`, a tuple. NULL with an error set. */
PyObject *zbp_wrap_shape(zbp_shape shape);
PyObject *zbp_pick(PyObject *weights, zbp_places places);

/* New list with a tuple (node, kind, tensors) per task: zbp_group_account()'s words, node None where it has none;
 * tensors: list of tuples (role, storage, bytes, shape, dtype, device, weights), storage an int, 0 where there is
 * none, weights a list of leaf tensors. NULL with an error set. */
PyObject *zbp_account_wrap(const zbp_group *group);

/* Adds the type ParamGroup. New reference, or NULL with an error set. */
PyTypeObject *zbp_add_group(PyObject *module);

/* A new ParamGroup. Steals group; frees it on an error. */
PyObject *zbp_group_wrap(PyTypeObject *type, zbp_group *group);

/* The group in a ParamGroup. Precondition: object is one. Borrowed from it. */
const zbp_group *zbp_group_in(PyObject *object);
zbp_group *zbp_group_of(PyObject *object); /* to run or change it */

/* Of zbpipe._C; both are owned by it. */
typedef struct zbp_module_state {
    PyTypeObject *group_type;
    PyObject *run_error;
} zbp_module_state;

zbp_module_state *zbp_state_of(PyObject *module);

/* The type ParamGroup of zbpipe._C, borrowed. Cannot fail. */
PyTypeObject *zbp_group_type(PyObject *module);

/* What a backward that failed raises. Borrowed. Cannot fail. */
PyObject *zbp_run_error(PyObject *module);

#endif
