/* work.c - what Functions hand over in I: see zbpipe/_kernels/defer.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"

PyDoc_STRVAR(defer_doc, "defer(function, weights, saved, /)\n--\n\n"
                        "As zbpipe.defer; weights are a tuple or None, and a tuple is returned.");

static PyObject *defer(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *function, *weights, *saved;
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "OOO!:defer", &function, &weights, &PyTuple_Type, &saved)) {
        return NULL;
    }
    return zbp_or_raise(zbp_defer(function, weights, saved, &error), &error);
}

PyDoc_STRVAR(will_defer_doc,
             "will_defer(weights, /)\n--\n\n"
             "True if defer() with these weights, called here, would hand the work over.");

static PyObject *will_defer(PyObject *Py_UNUSED(module), PyObject *weights)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_will_defer(weights, &error), &error);
}

PyMethodDef zbp_work_functions[] = {{"defer", defer, METH_VARARGS, defer_doc},
                                    {"will_defer", will_defer, METH_O, will_defer_doc},
                                    {NULL, NULL, 0, NULL}};
