/* group.c - the type ParamGroup: a parameter group as a Python object.
 *
 * The group is the shim's; here it is wrapped.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

#include "bindings/parts.h"
#include "shim/group/zbp_describe.h"

#if PY_VERSION_HEX >= 0x030D0000
#define IS_FINALIZING Py_IsFinalizing
#else
#define IS_FINALIZING _Py_IsFinalizing
#endif

/* Owns its zbp_group. What Functions have handed over may refer back to it. */
typedef struct {
    PyObject_HEAD zbp_group *group;
    PyObject *weakrefs;
    size_t failures; /* zbp_failures when it was made */
    bool is_awaited; /* by its first W */
} group_object;

/* A group that no W had is told of, unless an error may be the reason. */
static void group_finalize(PyObject *op)
{
    const group_object *self = (group_object *)op;
    PyObject *module, *said;

    if (!self->is_awaited || self->failures != zbp_failures || zbp_running_here > 0 ||
        PyErr_Occurred() || IS_FINALIZING()) {
        return;
    }
    module = PyImport_ImportModule("zbpipe._stage.dropped");
    said = module != NULL ? PyObject_CallMethod(module, "warn", "O", op) : NULL;
    if (said == NULL) {
        PyErr_WriteUnraisable(op);
    }
    Py_XDECREF(module);
    Py_XDECREF(said);
}

static void group_dealloc(PyObject *op)
{
    group_object *self = (group_object *)op;
    PyTypeObject *type = Py_TYPE(op);
    if (PyObject_CallFinalizerFromDealloc(op) < 0) {
        return; /* the warning keeps it */
    }
    PyObject_GC_UnTrack(op);
    if (self->weakrefs != NULL) {
        PyObject_ClearWeakRefs(op);
    }
    zbp_group_free(self->group);
    type->tp_free(op);
    Py_DECREF(type);
}

static int group_traverse(PyObject *op, visitproc visit, void *arg)
{
    const group_object *self = (const group_object *)op;
    Py_VISIT(Py_TYPE(op));
    return self->group != NULL ? zbp_group_traverse(self->group, visit, arg) : 0;
}

static int group_clear(PyObject *op)
{
    zbp_group_clear(((group_object *)op)->group);
    return 0;
}

PyObject *zbp_group_wrap(void *group_type, zbp_group *group)
{
    PyTypeObject *type = group_type;
    group_object *self = (group_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        zbp_group_free(group);
        return NULL;
    }
    self->group = group;
    self->failures = zbp_failures;
    self->is_awaited = group->book.weight_count > 0;
    return (PyObject *)self;
}

zbp_group *zbp_group_in(PyObject *object, bool to_run)
{
    ((group_object *)object)->is_awaited &= !to_run;
    return ((group_object *)object)->group;
}

static bool is_spent(const zbp_group *group)
{
    return !zbp_book_is_claimed(&group->book) && zbp_book_is_complete(&group->book);
}

/* By a function of zbp_describe.h. */
static PyObject *group_ask(PyObject *op, void *asked)
{
    PyObject *(*ask)(zbp_group *, zbp_error *) = asked;
    zbp_error error = {0};
    return zbp_or_raise(ask(((group_object *)op)->group, &error), &error);
}

static PyObject *group_repr(PyObject *op)
{
    const zbp_group *group = ((group_object *)op)->group;
    const uint32_t weights = group->book.weight_count, tasks = group->layout.task_count;
    PyObject *held, *text;

    if (zbp_book_is_claimed(&group->book)) {
        return PyUnicode_FromString("<zbpipe.ParamGroup: its weight pass is running>");
    }
    if (is_spent(group)) {
        return PyUnicode_FromString("<zbpipe.ParamGroup: spent, its weight pass has run>");
    }
    held = group_ask(op, (void *)zbp_group_bytes_held);
    if (held == NULL) {
        return NULL;
    }
    text =
        PyUnicode_FromFormat("<zbpipe.ParamGroup: %u parameter%s, %u split node%s, %S bytes held>",
                             (unsigned int)weights, weights == 1 ? "" : "s", (unsigned int)tasks,
                             tasks == 1 ? "" : "s", held);
    Py_DECREF(held);
    return text;
}

static PyObject *group_get_spent(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(is_spent(((group_object *)op)->group));
}

static PyGetSetDef group_getset[] = {
    {"_described", group_ask, NULL,
     "Each weight task and what it holds; explain() and memory.held() make it readable.",
     (void *)zbp_group_describe},
    {"bytes_held", group_ask, NULL,
     "Bytes of the tensors held for the weight pass, each storage counted once.",
     (void *)zbp_group_bytes_held},
    {"_reads_weights", group_ask, NULL,
     "True if the weight pass may read weights themselves, so that their memory must be there.",
     (void *)zbp_group_reads_weights},
    {"spent", group_get_spent, NULL, "True once the weight pass has run.", NULL},
    {"weights", group_ask, NULL,
     "The leaf tensors whose gradients the weight pass adds to, a tuple; empty once spent.",
     (void *)zbp_group_weights},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef group_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(group_object, weakrefs), READONLY, NULL},
    {"_is_awaited", T_BOOL, offsetof(group_object, is_awaited), 0, "By its first weight pass."},
    {NULL, 0, 0, 0, NULL}};

PyDoc_STRVAR(group_doc,
             "A parameter group: the smallest piece of the weight pass that can run alone.\n\n"
             "Made by stage_backward_input, spent by stage_backward_weight.\n"
             "Dropping it frees at once all that it holds.");

static PyType_Slot group_slots[] = {{Py_tp_doc, (void *)group_doc},
                                    {Py_tp_finalize, group_finalize},
                                    {Py_tp_dealloc, group_dealloc},
                                    {Py_tp_traverse, group_traverse},
                                    {Py_tp_clear, group_clear},
                                    {Py_tp_repr, group_repr},
                                    {Py_tp_getset, group_getset},
                                    {Py_tp_members, group_members},
                                    {0, NULL}};

static PyType_Spec group_spec = {
    .name = "zbpipe.ParamGroup",
    .basicsize = sizeof(group_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION |
             Py_TPFLAGS_IMMUTABLETYPE,
    .slots = group_slots,
};

PyTypeObject *zbp_add_group(PyObject *module)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &group_spec, NULL);

    if (type != NULL && PyModule_AddObjectRef(module, "ParamGroup", (PyObject *)type) < 0) {
        Py_CLEAR(type);
    }
    return type;
}
