/* release.c - what zbpipe/release.py needs of libtorch. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "shim/release/zbp_release.h"

PyDoc_STRVAR(
    own_bytes_doc,
    "own_bytes(tensor, /)\n--\n\n"
    "The bytes of its storage; 0 if torch alone cannot free them, -1 if they were given up.");

static PyObject *own_bytes(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_own_bytes(tensor, &error), &error);
}

PyDoc_STRVAR(
    twin_doc,
    "twin(values, place, why, /)\n--\n\n"
    "A tensor with the sizes and memory of values, at place's place in the graph. With why,\n"
    "a text, it has no memory and place's .grad, and reading it raises a RuntimeError.");

static PyObject *twin(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *values, *place;
    const char *why;
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "OOz:twin", &values, &place, &why)) {
        return NULL;
    }
    return zbp_or_raise(zbp_twin(values, place, why, &error), &error);
}

PyMethodDef zbp_release_functions[] = {{"own_bytes", own_bytes, METH_O, own_bytes_doc},
                                       {"twin", twin, METH_VARARGS, twin_doc},
                                       {NULL, NULL, 0, NULL}};
