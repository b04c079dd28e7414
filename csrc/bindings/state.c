/* state.c - what the parts of the module share: its state, and an argument that several take. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"

zbp_module_state *zbp_state_of(PyObject *module)
{
    return (zbp_module_state *)PyModule_GetState(module);
}

PyTypeObject *zbp_group_type(PyObject *module)
{
    return zbp_state_of(module)->group_type;
}

PyObject *zbp_run_error(PyObject *module)
{
    return zbp_state_of(module)->run_error;
}

/* One of the numbers 0 to `last`, or a function that returns one. Returns -1 with an error set. */
int zbp_parse_choice(PyObject *value, const char *name, int last, int *number, PyObject **function)
{
    *function = PyCallable_Check(value) ? value : NULL;
    *number = 0;
    if (*function != NULL) {
        return 0;
    }
    const long given = PyLong_AsLong(value);
    if (given == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (given < 0 || given > last) {
        PyErr_Format(PyExc_ValueError, "%s is %ld; expected 0 to %d or a function", name, given,
                     last);
        return -1;
    }
    *number = (int)given;
    return 0;
}
