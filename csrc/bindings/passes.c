/* passes.c - the input pass, the weight pass, and what Functions hand over from one to the other.
 * Arguments are handed to the shim and results wrapped. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "shim/group/zbp_describe.h"
#include "shim/weight/zbp_weight.h"

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

size_t zbp_failures, zbp_running;
_Thread_local size_t zbp_running_here;

static void begin(void)
{
    zbp_running++;
    zbp_running_here++;
}

static void end(bool has_failed)
{
    zbp_running--;
    zbp_running_here--;
    zbp_failures += has_failed ? 1 : 0;
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

    if (!PyArg_ParseTuple(args, "O!OO!OO:input_pass", &PyTuple_Type, &given.outputs, &given.grads,
                          &PyTuple_Type, &given.inputs, &given.weights, &policy) ||
        read_policy(policy, &given.policy, &given.excluded) < 0) {
        return NULL;
    }
    begin();
    result = zbp_or_raise(
        zbp_input_call(&given, zbp_group_wrap, *zbp_group_type(module), &has_begun, &error),
        &error);
    end(result == NULL);
    if (result == NULL && has_begun && PyErr_ExceptionMatches(PyExc_Exception)) {
        result = take_error();
    }
    return result;
}

/* ---- the weight pass */

/* Groups of a tuple, which owns them; the books of the first `claimed` are in the call's hands. */
typedef struct weight_call {
    zbp_group **group;
    size_t count, claimed;
} weight_call;

/* Claims the groups' books. -1, with an error set, at one that is another call's, or spent. */
static int claim(weight_call *call, PyObject *tuple)
{
    call->count = (size_t)PyTuple_GET_SIZE(tuple);
    call->group = PyMem_New(zbp_group *, call->count + 1);
    if (call->group == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < call->count; ++i) {
        zbp_group *group = zbp_group_in(PyTuple_GET_ITEM(tuple, (Py_ssize_t)i), true);
        const bool is_ours = zbp_book_claim(&group->book);

        call->group[i] = group;
        call->claimed += is_ours ? 1 : 0;
        if (!is_ours || group->book.is_spent) {
            PyErr_Format(PyExc_RuntimeError, "param_groups[%zu] %s", i,
                         is_ours ? "is spent: its weight pass has already run; pass "
                                   "retain_graph=True to the first call to run it again"
                                 : "is in another call's hands, of stage_backward_weight or of "
                                   "memory.held; call again when that has returned");
            return -1;
        }
    }
    return 0;
}

PyDoc_STRVAR(weight_pass_doc,
             "weight_pass(param_groups, retain_graph, policy, /)\n--\n\n"
             "The weight pass of the groups, a tuple. See zbpipe.stage_backward_weight.\n"
             "Each is a ParamGroup, and there once.");

static PyObject *weight_pass(PyObject *Py_UNUSED(module), PyObject *args)
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
    begin();
    if (claim(&call, tuple) == 0 &&
        zbp_weight_call(call.group, call.count, how, said.main_grad != 0, &error) == ZBP_OK) {
        result = Py_NewRef(Py_None);
    }
    for (size_t i = 0; i < call.claimed; ++i) {
        zbp_book_give_back(&call.group[i]->book);
    }
    PyMem_Free(call.group);
    end(result == NULL);
    return result != NULL || PyErr_Occurred() ? result : zbp_error_raise(&error);
}

PyDoc_STRVAR(is_watched_doc,
             "is_watched(tensor, /)\n--\n\nTrue if hooks watch its accumulation, as DDP's do.");

static PyObject *is_watched(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_is_watched(tensor, &error), &error);
}

PyDoc_STRVAR(distrust_doc, "distrust(node_type, /)\n--\n\nNone of its nodes is split.");

static PyObject *distrust(PyObject *Py_UNUSED(module), PyObject *node_type)
{
    zbp_error error = {0};
    return zbp_or_raise(zbp_distrust(node_type, &error), &error);
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
                                      {"distrust", distrust, METH_O, distrust_doc},
                                      {"defer", defer, METH_VARARGS, defer_doc},
                                      {NULL, NULL, 0, NULL}};
