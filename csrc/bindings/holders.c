/* holders.c - who holds what: what Python asks of csrc/holders.
 *
 * No Python code may run from a search's first step to the last of its description: what it has found is borrowed.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "bindings/searching.h"
#include "shim/torch/zbp_tensor.h"

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

static PyMethodDef holders_methods[] = {
    {"search_holders", search_holders, METH_VARARGS, search_holders_doc}, {NULL, NULL, 0, NULL}};

int zbp_add_holders(PyObject *module)
{
    return PyModule_AddFunctions(module, holders_methods);
}
