/* explain.c - what an input pass would leave to W: see zbpipe/_explain/run.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "pass/zbp_pass.h"
#include "shim/explain/zbp_aside.h"
#include "shim/explain/zbp_explain.h"

/* The groups so far: lists of tasks (node, name, kind, why, edges). */
typedef struct explained {
    PyObject *groups;
    PyObject *weights; /* the last group's, borrowed */
} explained;

static PyObject *last_of(PyObject *list)
{
    return PyList_GET_ITEM(list, PyList_GET_SIZE(list) - 1);
}

static int add_group(void *arg, PyObject *weights)
{
    explained *self = arg;

    self->weights = weights;
    return zbp_append_new(self->groups, PyList_New(0));
}

static int add_task(void *arg, PyObject *node, const char *name, const char *kind, const char *why)
{
    return zbp_append_new(last_of(((explained *)arg)->groups),
                          Py_BuildValue("OsssN", node, name, kind, why, PyList_New(0)));
}

/* (slot, shape, way, weights), to the last task. */
static int add_edge(void *arg, const zbp_explain_edge *edge)
{
    const explained *self = arg;
    PyObject *task = last_of(last_of(self->groups));

    return zbp_append_new(PyTuple_GET_ITEM(task, 4),
                          Py_BuildValue("INzN", (unsigned int)edge->slot,
                                        zbp_wrap_shape(edge->shape), edge->way,
                                        zbp_pick(self->weights, edge->weights)));
}

PyDoc_STRVAR(explain_doc, "explain(outputs, inputs, weights, defer, checkpoint, /)\n--\n\n"
                          "The plan of an input pass, which does not run. See zbpipe.explain.");

static PyObject *explain(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *outputs, *inputs, *weights, *defer, *checkpoint;
    zbp_policy policy = {0};
    zbp_survey survey = {0};
    zbp_scene *scene = NULL;
    zbp_error error = {0};
    explained self = {0};
    const zbp_explain_visitor visitor = {&self, add_group, add_task, add_edge};

    if (!PyArg_ParseTuple(args, "O!O!O!OO:explain", &PyTuple_Type, &outputs, &PyTuple_Type, &inputs,
                          &PyTuple_Type, &weights, &defer, &checkpoint) ||
        zbp_parse_choice(defer, "defer", ZBP_DEFER_ALL, &policy.defer, &policy.defer_of) < 0 ||
        zbp_parse_choice(checkpoint, "checkpoint", ZBP_CHECKPOINT_INPUT_PASS, &policy.checkpoint,
                         &policy.checkpoint_of) < 0) {
        return NULL;
    }
    self.groups = PyList_New(0);
    if (self.groups == NULL) {
        return NULL;
    }
    if (zbp_explain_new(outputs, inputs, weights, policy, &scene, &error) != ZBP_OK) {
        Py_DECREF(self.groups);
        return zbp_error_raise(&error);
    }
    const int status = zbp_pass_survey(scene, &survey, &error);
    if (zbp_explain_end(scene, status, &error, &visitor) != ZBP_OK) {
        Py_CLEAR(self.groups);
        zbp_error_raise(&error);
    }
    zbp_survey_fini(&survey);
    return self.groups;
}

PyDoc_STRVAR(is_watched_doc,
             "is_watched(tensor, /)\n--\n\nTrue if hooks watch its accumulation, as DDP's do.");

static PyObject *is_watched(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    zbp_error error = {0};
    int answer = 0;
    return zbp_is_watched(tensor, &answer, &error) == ZBP_OK ? PyBool_FromLong(answer)
                                                             : zbp_error_raise(&error);
}

static const char aside_name[] = "zbpipe._C.aside";

/* Also where nobody called put_back(): hooks must not be lost. */
static void aside_dealloc(PyObject *capsule)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    zbp_put_back(PyCapsule_GetContext(capsule));
    PyErr_Restore(type, value, traceback);
}

PyDoc_STRVAR(
    set_aside_doc,
    "set_aside(tensors, /)\n--\n\n"
    "Takes gradients and hooks from leaf tensors until put_back() of the result, or its end.");

static PyObject *set_aside(PyObject *Py_UNUSED(module), PyObject *arg)
{
    PyObject *tensors =
        PySequence_Fast(arg, "tensors is not iterable; expected a list or tuple of tensors");
    if (tensors == NULL) {
        return NULL;
    }
    /* The capsule first, so that nothing can fail once hooks have been taken. A capsule's pointer cannot be NULL:
     * what it owns is its context. */
    PyObject *capsule = PyCapsule_New((void *)aside_name, aside_name, aside_dealloc);
    zbp_error error = {0};
    zbp_aside *aside = capsule == NULL ? NULL : zbp_set_aside(tensors, &error);
    Py_DECREF(tensors);
    if (capsule != NULL && aside == NULL) {
        zbp_error_raise(&error);
    }
    if (aside == NULL || PyCapsule_SetContext(capsule, aside) < 0) {
        zbp_put_back(aside);
        Py_CLEAR(capsule);
    }
    return capsule;
}

PyDoc_STRVAR(
    put_back_doc,
    "put_back(aside, /)\n--\n\nGives back what set_aside() took; the second time nothing.");

static PyObject *put_back(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, aside_name)) {
        return PyErr_Format(PyExc_TypeError, "aside is a %s; expected what set_aside() returned",
                            Py_TYPE(capsule)->tp_name);
    }
    zbp_aside *aside = PyCapsule_GetContext(capsule);
    if (PyCapsule_SetContext(capsule, NULL) < 0) {
        return NULL;
    }
    zbp_put_back(aside);
    Py_RETURN_NONE;
}

static PyMethodDef explain_methods[] = {{"explain", explain, METH_VARARGS, explain_doc},
                                        {"is_watched", is_watched, METH_O, is_watched_doc},
                                        {"put_back", put_back, METH_O, put_back_doc},
                                        {"set_aside", set_aside, METH_O, set_aside_doc},
                                        {NULL, NULL, 0, NULL}};

int zbp_add_explain(PyObject *module)
{
    return PyModule_AddFunctions(module, explain_methods);
}
