/* holders.c - what a search in Python for holders needs of libtorch: see Note [Handles]. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "instruments/shim/zbp_holders.h"

PyDoc_STRVAR(
    references_of_doc,
    "references_of(thing, /)\n--\n\n"
    "What is held natively by a handle's thing, a ParamGroup, a saved tensor or a DLPack\n"
    "capsule: list of (handle, object or None, label or None, is_native). None for what could\n"
    "not be looked at; then the label says what that is.");

static PyObject *references_of(PyObject *module, PyObject *thing)
{
    const bool is_group = Py_IS_TYPE(thing, *zbp_group_type(module));
    zbp_error error = {0};

    return zbp_or_raise(zbp_references_of(thing, is_group ? zbp_group_in(thing, false) : NULL,
                                          zbp_running != zbp_running_here, &error),
                        &error);
}

static PyMethodDef holders_methods[] = {{"references_of", references_of, METH_O, references_of_doc},
                                        {NULL, NULL, 0, NULL}};

int zbp_add_holders(PyObject *module)
{
    return zbp_add_handle(module) < 0 || zbp_add_storages(module) < 0
               ? -1
               : PyModule_AddFunctions(module, holders_methods);
}
