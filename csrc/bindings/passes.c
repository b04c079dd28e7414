/* passes.c - the input pass and the weight pass.
 *
 * The work is that of csrc/pass; here sequences are walked, arguments are handed to the shim one by one (zbp_shim.h),
 * and results are wrapped.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "bindings/weight_call.h"
#include "pass/zbp_pass.h"
#include "shim/pass/zbp_call.h"

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
static void raise_run_error(PyObject *run_error)
{
    PyObject *type, *cause, *traceback, *error, *ignored_type, *ignored_traceback;
    PyErr_Fetch(&type, &cause, &traceback);
    PyErr_NormalizeException(&type, &cause, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(cause, traceback);
    }
    PyErr_SetString(run_error, "the backward raised");
    PyErr_Fetch(&ignored_type, &error, &ignored_traceback);
    PyErr_NormalizeException(&ignored_type, &error, &ignored_traceback);
    PyException_SetCause(error, Py_NewRef(cause));
    PyErr_Restore(ignored_type, error, ignored_traceback);
    Py_XDECREF(type);
    Py_XDECREF(cause);
    Py_XDECREF(traceback);
}

/* Takes the groups over from their array, which it frees; new list, or NULL with an error set. */
static PyObject *wrap_groups(PyTypeObject *type, zbp_group **groups, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; i < count; ++i) {
        PyObject *group = list != NULL ? zbp_group_wrap(type, groups[i]) : NULL;
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

PyDoc_STRVAR(
    input_pass_doc,
    "input_pass(outputs, output_grads, inputs, weights, policy, /)\n--\n\n"
    "The input pass: (dinputs, param_groups). See zbpipe.stage_backward_input; an output\n"
    "whose gradient is False is detached with the others, and no backward starts from it.\n"
    "policy: a zbpipe.Policy.\n"
    "Raises RunError, with the original as its cause, if the backward itself failed;\n"
    "other errors refuse the arguments, and nothing was touched.");

/* The arguments of I, in this order; each a tuple, or NULL for None. */
enum { OUTPUTS, OUTPUT_GRADS, INPUTS, WEIGHTS, ARGUMENT_COUNT };

static int add_outputs(zbp_scene *scene, PyObject *outputs, PyObject *grads, zbp_error *error)
{
    const Py_ssize_t count = PyTuple_GET_SIZE(outputs);
    Py_ssize_t roots = 0, unused = 0;

    if (grads != NULL && PyTuple_GET_SIZE(grads) != count) {
        PyErr_Format(PyExc_ValueError,
                     "output_grads has %zd entries; expected one for each of the %zd stage outputs",
                     PyTuple_GET_SIZE(grads), count);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *grad = grads != NULL ? PyTuple_GET_ITEM(grads, i) : NULL;
        int use = ZBP_OUTPUT_PASSIVE;
        if (zbp_scene_add_output(scene, (size_t)i, PyTuple_GET_ITEM(outputs, i), grad, &use,
                                 error) != ZBP_OK) {
            return zbp_fail(error);
        }
        roots += use == ZBP_OUTPUT_ROOT;
        unused += use == ZBP_OUTPUT_UNUSED;
    }
    if (roots == 0 && unused > 0) {
        PyErr_Format(PyExc_ValueError,
                     "output_grads holds no gradient for any of the %zd stage outputs that require "
                     "one; the backward would lose them all",
                     unused);
        return -1;
    }
    return 0;
}

static int add_arguments(zbp_scene *scene, PyObject *const *seq, PyObject *policy, zbp_error *error)
{
    const Py_ssize_t weights = seq[WEIGHTS] != NULL ? PyTuple_GET_SIZE(seq[WEIGHTS]) : 0;
    int status = ZBP_OK;

    if (add_outputs(scene, seq[OUTPUTS], seq[OUTPUT_GRADS], error) < 0 ||
        zbp_exclude_weights(scene, policy) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; status == ZBP_OK && i < PyTuple_GET_SIZE(seq[INPUTS]); ++i) {
        status = zbp_scene_add_input(scene, PyTuple_GET_ITEM(seq[INPUTS], i), error);
    }
    for (Py_ssize_t i = 0; status == ZBP_OK && i < weights; ++i) {
        status = zbp_scene_add_weight(scene, (size_t)i, PyTuple_GET_ITEM(seq[WEIGHTS], i), error);
    }
    if (status == ZBP_OK) {
        status = zbp_scene_begin(scene, "zbpipe::input_pass", error);
    }
    if (status != ZBP_OK) {
        return zbp_fail(error);
    }
    return 0;
}

/* New (dinputs, groups), or NULL with an error set. */
static PyObject *run_input_pass(PyObject *module, PyObject *const *seq, PyObject *given_policy)
{
    PyObject *dinputs = NULL, *list, *result;
    zbp_group **groups = NULL;
    size_t group_count = 0;
    zbp_policy policy = {.main_grad = false};
    zbp_scene *scene = NULL;
    zbp_error error = {0};

    if (zbp_read_policy(given_policy, &policy) < 0) {
        return NULL;
    }
    if (zbp_scene_new(policy, seq[WEIGHTS] == NULL, &scene, &error) != ZBP_OK) {
        return zbp_error_raise(&error);
    }
    if (add_arguments(scene, seq, given_policy, &error) < 0) {
        zbp_scene_free(scene);
        return NULL;
    }
    const int status = zbp_pass_inputs(scene, &error);
    if (zbp_scene_end(scene, status, &error, &dinputs, &groups, &group_count) != ZBP_OK) {
        zbp_error_raise(&error);
        if (PyErr_ExceptionMatches(PyExc_Exception)) {
            raise_run_error(zbp_run_error(module));
        }
        return NULL;
    }
    list = wrap_groups(zbp_group_type(module), groups, group_count);
    result = list != NULL ? PyTuple_Pack(2, dinputs, list) : NULL;
    Py_XDECREF(list);
    Py_DECREF(dinputs);
    return result;
}

static PyObject *input_pass(PyObject *module, PyObject *args)
{
    PyObject *given[ARGUMENT_COUNT], *seq[ARGUMENT_COUNT] = {NULL}, *result = NULL;
    PyObject *policy;
    static const char *const name[] = {"stage_outputs_or_loss", "output_grads", "input_values",
                                       "weights"};
    int is_read = 1;

    if (!PyArg_ParseTuple(args, "OOOOO:input_pass", &given[OUTPUTS], &given[OUTPUT_GRADS],
                          &given[INPUTS], &given[WEIGHTS], &policy)) {
        return NULL;
    }
    for (int i = 0; is_read && i < ARGUMENT_COUNT; ++i) {
        is_read = as_sequence(given[i], name[i], &seq[i]) == 0;
    }
    if (is_read && (seq[OUTPUTS] == NULL || seq[INPUTS] == NULL)) {
        PyErr_Format(PyExc_TypeError, "%s is None; expected a list or a tuple",
                     name[seq[OUTPUTS] == NULL ? OUTPUTS : INPUTS]);
    } else if (is_read) {
        result = run_input_pass(module, seq, policy);
    }
    for (int i = 0; i < ARGUMENT_COUNT; ++i) {
        Py_XDECREF(seq[i]);
    }
    return result;
}

PyDoc_STRVAR(weight_pass_doc,
             "weight_pass(weights, param_groups, retain_graph, policy, /)\n--\n\n"
             "The weight pass of the groups; returns the weights as a list or tuple, empty for\n"
             "None. See zbpipe.stage_backward_weight.");

static PyObject *weight_pass(PyObject *module, PyObject *args)
{
    PyObject *given_weights, *given_groups, *weights = NULL, *seq = NULL, *result = NULL;
    zbp_group **groups = NULL;
    Py_ssize_t count;
    PyObject *policy;
    int retain;
    bool main_grad = false;
    zbp_how how = {.is_anomaly = zbp_in_anomaly_mode()};

    if (!PyArg_ParseTuple(args, "OOpO:weight_pass", &given_weights, &given_groups, &retain,
                          &policy) ||
        zbp_read_flag(policy, "fused", &how.fuse) < 0 ||
        zbp_read_flag(policy, "main_grad", &main_grad) < 0) {
        return NULL;
    }
    how.retain = retain != 0;
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
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *item = PySequence_Fast_GET_ITEM(seq, i);
        if (!Py_IS_TYPE(item, zbp_group_type(module))) {
            PyErr_Format(PyExc_TypeError,
                         "param_groups[%zd] is a %s; expected a ParamGroup, as "
                         "zbpipe.stage_backward_input returns them",
                         i, Py_TYPE(item)->tp_name);
            goto done;
        }
        groups[i] = zbp_group_of(item);
    }
    if (zbp_run_weight_pass(groups, (size_t)count, weights, how, main_grad) == 0) {
        result = weights != NULL ? Py_NewRef(weights) : PyTuple_New(0);
    }

done:
    PyMem_Free(groups);
    Py_XDECREF(weights);
    Py_XDECREF(seq);
    return result;
}

static PyMethodDef passes_methods[] = {{"input_pass", input_pass, METH_VARARGS, input_pass_doc},
                                       {"weight_pass", weight_pass, METH_VARARGS, weight_pass_doc},
                                       {NULL, NULL, 0, NULL}};

int zbp_add_passes(PyObject *module)
{
    return PyModule_AddFunctions(module, passes_methods);
}
