/* modules.c - the parameters of a torch.nn.Module.
 *
 * Module.parameters() asks a chain of generators, as deep as the module, for each of them: at 768 parameters as long as
 * a tenth of a backward. A schedule asks twice per microbatch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "core/base/zbp_map.h"

enum { NAMED_MODULES, PARAMETERS, MODULES };

typedef struct walk {
    PyObject *named_modules; /* torch's function, borrowed */
    PyObject *name[3];       /* interned, which Python looks up sooner */
    PyObject *met;           /* list of modules: alive, so that nobody gets their addresses */
    PyObject **pending;      /* of those, the next one last */
    size_t pending_count, capacity;
    PyObject *parameters; /* list */
    zbp_map seen;         /* modules and parameters */
} walk;

/* 1 where it has not been seen before, 0 where it has, -1 with an error set. */
static int is_new(walk *at, PyObject *object)
{
    bool added = false;

    if (zbp_map_add(&at->seen, object, 0, NULL, &added) != ZBP_OK) {
        PyErr_NoMemory();
        return -1;
    }
    return added;
}

/* New reference to a dict, or NULL: with an error set, or where it is another kind of mapping. */
static PyObject *members(PyObject *module, PyObject *name)
{
    PyObject *dict = PyObject_GetAttr(module, name);

    if (dict != NULL && !PyDict_CheckExact(dict)) {
        Py_CLEAR(dict);
    }
    return dict;
}

/* 1 where the module walks as torch.nn.Module does, 0 where it has a named_modules() of its own, -1 with an error. */
static int walks_as_torch(const walk *at, PyObject *module)
{
    PyObject *method = PyObject_GetAttr(module, at->name[NAMED_MODULES]);
    int is_torchs;

    if (method == NULL) {
        return -1;
    }
    is_torchs = PyMethod_Check(method) && PyMethod_GET_FUNCTION(method) == at->named_modules;
    Py_DECREF(method);
    return is_torchs;
}

/* 1, or -1 with an error set. */
static int push(walk *at, PyObject *module)
{
    if (at->pending_count == at->capacity) {
        const size_t wanted = 2 * at->capacity + 16;
        PyObject **grown = PyMem_Resize(at->pending, PyObject *, wanted);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        at->pending = grown;
        at->capacity = wanted;
    }
    at->pending[at->pending_count++] = module;
    return PyList_Append(at->met, module) < 0 ? -1 : 1;
}

/* The children become pending, the first one last. 1, or -1 with an error set. */
static int push_all(walk *at, PyObject *modules)
{
    const size_t begin = at->pending_count;
    Py_ssize_t place = 0;
    PyObject *name, *module;
    int result = 1;

    while (result == 1 && PyDict_Next(modules, &place, &name, &module)) {
        result = module != Py_None ? push(at, module) : 1;
    }
    for (size_t low = begin, high = at->pending_count; low + 1 < high; ++low) {
        module = at->pending[--high];
        at->pending[high] = at->pending[low];
        at->pending[low] = module;
    }
    return result;
}

/* The parameters of one module; its children become pending. 1, 0 where torch has to walk itself, -1 with an error
 * set. */
static int visit(walk *at, PyObject *module)
{
    PyObject *parameters = members(module, at->name[PARAMETERS]);
    PyObject *modules = parameters != NULL ? members(module, at->name[MODULES]) : NULL;
    Py_ssize_t place = 0;
    PyObject *name, *value;
    int result = modules != NULL ? 1 : PyErr_Occurred() ? -1 : 0;

    while (result == 1 && PyDict_Next(parameters, &place, &name, &value)) {
        const int added = value != Py_None ? is_new(at, value) : 0;
        result = added < 0 || (added && PyList_Append(at->parameters, value) < 0) ? -1 : 1;
    }
    if (result == 1) {
        result = push_all(at, modules);
    }
    Py_XDECREF(parameters);
    Py_XDECREF(modules);
    return result;
}

static int step(walk *at)
{
    PyObject *module = at->pending[--at->pending_count];
    int result = is_new(at, module);

    if (result == 0) {
        return 1; /* it is there for the second time */
    }
    if (result == 1) {
        result = walks_as_torch(at, module);
    }
    return result == 1 ? visit(at, module) : result;
}

/* 1, or -1 with an error set. */
static int begin(walk *at, PyObject *module)
{
    at->name[NAMED_MODULES] = PyUnicode_InternFromString("named_modules");
    at->name[PARAMETERS] = PyUnicode_InternFromString("_parameters");
    at->name[MODULES] = PyUnicode_InternFromString("_modules");
    at->met = PyList_New(0);
    at->parameters = PyList_New(0);
    if (at->name[NAMED_MODULES] == NULL || at->name[PARAMETERS] == NULL ||
        at->name[MODULES] == NULL || at->met == NULL || at->parameters == NULL) {
        return -1;
    }
    return push(at, module);
}

PyDoc_STRVAR(parameters_of_doc,
             "parameters_of(module, named_modules, /)\n--\n\n"
             "list(module.parameters()); None where a module walks its own way: has another\n"
             "named_modules(), or its parameters and children in no dict.");

static PyObject *parameters_of(PyObject *Py_UNUSED(extension), PyObject *args)
{
    PyObject *module;
    walk at = {0};
    int result;

    if (!PyArg_ParseTuple(args, "OO:parameters_of", &module, &at.named_modules)) {
        return NULL;
    }
    result = begin(&at, module);
    while (result == 1 && at.pending_count > 0) {
        result = step(&at);
    }
    for (int i = NAMED_MODULES; i <= MODULES; ++i) {
        Py_XDECREF(at.name[i]);
    }
    PyMem_Free(at.pending);
    Py_XDECREF(at.met);
    zbp_map_fini(&at.seen);
    if (result != 1) {
        Py_CLEAR(at.parameters);
    }
    return result == 0 ? Py_NewRef(Py_None) : at.parameters;
}

static PyMethodDef modules_methods[] = {
    {"parameters_of", parameters_of, METH_VARARGS, parameters_of_doc},
    {NULL, NULL, 0, NULL},
};

int zbp_add_modules(PyObject *module)
{
    return PyModule_AddFunctions(module, modules_methods);
}
