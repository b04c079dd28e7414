/* holders.c - who holds what, and what would go with some groups: what Python asks of csrc/holders.
 *
 * No Python code may run from a search's first step to the last of its description: what it has found is borrowed.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "bindings/searching.h"
#include "holders/zbp_going.h"
#include "shim/explain/zbp_tasks.h"
#include "shim/torch/zbp_tensor.h"

/* The search --------------------------------------------------------------------------------------- */

/* Borrowed arguments. */
typedef struct question {
    PyObject *args, *roots, *ignored, *target, *allowed, *older, *work, *array;
    unsigned long long since, until;
    int wraps;
} question;

/* Returns 0, or -1 with an error set. */
static int set_terms(zbp_search *search, const question *asked)
{
    PyObject *items = PySequence_List(asked->allowed);

    for (Py_ssize_t i = 0; items != NULL && i < PyList_GET_SIZE(items); ++i) {
        const void *storage = PyLong_AsVoidPtr(PyList_GET_ITEM(items, i));

        if (PyErr_Occurred()) {
            Py_CLEAR(items);
        } else if (storage != NULL &&
                   zbp_map_add(&search->allowed, storage, 0, NULL, NULL) != ZBP_OK) {
            Py_CLEAR(items);
            PyErr_NoMemory();
        }
    }
    if (items == NULL) {
        return -1;
    }
    Py_DECREF(items);
    search->since = asked->since;
    search->until = asked->until;
    if (asked->target != Py_None) {
        search->target = zbp_tensor_key(asked->target);
        if (search->target == NULL) {
            PyErr_Format(PyExc_TypeError, "target is a %s; expected a tensor or None",
                         Py_TYPE(asked->target)->tp_name);
            return -1;
        }
    }
    if (asked->older != Py_None) {
        search->older = zbp_storages_in(asked->older);
    }
    return PyErr_Occurred() ? -1 : 0;
}

/* What the caller has made for this call is not looked at. */
static int ignore_own(zbp_explore *explore, const question *asked)
{
    PyObject *const own[] = {asked->ignored, asked->args, asked->allowed};
    int status = ZBP_OK;

    for (Py_ssize_t i = 0; status == ZBP_OK && i < PyList_GET_SIZE(asked->ignored); ++i) {
        status = zbp_explore_ignore(explore, PyList_GET_ITEM(asked->ignored, i));
    }
    for (size_t i = 0; status == ZBP_OK && i < sizeof own / sizeof own[0]; ++i) {
        status = zbp_explore_ignore(explore, own[i]);
    }
    return status;
}

static PyObject *search_and_describe(zbp_search *search, const question *asked)
{
    zbp_error error = {0};
    int status;

    if (set_terms(search, asked) < 0) {
        return NULL;
    }
    status = ignore_own(&search->explore, asked);
    if (status == ZBP_OK) {
        status = zbp_search_begin(search, &error);
    }
    if (status == ZBP_OK) {
        status = zbp_add_roots(&search->explore, asked->roots);
    }
    if (status == ZBP_OK) {
        status = zbp_search_run(search, &error);
    }
    return status == ZBP_OK ? zbp_describe_search(search, asked->wraps)
                            : zbp_raise_status(status, &error);
}

static PyTypeObject *type_or_null(PyObject *object)
{
    return PyType_Check(object) ? (PyTypeObject *)object : NULL;
}

PyDoc_STRVAR(
    search_holders_doc,
    "search_holders(roots, ignored, target, allowed, since, until, older, work, array, wraps, "
    "/)\n--\n\n"
    "Who holds the storages that were born between these serials, or the target's, a tensor or\n"
    "None: see Note [How holders are searched].\n\n"
    "roots: list of (object, None or a list of what it holds besides its referents). ignored:\n"
    "list of objects that are not looked at. allowed: set of identities of storages that are not\n"
    "searched for. since, until: CPU blocks from this serial on and before that one. older: what\n"
    "storages_now() returned, or None; others' memory was born since if it is not among these.\n"
    "work, array: torch.distributed's Work and numpy.ndarray, or None. wraps: make a Python\n"
    "object for each tensor that is found and has none.\n\n"
    "Returns a dict:\n\n"
    "leaks: list of (storage, bytes, device, address, tensors, chain, rank, others).\n"
    "    storage: its identity, 0 for a block that nothing visible holds. tensors: list of\n"
    "    (shape, dtype, object or None, bytes that it uses, 0 where unknown), a tuple per tensor\n"
    "    on it, that of the chain first. chain: list of steps from the outermost holder to a\n"
    "    tensor. rank: 'root', 'hidden' (the chain begins with something that is held from where\n"
    "    nobody can look), 'cycle' (garbage) or 'none'. others: references to its tensors besides\n"
    "    the chain's.\n"
    "cycles: list of (steps, list of storages), each cycle that garbage hangs on.\n"
    "works: list of chains to the works that the roots reach: what these hold they do not tell.\n"
    "unseen: dict of what could not be looked at, and how often.\n"
    "visited: number of objects, tensors, storages, nodes and groups.\n\n"
    "A step is (kind, object or None, name, edge): kind is 'python', 'tensor', 'node', 'storage',\n"
    "'group', or 'more' for the left out middle of a long chain (name: how many steps); name says\n"
    "what it is, for what is not Python's; edge says how the step before holds it, where C++\n"
    "knows, else None. The steps hold their objects: whoever describes them must let them go.");

static PyObject *search_holders(PyObject *module, PyObject *args)
{
    question asked = {.args = args};
    zbp_things *things = NULL;
    zbp_search search;
    zbp_error error = {0};
    PyObject *result;

    if (!PyArg_ParseTuple(args, "O!O!OO!KKOOOp:search_holders", &PyList_Type, &asked.roots,
                          &PyList_Type, &asked.ignored, &asked.target, &PySet_Type, &asked.allowed,
                          &asked.since, &asked.until, &asked.older, &asked.work, &asked.array,
                          &asked.wraps) ||
        zbp_check_roots(asked.roots) < 0) {
        return NULL;
    }
    if (zbp_things_new(zbp_access_of(module), type_or_null(asked.work), type_or_null(asked.array),
                       &things, &error) != ZBP_OK) {
        return zbp_error_raise(&error);
    }
    const int collects = PyGC_Disable();
    zbp_search_init(&search, things, NULL);
    result = search_and_describe(&search, &asked);
    zbp_search_fini(&search);
    zbp_things_free(things);
    if (collects) {
        PyGC_Enable();
    }
    return result;
}

/* What would go with groups ------------------------------------------------------------------------ */

static PyObject *places(const zbp_going *going, uint32_t storage)
{
    PyObject *list = PyList_New(0);

    for (uint32_t i = going->begin[storage]; list != NULL && i < going->begin[storage + 1]; ++i) {
        if (zbp_append_new(list, PyLong_FromUnsignedLong(going->holder[i])) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* (identity, bytes, role, shape, dtype, device, node, groups) */
static PyObject *freed_storage(const zbp_going *going, uint32_t storage)
{
    const zbp_heap *heap = &going->explore.heap;
    const zbp_going_way way = zbp_going_way_to(going, storage);
    zbp_memory memory = {0};
    zbp_error error = {0};
    PyObject *tensor = zbp_or_raise(
        zbp_look_tensor(way.tensor != ZBP_NO_VERTEX ? heap->vertex[way.tensor].key : NULL, false,
                        &error),
        &error);
    PyObject *device = NULL, *node = NULL;

    (void)zbp_storage_look(heap->vertex[storage].key, &memory); /* it is owned, and so there */
    if (tensor != NULL) {
        device = zbp_or_raise(zbp_look_device(&memory, &error), &error);
    }
    if (device != NULL) {
        node = way.node == ZBP_NO_VERTEX
                   ? Py_NewRef(Py_None)
                   : zbp_or_raise(zbp_look_name(ZBP_THING_NODE, heap->vertex[way.node].key, &error),
                                  &error);
    }
    if (node == NULL) {
        Py_XDECREF(tensor);
        Py_XDECREF(device);
        return NULL;
    }
    PyObject *result =
        Py_BuildValue("(NKsOONNN)", PyLong_FromVoidPtr((void *)heap->vertex[storage].key),
                      (unsigned long long)memory.bytes, way.is_packed ? "packed" : "saved",
                      PyTuple_GET_ITEM(tensor, 0), PyTuple_GET_ITEM(tensor, 1), device, node,
                      places(going, storage));
    Py_DECREF(tensor);
    return result;
}

static PyObject *freed_storages(const zbp_going *going)
{
    PyObject *list = PyList_New(0);

    for (uint32_t i = 0; list != NULL && i < going->storages.count; ++i) {
        if (zbp_append_new(list, freed_storage(going, going->storages.item[i])) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* A list with a tuple for each group. */
static PyObject *weights_of_each(zbp_group_access access, PyObject *groups)
{
    PyObject *list = PyList_New(0);
    zbp_error error = {0};

    for (Py_ssize_t i = 0; list != NULL && i < PyTuple_GET_SIZE(groups); ++i) {
        const zbp_turn turn = zbp_group_turn(access.get(PyTuple_GET_ITEM(groups, i)));
        PyObject *weights = zbp_held_weights(turn.held, &error);
        if (zbp_append_new(list, zbp_or_raise(weights, &error)) < 0) {
            Py_CLEAR(list);
        }
    }
    return list;
}

/* New tuple (storages, unseen), or NULL with an error set. */
static PyObject *find_freed(zbp_group_access access, PyObject *groups)
{
    zbp_things *things = NULL;
    zbp_going going;
    zbp_error error = {0};
    PyObject *result = NULL;
    int status = zbp_things_new(access, NULL, NULL, &things, &error);

    zbp_going_init(&going, things, NULL);
    if (status == ZBP_OK) {
        status = zbp_going_find(&going, (const void *const *)((PyTupleObject *)groups)->ob_item,
                                (uint32_t)PyTuple_GET_SIZE(groups), &error);
    }
    if (status == ZBP_OK) {
        PyObject *storages = freed_storages(&going);
        result = storages != NULL ? Py_BuildValue("(NN)", storages, zbp_wrap_unseen(things)) : NULL;
    } else {
        zbp_raise_status(status, &error);
    }
    zbp_going_fini(&going);
    zbp_things_free(things);
    return result;
}

PyDoc_STRVAR(
    freed_with_doc,
    "freed_with(groups, /)\n--\n\n"
    "What would be freed if nobody held these ParamGroups, a tuple, each once.\n\n"
    "Returns a tuple of\n\n"
    "a list of the storages: (identity, bytes, role, shape, dtype, device, node, groups).\n"
    "    role: 'packed' for what saved-tensor hooks or a checkpointed region keep, else\n"
    "    'saved'. shape, dtype: of a tensor on it, else () and torch.uint8. node: the name of the\n"
    "    last node on the way, or None. groups: places of those that hold it.\n"
    "a list with a tuple of the weights of each group.\n"
    "a dict of what could not be looked at, and how often.");

static PyObject *freed_with(PyObject *module, PyObject *groups)
{
    const zbp_group_access access = zbp_access_of(module);
    PyObject *freed, *weights, *result = NULL;

    if (!PyTuple_Check(groups)) {
        return PyErr_Format(PyExc_TypeError, "freed_with() takes a tuple of groups, not a %s",
                            Py_TYPE(groups)->tp_name);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(groups); ++i) {
        if (!Py_IS_TYPE(PyTuple_GET_ITEM(groups, i), access.type)) {
            return PyErr_Format(PyExc_TypeError, "groups[%zd] is a %s; expected a ParamGroup", i,
                                Py_TYPE(PyTuple_GET_ITEM(groups, i))->tp_name);
        }
        if (zbp_group_state(access.get(PyTuple_GET_ITEM(groups, i))) == ZBP_GROUP_RUNNING) {
            return zbp_refuse_running();
        }
    }
    const int collects = PyGC_Disable();
    freed = find_freed(access, groups);
    weights = freed != NULL ? weights_of_each(access, groups) : NULL;
    if (weights != NULL) {
        result = PyTuple_Pack(3, PyTuple_GET_ITEM(freed, 0), weights, PyTuple_GET_ITEM(freed, 1));
    }
    Py_XDECREF(freed);
    Py_XDECREF(weights);
    if (collects) {
        PyGC_Enable();
    }
    return result;
}

static PyMethodDef holders_methods[] = {
    {"search_holders", search_holders, METH_VARARGS, search_holders_doc},
    {"freed_with", freed_with, METH_O, freed_with_doc},
    {NULL, NULL, 0, NULL}};

int zbp_add_holders(PyObject *module)
{
    return PyModule_AddFunctions(module, holders_methods);
}
