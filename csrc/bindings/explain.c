/* explain.c - what an input pass would leave to W: see zbpipe/_explain.py. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "shim/zbp_explain.h"

PyDoc_STRVAR(explain_doc, "explain(outputs, inputs, weights, defer, checkpoint, /)\n--\n\n"
                          "The plan of an input pass, which does not run. See zbpipe.explain.");

static PyObject *explain(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *outputs, *inputs, *weights, *defer, *checkpoint;
    zbp_policy policy;
    if (!PyArg_ParseTuple(args, "O!O!O!OO:explain", &PyTuple_Type, &outputs, &PyTuple_Type, &inputs,
                          &PyTuple_Type, &weights, &defer, &checkpoint) ||
        zbp_parse_choice(defer, "defer", ZBP_DEFER_ALL, &policy.defer, &policy.defer_of) < 0 ||
        zbp_parse_choice(checkpoint, "checkpoint", ZBP_CHECKPOINT_INPUT_PASS, &policy.checkpoint,
                         &policy.checkpoint_of) < 0) {
        return NULL;
    }
    return zbp_explain(outputs, inputs, weights, policy);
}

PyDoc_STRVAR(is_watched_doc,
             "is_watched(tensor, /)\n--\n\nTrue if hooks watch its accumulation, as DDP's do.");

static PyObject *is_watched(PyObject *Py_UNUSED(module), PyObject *tensor)
{
    int answer = 0;
    return zbp_is_watched(tensor, &answer) == ZBP_OK ? PyBool_FromLong(answer) : NULL;
}

static PyMethodDef explain_methods[] = {{"explain", explain, METH_VARARGS, explain_doc},
                                        {"is_watched", is_watched, METH_O, is_watched_doc},
                                        {NULL, NULL, 0, NULL}};

int zbp_add_explain(PyObject *module)
{
    return PyModule_AddFunctions(module, explain_methods);
}
