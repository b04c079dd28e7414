/* account.c - what a parameter group holds, as a list: see zbpipe/memory/_held.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "shim/explain/zbp_account.h"

int zbp_append_new(PyObject *list, PyObject *value)
{
    int status = -1;

    if (value != NULL) {
        status = PyList_Append(list, value);
        Py_DECREF(value);
    }
    return status;
}

PyObject *zbp_wrap_shape(zbp_shape shape)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)shape.dims);

    for (size_t i = 0; tuple != NULL && i < shape.dims; ++i) {
        PyObject *size = PyLong_FromLongLong(shape.size[i]);
        if (size == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, (Py_ssize_t)i, size);
        }
    }
    return tuple;
}

PyObject *zbp_pick(PyObject *weights, zbp_places places)
{
    PyObject *list = PyList_New((Py_ssize_t)places.count);

    for (size_t i = 0; list != NULL && i < places.count; ++i) {
        PyObject *weight = PyTuple_GET_ITEM(weights, (Py_ssize_t)places.place[i]);
        PyList_SET_ITEM(list, (Py_ssize_t)i, Py_NewRef(weight));
    }
    return list;
}

/* The tasks so far: tuples of (node, kind, tensors). */
typedef struct account {
    PyObject *tasks;
    PyObject *weights; /* the group's, borrowed */
} account;

static int begin_group(void *arg, PyObject *weights)
{
    ((account *)arg)->weights = weights;
    return 0;
}

static int add_task(void *arg, const char *node, const char *kind)
{
    return zbp_append_new(((account *)arg)->tasks, Py_BuildValue("zsN", node, kind, PyList_New(0)));
}

/* (role, storage, bytes, shape, dtype, device, weights), to the last task. */
static int add_tensor(void *arg, const zbp_account_tensor *tensor)
{
    const account *self = arg;
    PyObject *task = PyList_GET_ITEM(self->tasks, PyList_GET_SIZE(self->tasks) - 1);

    return zbp_append_new(
        PyTuple_GET_ITEM(task, 2),
        Py_BuildValue("sNnNOON", tensor->role, PyLong_FromVoidPtr((void *)tensor->storage),
                      (Py_ssize_t)tensor->bytes, zbp_wrap_shape(tensor->shape), tensor->dtype,
                      tensor->device, zbp_pick(self->weights, tensor->weights)));
}

PyObject *zbp_account_wrap(const zbp_group *group)
{
    account self = {PyList_New(0), NULL};
    const zbp_account_visitor visitor = {&self, begin_group, add_task, add_tensor};
    zbp_error error = {0};

    if (self.tasks != NULL && zbp_group_account(group, &visitor, &error) != ZBP_OK) {
        Py_CLEAR(self.tasks);
        zbp_error_raise(&error);
    }
    return self.tasks;
}
