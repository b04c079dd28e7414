/* leaks.c - what zbpipe.leaks needs of the process: the storages of a moment, who holds a storage, the
 * variables of a running frame. The search is the shim's (zbp_holders.h).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030C0000
/* Python 3.11 alone has neither the frame's layout nor PyFrame_GetVar(). Its f_locals would keep what it
 * finds alive for as long as the frame. */
#define Py_BUILD_CORE
#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#else
#include <frameobject.h>
#endif

#include "bindings/parts.h"
#include "shim/holders/zbp_holders.h"
#include "shim/memory/zbp_tap.h"

static zbp_group_access access_of(PyObject *module)
{
    return (zbp_group_access){zbp_group_type(module), zbp_group_in};
}

static int check_roots(PyObject *roots)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(roots); ++i) {
        PyObject *root = PyList_GET_ITEM(roots, i);
        if (!PyTuple_Check(root) || PyTuple_GET_SIZE(root) != 2 ||
            (PyTuple_GET_ITEM(root, 1) != Py_None && !PyList_Check(PyTuple_GET_ITEM(root, 1)))) {
            PyErr_Format(PyExc_TypeError,
                         "roots[%zd] is %R; expected an object with a list or None", i, root);
            return -1;
        }
    }
    return 0;
}

/* Storages of a moment ----------------------------------------------------------------------------- */

static const char *const capsule_name = "zbpipe.storages";

static void free_capsule(PyObject *capsule)
{
    zbp_storages_free((zbp_storages *)PyCapsule_GetPointer(capsule, capsule_name));
}

PyDoc_STRVAR(storages_now_doc,
             "storages_now(roots, /)\n--\n\n"
             "The storages of all living tensors, as something for search_holders(). roots: as\n"
             "there, or empty unless something is frozen.");

static PyObject *storages_now(PyObject *module, PyObject *args)
{
    PyObject *roots;
    zbp_storages *storages = NULL;
    PyObject *capsule;
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "O!:storages_now", &PyList_Type, &roots) ||
        check_roots(roots) < 0) {
        return NULL;
    }
    if (zbp_storages_new(access_of(module), roots, &storages, &error) != ZBP_OK) {
        return zbp_error_raise(&error);
    }
    capsule = PyCapsule_New(storages, capsule_name, free_capsule);
    if (capsule == NULL) {
        zbp_storages_free(storages);
    }
    return capsule;
}

PyDoc_STRVAR(storages_since_doc,
             "storages_since(roots, older, /)\n--\n\n"
             "How many storages of living tensors there are now that were not in what\n"
             "storages_now() returned.");

static PyObject *storages_since(PyObject *module, PyObject *args)
{
    PyObject *roots, *capsule;
    zbp_storages *older;
    size_t count = 0;
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "O!O:storages_since", &PyList_Type, &roots, &capsule) ||
        check_roots(roots) < 0) {
        return NULL;
    }
    older = (zbp_storages *)PyCapsule_GetPointer(capsule, capsule_name);
    if (older == NULL) {
        return NULL;
    }
    return zbp_storages_since(access_of(module), roots, older, &count, &error) == ZBP_OK
               ? PyLong_FromSize_t(count)
               : zbp_error_raise(&error);
}

PyDoc_STRVAR(storages_gone_doc, "storages_gone(storages, /)\n--\n\n"
                                "The identities of those that have been freed since, as a set.");

static PyObject *storages_gone(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    zbp_storages *storages = (zbp_storages *)PyCapsule_GetPointer(capsule, capsule_name);
    zbp_error error = {0};
    return storages != NULL ? zbp_or_raise(zbp_storages_gone(storages, &error), &error) : NULL;
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

/* The search --------------------------------------------------------------------------------------- */

PyDoc_STRVAR(search_holders_doc, "search_holders(roots, ignored, target, allowed, since, until, "
                                 "older, work, array, wraps, /)\n--\n\n"
                                 "Who holds the storages that were born between these serials, or "
                                 "the target's. See zbp_holders.h.");

static PyObject *search_holders(PyObject *module, PyObject *args)
{
    zbp_search search = {.groups = access_of(module), .call = args};
    PyObject *older, *work, *array;
    unsigned long long since, until;
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "O!O!OO!KKOOOp:search_holders", &PyList_Type, &search.roots,
                          &PyList_Type, &search.ignored, &search.target, &PySet_Type,
                          &search.allowed, &since, &until, &older, &work, &array, &search.wraps) ||
        check_roots(search.roots) < 0) {
        return NULL;
    }
    search.work = PyType_Check(work) ? (PyTypeObject *)work : NULL;
    search.array = PyType_Check(array) ? (PyTypeObject *)array : NULL;
    search.since = since;
    search.until = until;
    search.target = search.target == Py_None ? NULL : search.target;
    if (older != Py_None) {
        search.older = (const zbp_storages *)PyCapsule_GetPointer(older, capsule_name);
        if (search.older == NULL) {
            return NULL;
        }
    }
    return zbp_or_raise(zbp_search_holders(&search, &error), &error);
}

PyDoc_STRVAR(freed_with_doc,
             "freed_with(groups, /)\n--\n\n"
             "What would be freed if nobody held these ParamGroups. See zbp_holders.h.");

static PyObject *freed_with(PyObject *module, PyObject *groups)
{
    const zbp_group_access access = access_of(module);
    zbp_error error = {0};

    if (!PyTuple_Check(groups)) {
        return PyErr_Format(PyExc_TypeError, "freed_with() takes a tuple of groups, not a %s",
                            Py_TYPE(groups)->tp_name);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(groups); ++i) {
        if (!Py_IS_TYPE(PyTuple_GET_ITEM(groups, i), access.type)) {
            return PyErr_Format(PyExc_TypeError, "groups[%zd] is a %s; expected a ParamGroup", i,
                                Py_TYPE(PyTuple_GET_ITEM(groups, i))->tp_name);
        }
    }
    return zbp_or_raise(zbp_freed_with(access, groups, &error), &error);
}

PyDoc_STRVAR(next_serial_doc,
             "next_serial()\n--\n\n"
             "The serial of the next block of CPU memory, while something records.");

static PyObject *next_serial(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromUnsignedLongLong(zbp_tap_serial());
}

PyDoc_STRVAR(live_blocks_doc,
             "live_blocks(since, /)\n--\n\n"
             "The blocks of CPU memory in use from that serial on: list of (address, bytes,\n"
             "serial).");

/* Takes over the array. */
static PyObject *list_of_blocks(zbp_block *blocks, size_t count)
{
    const int collects = PyGC_Disable(); /* a block that it freed would be listed */
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; ++i) {
        PyObject *block = Py_BuildValue("(KKK)", (unsigned long long)blocks[i].address,
                                        (unsigned long long)blocks[i].bytes,
                                        (unsigned long long)blocks[i].serial);
        if (block == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, block);
        }
    }
    if (collects) {
        PyGC_Enable();
    }
    free(blocks);
    return list;
}

static PyObject *live_blocks(PyObject *Py_UNUSED(module), PyObject *since)
{
    const unsigned long long serial = PyLong_AsUnsignedLongLong(since);
    if (serial == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    zbp_block *blocks = NULL;
    size_t count = 0;
    if (zbp_tap_blocks(serial, &blocks, &count) != ZBP_OK) {
        return PyErr_NoMemory();
    }
    return list_of_blocks(blocks, count);
}

PyDoc_STRVAR(collection_begins_doc,
             "collection_begins()\n--\n\n"
             "List the blocks of CPU memory that this thread frees, until collection_ends().");

static PyObject *collection_begins(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    zbp_tap_collection_begins();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(collection_ends_doc,
             "collection_ends()\n--\n\nThe blocks: list of (address, bytes, serial).");

static PyObject *collection_ends(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    zbp_block *blocks = NULL;
    size_t count = 0;
    if (zbp_tap_collection_ends(&blocks, &count) != ZBP_OK) {
        return PyErr_NoMemory();
    }
    return list_of_blocks(blocks, count);
}

PyDoc_STRVAR(forget_collections_doc,
             "forget_collections()\n--\n\n"
             "Collections that have begun, on whichever thread, list no more.");

static PyObject *forget_collections(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    zbp_tap_forget_collections();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(trace_start_doc,
             "trace_start()\n--\n\nKeep where blocks come from, until trace_stop().");

static PyObject *trace_start(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    zbp_tap_trace_start();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(trace_stop_doc, "trace_stop()\n--\n\nOnce for each trace_start().");

static PyObject *trace_stop(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    zbp_tap_trace_stop();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(trace_of_doc,
             "trace_of(address, /)\n--\n\n"
             "Where a block comes from: list of (file, function, line), innermost first.");

static PyObject *trace_of(PyObject *Py_UNUSED(module), PyObject *address)
{
    const unsigned long long number = PyLong_AsUnsignedLongLong(address);
    if (number == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    zbp_error error = {0};
    return zbp_or_raise(zbp_tap_trace_of(number, &error), &error);
}

PyDoc_STRVAR(storage_spans_doc,
             "storage_spans(storages, /)\n--\n\n"
             "List of (device, address, bytes, identity) of those that still live.");

static PyObject *storage_spans(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    zbp_storages *storages = (zbp_storages *)PyCapsule_GetPointer(capsule, capsule_name);
    zbp_error error = {0};
    return storages != NULL ? zbp_or_raise(zbp_storages_spans(storages, &error), &error) : NULL;
}

/* Frames ------------------------------------------------------------------------------------------- */

static int add_variable(PyObject *list, PyObject *name, PyObject *value)
{
    PyObject *pair = PyTuple_Pack(2, name, value);
    const int status = pair != NULL ? PyList_Append(list, pair) : -1;
    Py_XDECREF(pair);
    return status;
}

#if PY_VERSION_HEX < 0x030B0000

static int add_variables(PyObject *list, PyFrameObject *frame)
{
    const PyCodeObject *code = frame->f_code;
    PyObject *const names[] = {code->co_varnames, code->co_cellvars, code->co_freevars};
    PyObject **value = frame->f_localsplus;

    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(names[i]); ++k, ++value) {
            if (*value != NULL && add_variable(list, PyTuple_GET_ITEM(names[i], k), *value) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

#elif PY_VERSION_HEX < 0x030C0000

static int add_variables(PyObject *list, PyFrameObject *frame)
{
    const PyCodeObject *code = frame->f_frame->f_code;
    PyObject **const value = frame->f_frame->localsplus;

    for (int i = 0; i < code->co_nlocalsplus; ++i) {
        if (value[i] != NULL &&
            add_variable(list, PyTuple_GET_ITEM(code->co_localsplusnames, i), value[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

#else

static int add_variables_of(PyObject *list, PyFrameObject *frame, PyObject *names)
{
    for (Py_ssize_t i = 0; names != NULL && i < PyTuple_GET_SIZE(names); ++i) {
        PyObject *value = PyFrame_GetVar(frame, PyTuple_GET_ITEM(names, i));
        if (value == NULL) { /* unbound */
            PyErr_Clear();
            continue;
        }
        const int status = add_variable(list, PyTuple_GET_ITEM(names, i), value);
        Py_DECREF(value);
        if (status < 0) {
            return -1;
        }
    }
    return names != NULL ? 0 : -1;
}

static int add_variables(PyObject *list, PyFrameObject *frame)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *const names[] = {PyCode_GetVarnames(code), PyCode_GetCellvars(code),
                               PyCode_GetFreevars(code)};
    int status = 0;

    for (size_t i = 0; i < sizeof names / sizeof names[0]; ++i) {
        if (status == 0) {
            status = add_variables_of(list, frame, names[i]);
        }
        Py_XDECREF(names[i]);
    }
    Py_DECREF(code);
    return status;
}

#endif

PyDoc_STRVAR(frame_variables_doc,
             "frame_variables(frame, /)\n--\n\n"
             "The bound variables of a function's frame: list of (name, value or cell). Unlike\n"
             "f_locals it leaves nothing behind in the frame.");

static PyObject *frame_variables(PyObject *Py_UNUSED(module), PyObject *frame)
{
    PyObject *list;

    if (!PyFrame_Check(frame)) {
        return PyErr_Format(PyExc_TypeError, "frame is a %s; expected a frame",
                            Py_TYPE(frame)->tp_name);
    }
    list = PyList_New(0);
    if (list != NULL && add_variables(list, (PyFrameObject *)frame) < 0) {
        Py_CLEAR(list);
    }
    return list;
}

static PyMethodDef leaks_methods[] = {
    {"storages_now", storages_now, METH_VARARGS, storages_now_doc},
    {"storages_since", storages_since, METH_VARARGS, storages_since_doc},
    {"storages_gone", storages_gone, METH_O, storages_gone_doc},
    {"storages_of", storages_of, METH_O, storages_of_doc},
    {"addresses_of", addresses_of, METH_O, addresses_of_doc},
    {"search_holders", search_holders, METH_VARARGS, search_holders_doc},
    {"freed_with", freed_with, METH_O, freed_with_doc},
    {"next_serial", next_serial, METH_NOARGS, next_serial_doc},
    {"live_blocks", live_blocks, METH_O, live_blocks_doc},
    {"collection_begins", collection_begins, METH_NOARGS, collection_begins_doc},
    {"collection_ends", collection_ends, METH_NOARGS, collection_ends_doc},
    {"forget_collections", forget_collections, METH_NOARGS, forget_collections_doc},
    {"storage_spans", storage_spans, METH_O, storage_spans_doc},
    {"trace_start", trace_start, METH_NOARGS, trace_start_doc},
    {"trace_stop", trace_stop, METH_NOARGS, trace_stop_doc},
    {"trace_of", trace_of, METH_O, trace_of_doc},
    {"frame_variables", frame_variables, METH_O, frame_variables_doc},
    {NULL, NULL, 0, NULL}};

int zbp_add_leaks(PyObject *module)
{
    return PyModule_AddFunctions(module, leaks_methods);
}
