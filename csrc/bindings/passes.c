/* passes.c - the input pass and the weight pass. The work is that of csrc/pass; here arguments are handed to the shim
 * and results wrapped. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "bindings/weight_call.h"
#include "pass/zbp_pass.h"
#include "shim/pass/zbp_describe.h"

/* NULL for None. */
static PyObject *tuple_or_null(PyObject *object)
{
    return object != Py_None ? object : NULL;
}

/* Raises it for what is neither a tuple nor, where that may be, None. */
static int check_tuple(PyObject *object, const char *name, bool may_be_none)
{
    if (PyTuple_Check(object) || (may_be_none && object == Py_None)) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s is a %s; expected a tuple", name, Py_TYPE(object)->tp_name);
    return -1;
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
    "All but policy, a zbpipe.Policy, are tuples; grads and weights may be None.\n"
    "Raises RunError, with the original as its cause, if the backward itself failed;\n"
    "other errors refuse the arguments, and nothing was touched.");

static PyObject *input_pass(PyObject *module, PyObject *args)
{
    PyObject *outputs, *grads, *inputs, *weights, *given_policy, *excluded, *result = NULL;
    PyObject *dinputs = NULL, *list;
    zbp_group **groups = NULL;
    size_t group_count = 0;
    zbp_policy policy = {.main_grad = false};
    zbp_scene *scene = NULL;
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "OOOOO:input_pass", &outputs, &grads, &inputs, &weights,
                          &given_policy) ||
        check_tuple(outputs, "outputs", false) < 0 ||
        check_tuple(grads, "output_grads", true) < 0 || check_tuple(inputs, "inputs", false) < 0 ||
        check_tuple(weights, "weights", true) < 0 || zbp_read_policy(given_policy, &policy) < 0) {
        return NULL;
    }
    excluded = PyObject_GetAttrString(given_policy, "exclude");
    if (excluded == NULL || check_tuple(excluded, "policy.exclude", false) < 0) {
        Py_XDECREF(excluded);
        return NULL;
    }
    int status = zbp_scene_new(policy, outputs, tuple_or_null(grads), inputs,
                               tuple_or_null(weights), excluded, &scene, &error);
    Py_DECREF(excluded);
    if (status != ZBP_OK) {
        return zbp_error_raise(&error);
    }
    status = zbp_pass_inputs(scene, &error);
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

PyDoc_STRVAR(weight_pass_doc,
             "weight_pass(param_groups, retain_graph, policy, /)\n--\n\n"
             "The weight pass of the groups, a tuple. See zbpipe.stage_backward_weight.");

/* Borrowed from `list`; *groups_out: PyMem_Free. */
static int get_groups(PyObject *module, PyObject *list, zbp_group ***groups_out)
{
    const Py_ssize_t count = PyTuple_GET_SIZE(list);

    *groups_out = PyMem_New(zbp_group *, (size_t)count + 1);
    if (*groups_out == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject *item = PyTuple_GET_ITEM(list, i);
        if (!Py_IS_TYPE(item, zbp_group_type(module))) {
            PyErr_Format(PyExc_TypeError,
                         "param_groups[%zd] is a %s; expected a ParamGroup, as "
                         "zbpipe.stage_backward_input returns them",
                         i, Py_TYPE(item)->tp_name);
            return -1;
        }
        (*groups_out)[i] = zbp_group_in(item);
    }
    return 0;
}

static PyObject *weight_pass(PyObject *module, PyObject *args)
{
    PyObject *list, *policy;
    zbp_group **groups = NULL;
    int retain, status;
    bool main_grad = false;
    zbp_how how = {.is_anomaly = zbp_in_anomaly_mode()};

    if (!PyArg_ParseTuple(args, "O!pO:weight_pass", &PyTuple_Type, &list, &retain, &policy) ||
        zbp_read_flag(policy, "fused", &how.fuse) < 0 ||
        zbp_read_flag(policy, "main_grad", &main_grad) < 0) {
        return NULL;
    }
    how.retain = retain != 0;
    status = get_groups(module, list, &groups);
    if (status == 0) {
        status = zbp_run_weight_pass(groups, (size_t)PyTuple_GET_SIZE(list), how, main_grad);
    }
    PyMem_Free(groups);
    return status == 0 ? Py_NewRef(Py_None) : NULL;
}

static PyMethodDef passes_methods[] = {{"input_pass", input_pass, METH_VARARGS, input_pass_doc},
                                       {"weight_pass", weight_pass, METH_VARARGS, weight_pass_doc},
                                       {NULL, NULL, 0, NULL}};

int zbp_add_passes(PyObject *module)
{
    return PyModule_AddFunctions(module, passes_methods);
}
