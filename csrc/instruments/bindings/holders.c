/* holders.c - what a search in Python for holders needs of libtorch: see Note [Handles]. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "instruments/shim/zbp_holders.h"

PyDoc_STRVAR(
    handle_of_doc,
    "handle_of(object, /)\n--\n\n"
    "The handle of the tensor, storage or node that an object stands for; None for others.");

static PyObject *handle_of(PyObject *Py_UNUSED(module), PyObject *object)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_handle_of(object, &error), &error);
}

PyDoc_STRVAR(
    references_of_doc,
    "references_of(thing, /)\n--\n\n"
    "What is held natively by a handle's thing, a ParamGroup, a saved tensor or a DLPack\n"
    "capsule: list of (handle, object or None, label or None, is_native). None for what could\n"
    "not be looked at; then the label says what that is.");

static PyObject *references_of(PyObject *module, PyObject *thing)
{
    const bool is_group = Py_IS_TYPE(thing, zbp_group_type(module));
    zbp_error error = {0};

    return zbp_or_raise(zbp_references_of(thing, is_group ? zbp_group_in(thing) : NULL,
                                          zbp_passes_run_elsewhere(), &error),
                        &error);
}

PyDoc_STRVAR(watch_storages_doc, "watch_storages(handles, /)\n--\n\n"
                                 "The storages among the handles, referred to weakly.");

static PyObject *watch_storages(PyObject *Py_UNUSED(module), PyObject *handles)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_watch_storages(handles, &error), &error);
}

PyDoc_STRVAR(storages_gone_doc, "storages_gone(watched, /)\n--\n\n"
                                "The identities of those that have been freed since, as a set.");

static PyObject *storages_gone(PyObject *Py_UNUSED(module), PyObject *watched)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_storages_gone(watched, &error), &error);
}

PyDoc_STRVAR(storage_spans_doc,
             "storage_spans(watched, /)\n--\n\n"
             "List of (device, address, bytes, identity) of those that still live.");

static PyObject *storage_spans(PyObject *Py_UNUSED(module), PyObject *watched)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_storage_spans(watched, &error), &error);
}

PyDoc_STRVAR(storages_of_doc, "storages_of(tensors, /)\n--\n\n"
                              "The identities of the tensors' storages, as a set of ints.");

static PyObject *storages_of(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_storages_of(tensors, &error), &error);
}

PyDoc_STRVAR(addresses_of_doc, "addresses_of(tensors, /)\n--\n\n"
                               "The addresses of the tensors' memory, as a set of ints.");

static PyObject *addresses_of(PyObject *Py_UNUSED(module), PyObject *tensors)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_addresses_of(tensors, &error), &error);
}

static PyMethodDef holders_methods[] = {
    {"handle_of", handle_of, METH_O, handle_of_doc},
    {"references_of", references_of, METH_O, references_of_doc},
    {"watch_storages", watch_storages, METH_O, watch_storages_doc},
    {"storages_gone", storages_gone, METH_O, storages_gone_doc},
    {"storage_spans", storage_spans, METH_O, storage_spans_doc},
    {"storages_of", storages_of, METH_O, storages_of_doc},
    {"addresses_of", addresses_of, METH_O, addresses_of_doc},
    {NULL, NULL, 0, NULL}};

int zbp_add_holders(PyObject *module)
{
    return zbp_add_handle(module) < 0 ? -1 : PyModule_AddFunctions(module, holders_methods);
}
