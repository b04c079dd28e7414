/* storages.c - the storages of a moment, and what the searches for holders begin with. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "bindings/searching.h"

zbp_group_access zbp_access_of(PyObject *module)
{
    return (zbp_group_access){zbp_group_type(module), zbp_group_in};
}

PyObject *zbp_raise_status(int status, zbp_error *error)
{
    return status == ZBP_ETORCH ? zbp_error_raise(error) : PyErr_NoMemory();
}

/* Roots -------------------------------------------------------------------------------------------- */

int zbp_check_roots(PyObject *roots)
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

static int add_root(zbp_explore *explore, PyObject *root)
{
    PyObject *held = PyTuple_GET_ITEM(root, 1);
    uint32_t v;
    int status = zbp_explore_root(explore, PyTuple_GET_ITEM(root, 0), &v);

    if (status != ZBP_OK || held == Py_None || v == ZBP_NO_VERTEX) {
        return status;
    }
    status = zbp_explore_ignore(explore, held);
    for (Py_ssize_t i = 0; status == ZBP_OK && i < PyList_GET_SIZE(held); ++i) {
        status = zbp_things_add_held(explore->things, explore->heap.vertex[v].key,
                                     PyList_GET_ITEM(held, i));
    }
    return status;
}

int zbp_add_roots(zbp_explore *explore, PyObject *roots)
{
    int status = zbp_explore_ignore(explore, roots);

    for (Py_ssize_t i = 0; status == ZBP_OK && i < PyList_GET_SIZE(roots); ++i) {
        status = zbp_explore_ignore(explore, PyList_GET_ITEM(roots, i));
    }
    for (Py_ssize_t i = 0; status == ZBP_OK && i < PyList_GET_SIZE(roots); ++i) {
        status = add_root(explore, PyList_GET_ITEM(roots, i));
    }
    return status;
}

/* A moment ----------------------------------------------------------------------------------------- */

static const char *const capsule_name = "zbpipe.storages";

zbp_storages *zbp_storages_in(PyObject *capsule)
{
    return PyCapsule_GetPointer(capsule, capsule_name);
}

static void free_capsule(PyObject *capsule)
{
    zbp_storages *storages = zbp_storages_in(capsule);

    zbp_storages_fini(storages);
    PyMem_Free(storages);
}

/* What the collector lists and what that reaches through autograd; with roots, all that these reach, too: where an
 * application has frozen what lived, the collector's list lacks it. */
static int explore_moment(zbp_explore *explore, PyObject *roots, zbp_error *error)
{
    const bool is_whole = PyList_GET_SIZE(roots) > 0;
    const void *const *object = NULL;
    size_t count = 0;
    int status = zbp_explore_list(explore, &object, &count, error);

    if (status == ZBP_OK) {
        status = zbp_add_roots(explore, roots);
    }
    for (size_t i = 0; status == ZBP_OK && i < count; ++i) {
        uint32_t v;
        status = is_whole ? zbp_explore_root(explore, object[i], &v)
                          : zbp_explore_root_of_torch(explore, object[i], error);
    }
    if (status != ZBP_OK) {
        return status;
    }
    return is_whole ? zbp_explore_all(explore, error) : zbp_explore_autograd(explore, error);
}

/* *storages is overwritten. Returns 0, or -1 with an error set. */
static int take_storages(PyObject *module, PyObject *roots, zbp_storages *storages)
{
    const int collects = PyGC_Disable();
    zbp_things *things = NULL;
    zbp_explore explore;
    zbp_error error = {0};
    int status = zbp_things_new(zbp_access_of(module), NULL, NULL, &things, &error);

    zbp_explore_init(&explore, things, NULL);
    if (status == ZBP_OK) {
        status = explore_moment(&explore, roots, &error);
    }
    if (status == ZBP_OK) {
        status = zbp_storages_take(storages, &explore, NULL);
    }
    zbp_explore_fini(&explore);
    zbp_things_free(things);
    if (collects) {
        PyGC_Enable();
    }
    if (status != ZBP_OK) {
        zbp_raise_status(status, &error);
        return -1;
    }
    return 0;
}

PyDoc_STRVAR(storages_now_doc,
             "storages_now(roots, /)\n--\n\n"
             "The storages of all living tensors, as something for search_holders(). roots: as\n"
             "there, or empty unless something is frozen.");

static PyObject *storages_now(PyObject *module, PyObject *args)
{
    PyObject *roots, *capsule;
    zbp_storages *storages;

    if (!PyArg_ParseTuple(args, "O!:storages_now", &PyList_Type, &roots) ||
        zbp_check_roots(roots) < 0) {
        return NULL;
    }
    storages = PyMem_Calloc(1, sizeof *storages);
    if (storages == NULL) {
        return PyErr_NoMemory();
    }
    capsule = take_storages(module, roots, storages) == 0
                  ? PyCapsule_New(storages, capsule_name, free_capsule)
                  : NULL;
    if (capsule == NULL) {
        zbp_storages_fini(storages);
        PyMem_Free(storages);
    }
    return capsule;
}

/* Nothing of them is lost meanwhile: the tap's books, then what lives. */
static PyObject *count_others(PyObject *module, PyObject *roots, const zbp_storages *older)
{
    zbp_storages now = {0};
    zbp_born tapped;
    size_t count = 0;

    if (zbp_born_take(&tapped, UINT64_MAX, UINT64_MAX, NULL) != ZBP_OK) {
        return PyErr_NoMemory();
    }
    const int status = take_storages(module, roots, &now);
    for (uint32_t i = 0; status == 0 && i < now.count; ++i) {
        zbp_memory memory;
        count += zbp_storage_look(now.storage[i], &memory) &&
                 zbp_storages_lack(older, &tapped, now.storage[i], &memory);
    }
    zbp_storages_fini(&now);
    zbp_born_fini(&tapped);
    return status == 0 ? PyLong_FromSize_t(count) : NULL;
}

PyDoc_STRVAR(storages_since_doc,
             "storages_since(roots, older, /)\n--\n\n"
             "How many storages with memory there are now that were not in what storages_now()\n"
             "returned, and that the tap does not know.");

static PyObject *storages_since(PyObject *module, PyObject *args)
{
    PyObject *roots, *capsule;
    const zbp_storages *older;

    if (!PyArg_ParseTuple(args, "O!O:storages_since", &PyList_Type, &roots, &capsule) ||
        zbp_check_roots(roots) < 0) {
        return NULL;
    }
    older = zbp_storages_in(capsule);
    return older != NULL ? count_others(module, roots, older) : NULL;
}

static int add_new(PyObject *set, PyObject *value)
{
    const int status = value != NULL ? PySet_Add(set, value) : -1;
    Py_XDECREF(value);
    return status;
}

PyDoc_STRVAR(storages_gone_doc, "storages_gone(storages, /)\n--\n\n"
                                "The identities of those that have been freed since, as a set.");

static PyObject *storages_gone(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    const zbp_storages *storages = zbp_storages_in(capsule);
    PyObject *set = storages != NULL ? PySet_New(NULL) : NULL;

    for (uint32_t i = 0; set != NULL && i < storages->count; ++i) {
        zbp_memory memory;
        if (!zbp_storage_look(storages->storage[i], &memory) &&
            add_new(set, PyLong_FromVoidPtr((void *)storages->storage[i])) < 0) {
            Py_CLEAR(set);
        }
    }
    return set;
}

PyDoc_STRVAR(storage_spans_doc,
             "storage_spans(storages, /)\n--\n\n"
             "List of (device, address, bytes, identity) of those that still live.");

static PyObject *storage_spans(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    const zbp_storages *storages = zbp_storages_in(capsule);
    PyObject *list = storages != NULL ? PyList_New(0) : NULL;
    zbp_error error = {0};

    for (uint32_t i = 0; list != NULL && i < storages->count; ++i) {
        zbp_memory memory;
        if (!zbp_storage_look(storages->storage[i], &memory)) {
            continue;
        }
        PyObject *device = zbp_or_raise(zbp_look_device_name(&memory, &error), &error);
        PyObject *span = device != NULL
                             ? Py_BuildValue("(NKKN)", device, (unsigned long long)memory.address,
                                             (unsigned long long)memory.bytes,
                                             PyLong_FromVoidPtr((void *)storages->storage[i]))
                             : NULL;
        if (zbp_append_new(list, span) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
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

static PyMethodDef storages_methods[] = {
    {"storages_now", storages_now, METH_VARARGS, storages_now_doc},
    {"storages_since", storages_since, METH_VARARGS, storages_since_doc},
    {"storages_gone", storages_gone, METH_O, storages_gone_doc},
    {"storage_spans", storage_spans, METH_O, storage_spans_doc},
    {"storages_of", storages_of, METH_O, storages_of_doc},
    {"addresses_of", addresses_of, METH_O, addresses_of_doc},
    {NULL, NULL, 0, NULL}};

int zbp_add_storages(PyObject *module)
{
    return PyModule_AddFunctions(module, storages_methods);
}
