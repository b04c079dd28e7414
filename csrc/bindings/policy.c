/* policy.c - what a zbpipe.Policy says, as numbers. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/parts.h"

/* The number of the word that the policy has under `name`. Returns -1 with an error set. */
static int read_word(PyObject *policy, const char *name, const char *const *words, int count)
{
    PyObject *value = PyObject_GetAttrString(policy, name);
    int number = -1;

    for (int i = 0; value != NULL && PyUnicode_Check(value) && i < count; ++i) {
        if (PyUnicode_CompareWithASCIIString(value, words[i]) == 0) {
            number = i;
        }
    }
    if (value != NULL && number < 0) {
        PyErr_Format(PyExc_ValueError,
                     "policy.%s is %R; expected one of the words of a zbpipe.Policy", name, value);
    }
    Py_XDECREF(value);
    return number;
}

int zbp_read_flag(PyObject *policy, const char *name, bool *out)
{
    PyObject *value = PyObject_GetAttrString(policy, name);
    const int truth = value != NULL ? PyObject_IsTrue(value) : -1;

    Py_XDECREF(value);
    *out = truth == 1;
    return truth < 0 ? -1 : 0;
}

int zbp_read_policy(PyObject *policy, zbp_policy *out)
{
    static const char *const defer[] = {[ZBP_DEFER_NOTHING] = "nothing",
                                        [ZBP_DEFER_MATRICES] = "matrices",
                                        [ZBP_DEFER_ALL] = "all"};
    static const char *const checkpoint[] = {[ZBP_CHECKPOINT_KEEP] = "keep",
                                             [ZBP_CHECKPOINT_RECOMPUTE] = "recompute",
                                             [ZBP_CHECKPOINT_INPUT_PASS] = "input_pass"};
    const int deferred = read_word(policy, "defer", defer, 3);
    const int packed = deferred >= 0 ? read_word(policy, "checkpoint", checkpoint, 3) : -1;

    *out = (zbp_policy){.leaves = {(uint8_t)deferred, (uint8_t)packed}};
    return packed >= 0 ? zbp_read_flag(policy, "main_grad", &out->main_grad) : -1;
}
