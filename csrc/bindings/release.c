/* release.c - the release helpers: see zbpipe/release.py for what they are for. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "shim/release/zbp_release.h"

PyDoc_STRVAR(deallocate_output_doc,
             "deallocate_output(tensor, why, /)\n--\n\n"
             "The bytes that this freed. Reading the tensor raises a RuntimeError that says why.\n"
             "See zbpipe.deallocate_output.");

static PyObject *deallocate_output(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensor;
    const char *why;
    zbp_error error = {0};
    size_t freed = 0;

    if (!PyArg_ParseTuple(args, "Os:deallocate_output", &tensor, &why)) {
        return NULL;
    }
    return zbp_deallocate_output(tensor, why, &freed, &error) == ZBP_OK ? PyLong_FromSize_t(freed)
                                                                        : zbp_error_raise(&error);
}

PyDoc_STRVAR(make_viewless_doc, "make_viewless(tensor, /)\n--\n\nSee zbpipe.make_viewless.");

static PyObject *make_viewless(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_make_viewless(tensor, &error), &error);
}

PyDoc_STRVAR(
    release_storage_doc,
    "release_storage(tensor, why, /)\n--\n\n"
    "(released, bytes, holders of the storage besides the tensor, whether a Python storage\n"
    "is among them, holders of the tensor besides its Python object). See\n"
    "zbpipe.release_storage.");

static PyObject *release_storage(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensor;
    const char *why;
    zbp_other_holders holders = {0, 0, 0, 0};
    zbp_error error = {0};
    int released = 0;

    if (!PyArg_ParseTuple(args, "Os:release_storage", &tensor, &why)) {
        return NULL;
    }
    if (zbp_release_storage(tensor, why, &holders, &released, &error) != ZBP_OK) {
        return zbp_error_raise(&error);
    }
    return Py_BuildValue("(NnnNn)", PyBool_FromLong(released), (Py_ssize_t)holders.bytes,
                         (Py_ssize_t)holders.storage, PyBool_FromLong(holders.python_storage),
                         (Py_ssize_t)holders.tensor);
}

PyDoc_STRVAR(find_hold_doc,
             "find_hold(tensor, other, /)\n--\n\n"
             "How other holds the memory of tensor: HOLDS_* bits, 0 for not at all.");

static PyObject *find_hold(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensor, *other;
    zbp_error error = {0};
    int hold = 0;

    if (!PyArg_ParseTuple(args, "OO:find_hold", &tensor, &other)) {
        return NULL;
    }
    return zbp_find_hold(tensor, other, &hold, &error) == ZBP_OK ? PyLong_FromLong(hold)
                                                                 : zbp_error_raise(&error);
}

static PyMethodDef release_methods[] = {
    {"deallocate_output", deallocate_output, METH_VARARGS, deallocate_output_doc},
    {"make_viewless", make_viewless, METH_O, make_viewless_doc},
    {"release_storage", release_storage, METH_VARARGS, release_storage_doc},
    {"find_hold", find_hold, METH_VARARGS, find_hold_doc},
    {NULL, NULL, 0, NULL}};

int zbp_add_release(PyObject *module)
{
    if (PyModule_AddFunctions(module, release_methods) < 0 ||
        PyModule_AddIntConstant(module, "HOLDS_STORAGE", ZBP_HOLDS_STORAGE) < 0 ||
        PyModule_AddIntConstant(module, "HOLDS_TENSOR", ZBP_HOLDS_TENSOR) < 0 ||
        PyModule_AddIntConstant(module, "HOLDS_AS_BASE", ZBP_HOLDS_AS_BASE) < 0) {
        return -1;
    }
    return PyModule_AddIntConstant(module, "HOLDS_UNKNOWN", ZBP_HOLDS_UNKNOWN);
}
