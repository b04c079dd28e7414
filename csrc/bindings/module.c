/* module.c - the extension module zbpipe._C and its two passes.
 *
 * The work is the shim's (zbp_shim.h); here arguments are unpacked and results are wrapped. There is
 * no static mutable state: types and exceptions live in the module's state.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "pass/zbp_pass.h"
#include "shim/pass/zbp_shim.h"

typedef struct {
    PyTypeObject *group_type;
    PyObject *run_error;
} module_state;

static module_state *get_state(PyObject *module)
{
    return (module_state *)PyModule_GetState(module);
}

PyTypeObject *zbp_group_type(PyObject *module)
{
    return get_state(module)->group_type;
}

/* The passes ------------------------------------------------------------------------------------ */

/* *seq_out: a new tuple, or NULL for None. A copy even of a list: hooks may change the caller's while
 * the passes run. */
static int as_sequence(PyObject *object, const char *name, PyObject **seq_out)
{
    *seq_out = NULL;
    if (object == Py_None) {
        return 0;
    }
    if (Py_TYPE(object)->tp_iter == NULL && !PySequence_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s is a %s; expected a list, a tuple or an iterator", name,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    *seq_out = PySequence_Tuple(object);
    return *seq_out != NULL ? 0 : -1;
}

/* Replaces the current error by run_error, with the current one as its cause. */
static void raise_run_error(module_state *state)
{
    PyObject *type, *cause, *traceback, *error, *ignored_type, *ignored_traceback;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(cause, traceback);
    }
    PyErr_SetString(state->run_error, "the backward raised");
    PyErr_Fetch(&ignored_type, &error, &ignored_traceback);
    PyErr_NormalizeException(&ignored_type, &error, &ignored_traceback);
    PyException_SetCause(error, Py_NewRef(cause));
    PyErr_Restore(ignored_type, error, ignored_traceback);
    Py_XDECREF(type);
    Py_XDECREF(cause);
    Py_XDECREF(traceback);
}

/* Takes the groups over from their array, which it frees; new list, or NULL with an error set. */
static PyObject *wrap_groups(module_state *state, zbp_group **groups, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; i < count; ++i) {
        PyObject *group = list != NULL ? zbp_group_wrap(state->group_type, groups[i]) : NULL;
        if (list == NULL) {
            zbp_group_free(groups[i]);
        } else if (group == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)i, group);
        }
    }
    PyMem_Free(groups);
    return list;
}

/* One of the numbers 0 to `last`, or a function that returns one. Returns -1 with an error set. */
int zbp_parse_choice(PyObject *value, const char *name, int last, int *number, PyObject **function)
{
    *function = PyCallable_Check(value) ? value : NULL;
    *number = 0;
    if (*function != NULL) {
        return 0;
    }
    const long given = PyLong_AsLong(value);
    if (given == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (given < 0 || given > last) {
        PyErr_Format(PyExc_ValueError, "%s is %ld; expected 0 to %d or a function", name, given,
                     last);
        return -1;
    }
    *number = (int)given;
    return 0;
}

PyDoc_STRVAR(
    input_pass_doc,
    "input_pass(outputs, output_grads, inputs, weights, defer, checkpoint,\n"
    "           refuse_reentrant=False, /)\n--\n\n"
    "The input pass: (dinputs, param_groups). See zbpipe.stage_backward_input; an output\n"
    "whose gradient is False is detached with the others, and no backward starts from it.\n"
    "refuse_reentrant: a graph with a reentrant checkpoint is an error.\n"
    "Raises RunError, with the original as its cause, if the backward itself failed;\n"
    "other errors refuse the arguments, and nothing was touched.");

static PyObject *input_pass(PyObject *module, PyObject *args)
{
    PyObject *given[4], *seq[4] = {NULL, NULL, NULL, NULL};
    static const char *const name[] = {"stage_outputs_or_loss", "output_grads", "input_values",
                                       "weights"};
    PyObject *dinputs = NULL, *list = NULL, *result = NULL, *defer, *checkpoint;
    zbp_group **groups = NULL;
    size_t group_count = 0;
    zbp_policy policy = {0};
    zbp_scene *scene = NULL;
    zbp_error error = {0};
    int status;

    if (!PyArg_ParseTuple(args, "OOOOOO|p:input_pass", &given[0], &given[1], &given[2], &given[3],
                          &defer, &checkpoint, &policy.refuse_reentrant) ||
        zbp_parse_choice(defer, "defer", ZBP_DEFER_ALL, &policy.defer, &policy.defer_of) < 0 ||
        zbp_parse_choice(checkpoint, "checkpoint", ZBP_CHECKPOINT_INPUT_PASS, &policy.checkpoint,
                         &policy.checkpoint_of) < 0) {
        return NULL;
    }
    for (int i = 0; i < 4; ++i) {
        if (as_sequence(given[i], name[i], &seq[i]) < 0) {
            goto done;
        }
    }
    if (seq[0] == NULL || seq[2] == NULL) {
        PyErr_Format(PyExc_TypeError, "%s is None; expected a list or a tuple",
                     name[seq[0] == NULL ? 0 : 2]);
        goto done;
    }
    if (zbp_scene_new(seq[0], seq[1], seq[2], seq[3], policy, &scene) != ZBP_OK) {
        goto done;
    }
    status = zbp_pass_inputs(scene, &error);
    if (zbp_scene_end(scene, status, &error, &dinputs, &groups, &group_count) != ZBP_OK) {
        if (PyErr_ExceptionMatches(PyExc_Exception)) {
            raise_run_error(get_state(module));
        }
        goto done;
    }
    list = wrap_groups(get_state(module), groups, group_count);
    if (list != NULL) {
        result = PyTuple_Pack(2, dinputs, list);
    }

done:
    for (int i = 0; i < 4; ++i) {
        Py_XDECREF(seq[i]);
    }
    Py_XDECREF(dinputs);
    Py_XDECREF(list);
    return result;
}

PyDoc_STRVAR(weight_pass_doc,
             "weight_pass(weights, param_groups, retain_graph, fuse, main_grad, /)\n--\n\n"
             "The weight pass of the groups; returns the weights as a list or tuple, empty for\n"
             "None. See zbpipe.stage_backward_weight.");

static int run_weight_pass(zbp_group *const *groups, size_t count, PyObject *weights, zbp_how how,
                           int main_grad)
{
    zbp_call *call = NULL;
    zbp_error error = {0};
    int status = zbp_call_new(groups, count, weights, main_grad, &call);

    if (status != ZBP_OK) {
        return status;
    }
    Py_BEGIN_ALLOW_THREADS status = zbp_pass_weights(zbp_call_turns(call), count, how, &error);
    Py_END_ALLOW_THREADS return zbp_call_end(call, status, &error);
}

static PyObject *weight_pass(PyObject *module, PyObject *args)
{
    PyObject *given_weights, *given_groups, *weights = NULL, *seq = NULL, *result = NULL;
    zbp_group **groups = NULL;
    Py_ssize_t count;
    int retain, fuse, main_grad;
    zbp_how how;

    if (!PyArg_ParseTuple(args, "OOppp:weight_pass", &given_weights, &given_groups, &retain, &fuse,
                          &main_grad)) {
        return NULL;
    }
    if (as_sequence(given_weights, "weights", &weights) < 0 ||
        as_sequence(given_groups, "param_groups", &seq) < 0) {
        goto done;
    }
    if (seq == NULL) {
        PyErr_SetString(PyExc_TypeError, "param_groups is None; expected a list of ParamGroups");
        goto done;
    }
    count = PySequence_Fast_GET_SIZE(seq);
    groups = PyMem_New(zbp_group *, (size_t)count + 1);
    if (groups == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    how = (zbp_how){
        .retain = retain != 0, .fuse = fuse != 0, .is_anomaly = zbp_in_anomaly_mode() != 0};
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *item = PySequence_Fast_GET_ITEM(seq, i);
        if (!Py_IS_TYPE(item, get_state(module)->group_type)) {
            PyErr_Format(PyExc_TypeError,
                         "param_groups[%zd] is a %s; expected a ParamGroup, as "
                         "zbpipe.stage_backward_input returns them",
                         i, Py_TYPE(item)->tp_name);
            goto done;
        }
        groups[i] = zbp_group_of(item);
    }
    if (run_weight_pass(groups, (size_t)count, weights, how, main_grad) == ZBP_OK) {
        result = weights != NULL ? Py_NewRef(weights) : PyTuple_New(0);
    }

done:
    PyMem_Free(groups);
    Py_XDECREF(weights);
    Py_XDECREF(seq);
    return result;
}

/* The module ------------------------------------------------------------------------------------ */

static PyMethodDef module_methods[] = {{"input_pass", input_pass, METH_VARARGS, input_pass_doc},
                                       {"weight_pass", weight_pass, METH_VARARGS, weight_pass_doc},
                                       {NULL, NULL, 0, NULL}};

static int module_exec(PyObject *module)
{
    module_state *state = get_state(module);
    state->group_type = zbp_add_group(module);
    state->run_error = PyErr_NewException("zbpipe._C.RunError", PyExc_RuntimeError, NULL);
    if (state->group_type == NULL || state->run_error == NULL) {
        return -1;
    }
    if (PyModule_AddObjectRef(module, "RunError", state->run_error) < 0) {
        return -1;
    }
    if (zbp_add_explain(module) < 0 || zbp_add_work(module) < 0 || zbp_add_release(module) < 0 ||
        zbp_add_memory(module) < 0 || zbp_add_stores(module) < 0) {
        return -1;
    }
    return zbp_add_leaks(module);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    module_state *state = get_state(module);
    Py_VISIT(state->group_type);
    Py_VISIT(state->run_error);
    return 0;
}

static int module_clear(PyObject *module)
{
    module_state *state = get_state(module);
    Py_CLEAR(state->group_type);
    Py_CLEAR(state->run_error);
    return 0;
}

static void module_free(void *module)
{
    module_clear((PyObject *)module);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "zbpipe._C",
    .m_doc = "The compiled part of zbpipe.",
    .m_size = sizeof(module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void);
PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&module_def);
}
