/* passes.c - the input pass, the weight pass, and what Functions hand over from one to the other.
 * Arguments are handed to the shim and results wrapped. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "shim/group/zbp_describe.h"
#include "shim/weight/zbp_weight.h"

/* A converter for PyArg_ParseTuple: NULL for None. */
static int tuple_or_null(PyObject *object, void *out)
{
    *(PyObject **)out = object != Py_None ? object : NULL;
    if (object == Py_None || PyTuple_Check(object)) {
        return 1;
    }
    PyErr_Format(PyExc_TypeError, "got a %s; expected a tuple or None", Py_TYPE(object)->tp_name);
    return 0;
}

/* Reads a zbpipe.Policy; *excluded_out is borrowed from it. 0, or -1 with an error set. */
static int read_policy(PyObject *policy, zbp_policy *out, PyObject **excluded_out)
{
    PyObject *given = PyObject_CallMethod(policy, "_choices", NULL);
    const bool is_read =
        given != NULL && PyArg_ParseTuple(given, "bbbbO!:_choices", &out->defer, &out->checkpoint,
                                          &out->main_grad, &out->fuse, &PyTuple_Type, excluded_out);

    Py_XDECREF(given);
    return is_read ? 0 : -1;
}

/* The error that is set, as an object; it is set no more. */
static PyObject *take_error(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL) {
        PyException_SetTraceback(error, traceback);
    }
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return error;
}

/* Calls of I and W that have begun and not ended, of all threads and of this one. They begin and
 * end with the GIL. */
static size_t running;
static _Thread_local size_t running_here;

/* by: 1 or -1. */
static void count_passes(int by)
{
    running += (size_t)by;
    running_here += (size_t)by;
}

bool zbp_passes_run_elsewhere(void)
{
    return running != running_here;
}

PyDoc_STRVAR(
    input_pass_doc,
    "input_pass(outputs, output_grads, inputs, weights, policy, /)\n--\n\n"
    "The input pass: (dinputs, param_groups). See zbpipe.stage_backward_input; an output\n"
    "whose gradient is False is detached with the others, and no backward starts from it.\n"
    "All but policy, a zbpipe.Policy, are tuples; grads and weights may be None.\n"
    "Returns the exception if the backward itself raised one; what is raised refuses the\n"
    "arguments, and nothing was touched.");

static PyObject *input_pass(PyObject *module, PyObject *args)
{
    PyObject *policy, *result;
    zbp_input_args given = {0};
    zbp_error error = {0};
    bool has_begun = false;

    if (!PyArg_ParseTuple(args, "O!O&O!O&O:input_pass", &PyTuple_Type, &given.outputs,
                          tuple_or_null, &given.grads, &PyTuple_Type, &given.inputs, tuple_or_null,
                          &given.weights, &policy) ||
        read_policy(policy, &given.policy, &given.excluded) < 0) {
        return NULL;
    }
    count_passes(1);
    result = zbp_or_raise(
        zbp_input_call(&given, zbp_group_wrap, *zbp_group_type(module), &has_begun, &error),
        &error);
    if (result == NULL && has_begun && PyErr_ExceptionMatches(PyExc_Exception)) {
        result = take_error();
    }
    count_passes(-1);
    return result;
}

/* ---- the weight pass */

/* Groups of a tuple, which owns them; the books of the first `claimed` are in the call's hands. */
typedef struct weight_call {
    zbp_group **group;
    size_t count, claimed;
} weight_call;

/* Claims the groups' books. -1, with an error set, at one that is another call's, or spent. */
static int claim(weight_call *call, PyObject *module, PyObject *tuple)
{
    call->count = (size_t)PyTuple_GET_SIZE(tuple);
    call->group = PyMem_New(zbp_group *, call->count + 1);
    if (call->group == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < call->count; ++i) {
        PyObject *item = PyTuple_GET_ITEM(tuple, (Py_ssize_t)i);
        zbp_book *book;
        bool is_ours;

        if (!Py_IS_TYPE(item, *zbp_group_type(module))) {
            PyErr_SetString(PyExc_TypeError, "param_groups: expected ParamGroups");
            return -1;
        }
        call->group[i] = zbp_group_in(item);
        book = &call->group[i]->book;
        is_ours = zbp_book_claim(book);
        call->claimed += is_ours ? 1 : 0;
        if (!is_ours || book->is_spent) {
            PyErr_Format(PyExc_RuntimeError, "param_groups[%zu] %s", i,
                         is_ours ? "is spent: its weight pass has already run; pass "
                                   "retain_graph=True to the first call to run it again"
                                 : "is already running in another call of stage_backward_weight");
            return -1;
        }
    }
    return 0;
}

PyDoc_STRVAR(weight_pass_doc,
             "weight_pass(param_groups, retain_graph, policy, /)\n--\n\n"
             "The weight pass of the groups, a tuple. See zbpipe.stage_backward_weight.\n"
             "Each group is there once.");

static PyObject *weight_pass(PyObject *module, PyObject *args)
{
    PyObject *tuple, *policy, *excluded, *result = NULL;
    weight_call call = {0};
    int retain;
    zbp_policy said;
    zbp_how how = {0};
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "O!pO:weight_pass", &PyTuple_Type, &tuple, &retain, &policy) ||
        read_policy(policy, &said, &excluded) < 0) {
        return NULL;
    }
    how = (zbp_how){.retain = retain != 0, .fuse = said.fuse != 0};
    count_passes(1);
    if (claim(&call, module, tuple) == 0 &&
        zbp_weight_call(call.group, call.count, how, said.main_grad != 0, &error) == ZBP_OK) {
        result = Py_NewRef(Py_None);
    }
    for (size_t i = 0; i < call.claimed; ++i) {
        zbp_book_give_back(&call.group[i]->book);
    }
    PyMem_Free(call.group);
    count_passes(-1);
    return result != NULL || PyErr_Occurred() ? result : zbp_error_raise(&error);
}

PyDoc_STRVAR(is_watched_doc,
             "is_watched(tensor, /)\n--\n\nTrue if hooks watch its accumulation, as DDP's do.");

static PyObject *is_watched(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_is_watched(tensor, &error), &error);
}

/* ---- what Functions hand over in I: see zbpipe/_kernels/defer.py */

PyDoc_STRVAR(defer_doc, "defer(function, weights, saved, /)\n--\n\n"
                        "As zbpipe.defer; weights are a tuple or None, and a tuple is returned.\n"
                        "With None for function: True if work for weights would be left to W.");

static PyObject *defer(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *function, *weights, *saved;
    zbp_error error = {0};

    if (!PyArg_ParseTuple(args, "OOO!:defer", &function, &weights, &PyTuple_Type, &saved)) {
        return NULL;
    }
    return zbp_or_raise(zbp_defer(function, weights, saved, &error), &error);
}

PyMethodDef zbp_passes_functions[] = {{"input_pass", input_pass, METH_VARARGS, input_pass_doc},
                                      {"weight_pass", weight_pass, METH_VARARGS, weight_pass_doc},
                                      {"is_watched", is_watched, METH_O, is_watched_doc},
                                      {"defer", defer, METH_VARARGS, defer_doc},
                                      {NULL, NULL, 0, NULL}};
