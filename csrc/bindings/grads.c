/* grads.c - an assignment to a parameter group's 'grads': the output gradients from which W then starts. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"
#include "shim/explain/zbp_tasks.h"
#include "shim/torch/zbp_tensor.h"

/* New tuple of what `value` lists, with a tuple for each entry that is a sequence and None for one that is not. Python
 * code runs here, and no more afterwards. */
static PyObject *list_entries(PyObject *value)
{
    PyObject *seq = PySequence_Tuple(value);

    if (seq == NULL) {
        PyErr_Format(PyExc_TypeError,
                     "grads is a %s; expected a list with a tuple per intermediate",
                     Py_TYPE(value)->tp_name);
        return NULL;
    }
    PyObject *entries = PyTuple_New(PyTuple_GET_SIZE(seq));
    for (Py_ssize_t i = 0; entries != NULL && i < PyTuple_GET_SIZE(seq); ++i) {
        PyObject *entry = PySequence_Tuple(PyTuple_GET_ITEM(seq, i));
        if (entry == NULL) {
            PyErr_Clear();
            entry = Py_NewRef(PyTuple_GET_ITEM(seq, i));
        }
        PyTuple_SET_ITEM(entries, i, entry);
    }
    Py_DECREF(seq);
    return entries;
}

/* As a whole node's gradients read: given back like that they change nothing. */
static bool is_tuple_of_none(PyObject *entry)
{
    bool is_none = PyTuple_Check(entry);

    for (Py_ssize_t i = 0; is_none && i < PyTuple_GET_SIZE(entry); ++i) {
        is_none = PyTuple_GET_ITEM(entry, i) == Py_None;
    }
    return is_none;
}

static bool is_left_alone(const zbp_turn *turn, uint32_t t, PyObject *entry)
{
    return turn->layout->task[t].kind == ZBP_TASK_WHOLE && is_tuple_of_none(entry);
}

/* The task's node in words: new, or NULL with an error set. */
static PyObject *name_of(const zbp_turn *turn, uint32_t t)
{
    zbp_error error = {0};
    PyObject *name = zbp_or_raise(zbp_task_name(turn->held, t, &error), &error);

    if (name == Py_None) {
        Py_DECREF(name);
        name = PyUnicode_FromString("a node");
    }
    return name;
}

/* Raises what is wrong with the entry of a task that can run again, or nothing. */
static int check_entry(const zbp_turn *turn, uint32_t t, PyObject *entry)
{
    const Py_ssize_t outputs = (Py_ssize_t)zbp_task_grad_count(turn->held, t);

    if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != outputs) {
        PyObject *name = name_of(turn, t);
        if (name != NULL && !PyTuple_Check(entry)) {
            PyErr_Format(
                PyExc_TypeError,
                "grads[%u] is a %s; expected a tuple with a tensor or None per output of %U",
                (unsigned int)t, Py_TYPE(entry)->tp_name, name);
        } else if (name != NULL) {
            PyErr_Format(PyExc_ValueError, "grads[%u] has %zd entries; %U has %zd outputs",
                         (unsigned int)t, PyTuple_GET_SIZE(entry), name, outputs);
        }
        Py_XDECREF(name);
        return -1;
    }
    for (Py_ssize_t i = 0; i < outputs; ++i) {
        PyObject *grad = PyTuple_GET_ITEM(entry, i);
        if (grad != Py_None && zbp_tensor_key(grad) == NULL) {
            PyErr_Format(PyExc_TypeError, "grads[%u][%zd] is a %s; expected a tensor or None",
                         (unsigned int)t, i, Py_TYPE(grad)->tp_name);
            return -1;
        }
    }
    return 0;
}

static int add_entry(const zbp_turn *turn, zbp_grads *grads, uint32_t t, PyObject *entry)
{
    zbp_error error = {0};

    if (!zbp_task_can_run_again(turn->held, t)) {
        PyObject *name = name_of(turn, t);
        if (name != NULL) {
            PyErr_Format(PyExc_ValueError,
                         "grads[%u] is for %U that ran whole in the input pass and let go of what "
                         "it had saved; its weights' gradients cannot be computed again",
                         (unsigned int)t, name);
            Py_DECREF(name);
        }
        return -1;
    }
    if (check_entry(turn, t, entry) < 0) {
        return -1;
    }
    return zbp_grads_add(grads, t, entry, &error) == ZBP_OK ? 0 : zbp_fail(&error);
}

/* Nothing is changed before all are known to fit. */
static int set_entries(const zbp_turn *turn, PyObject *entries)
{
    const uint32_t tasks = turn->layout->task_count;
    zbp_grads *grads = NULL;
    zbp_error error = {0};
    int status = 0;

    if (PyTuple_GET_SIZE(entries) != (Py_ssize_t)tasks) {
        PyErr_Format(PyExc_ValueError, "grads has %zd entries; the group has %u intermediates",
                     PyTuple_GET_SIZE(entries), (unsigned int)tasks);
        return -1;
    }
    if (zbp_grads_new(turn->held, &grads, &error) != ZBP_OK) {
        return zbp_fail(&error);
    }
    for (uint32_t t = 0; status == 0 && t < tasks; ++t) {
        PyObject *entry = PyTuple_GET_ITEM(entries, (Py_ssize_t)t);
        status = is_left_alone(turn, t, entry) ? 0 : add_entry(turn, grads, t, entry);
    }
    if (status == 0) {
        zbp_grads_give(grads);
    }
    zbp_grads_free(grads);
    return status;
}

int zbp_group_set_grads(const zbp_group *group, PyObject *value)
{
    const zbp_turn turn = zbp_group_turn(group);
    PyObject *entries = list_entries(value);
    int status = -1;

    if (entries == NULL) {
        return -1;
    }
    if (zbp_book_is_claimed(turn.book)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "'grads' cannot be read while the group's weight pass runs");
    } else if (turn.book->state != ZBP_BOOK_OPEN) {
        PyErr_SetString(PyExc_KeyError, "grads: the weight pass of this group has already run");
    } else {
        status = set_entries(&turn, entries);
    }
    Py_DECREF(entries);
    return status;
}
