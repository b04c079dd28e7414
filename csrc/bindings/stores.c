/* stores.c - what zbpipe/stores.py needs of the graph. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "shim/stores/zbp_stores.h"

PyDoc_STRVAR(detour_doc,
             "detour(tensor, like, /)\n--\n\n"
             "Gives `tensor` the gradient edge of `like`. Returns what end_detour() takes.");

static PyObject *detour(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensor, *like;
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "OO:detour", &tensor, &like)) {
        return NULL;
    }
    return zbp_or_raise(zbp_detour(tensor, like, &error), &error);
}

PyDoc_STRVAR(end_detour_doc,
             "end_detour(detour, /)\n--\n\n"
             "Gives the tensor its edge back, unless it was computed in place. True if it did.");

static PyObject *end_detour(PyObject *Py_UNUSED(module), PyObject *object)
{
    zbp_error error = {0};
    int is_back = 0;
    return zbp_end_detour(object, &is_back, &error) == ZBP_OK ? PyBool_FromLong(is_back)
                                                              : zbp_error_raise(&error);
}

PyDoc_STRVAR(weights_here_doc,
             "weights_here()\n--\n\n"
             "The weights of the group for which an input pass runs the Function that calls this.");

static PyObject *weights_here(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_weights_here(&error), &error);
}

static PyMethodDef stores_methods[] = {
    {"detour", detour, METH_VARARGS, detour_doc},
    {"end_detour", end_detour, METH_O, end_detour_doc},
    {"weights_here", weights_here, METH_NOARGS, weights_here_doc},
    {NULL, NULL, 0, NULL}};

int zbp_add_stores(PyObject *module)
{
    return PyModule_AddFunctions(module, stores_methods);
}
