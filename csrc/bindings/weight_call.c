/* weight_call.c - a call of W: its groups claimed, what has changed since I refused, the pass run.
 *
 * Until the pass runs nothing has been changed, and whatever is refused leaves the groups as they were.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bindings/weight_call.h"
#include "core/base/zbp_map.h"
#include "pass/zbp_pass.h"
#include "shim/pass/zbp_weight.h"

/* Its groups are in its hands up to `claimed`. */
typedef struct weight_call {
    zbp_call *shim;
    zbp_group *const *group;
    size_t count, claimed;
} weight_call;

/* ---- groups */

static bool is_listed_before(const weight_call *call, size_t i)
{
    size_t other = 0;

    while (call->group[other] != call->group[i]) {
        ++other;
    }
    return other < i;
}

/* Raises why not all can be claimed: of the list, and only then of another call that has one. Always -1. */
static int refuse_claim(const weight_call *call)
{
    for (size_t i = 0; i < call->count; ++i) {
        const zbp_book *book = &call->group[i]->book;
        const bool is_others = i >= call->claimed && zbp_book_is_claimed(book);
        if (!is_others && book->state == ZBP_BOOK_SPENT) {
            PyErr_Format(PyExc_RuntimeError,
                         "param_groups[%zu] is spent: its weight pass has already run; pass "
                         "retain_graph=True to the first call to run it again",
                         i);
            return -1;
        }
        if (is_listed_before(call, i)) {
            PyErr_Format(PyExc_ValueError, "param_groups[%zu] is listed twice", i);
            return -1;
        }
    }
    PyErr_Format(PyExc_RuntimeError,
                 "param_groups[%zu] is already running in another call of stage_backward_weight",
                 call->claimed);
    return -1;
}

static int claim(weight_call *call)
{
    for (; call->claimed < call->count; ++call->claimed) {
        zbp_book *book = &call->group[call->claimed]->book;
        if (!zbp_book_claim(book)) {
            return refuse_claim(call);
        }
        if (book->state == ZBP_BOOK_SPENT) {
            zbp_book_give_back(book);
            return refuse_claim(call);
        }
    }
    return 0;
}

/* The groups are given back before they may go. What goes may run Python code. */
static void end_call(weight_call *call)
{
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    for (size_t i = 0; i < call->claimed; ++i) {
        zbp_group_forget_main_grads(call->group[i]);
        zbp_book_give_back(&call->group[i]->book);
    }
    zbp_call_free(call->shim);
    PyErr_Restore(type, value, traceback);
}

/* ---- what has changed since I */

static int check_leaves(const weight_call *call)
{
    zbp_error error = {0};
    bool is_computed = false;

    for (size_t i = 0; i < call->count; ++i) {
        zbp_group *group = call->group[i];
        for (uint32_t w = 0; w < group->layout.weight_count; ++w) {
            if (group->book.weight[w].is_added) {
                continue;
            }
            if (zbp_weight_is_computed(group, w, &is_computed, &error) != ZBP_OK) {
                return zbp_fail(&error);
            }
            if (!is_computed) {
                continue;
            }
            PyObject *words = zbp_or_raise(zbp_weight_describe(group, w, &error), &error);
            if (words != NULL) {
                PyErr_Format(PyExc_RuntimeError,
                             "leaf variable has been moved into the graph interior: %U, for which "
                             "param_groups[%zu] holds a gradient, was changed in place, since the "
                             "forward, by something that needs a gradient; change weights under "
                             "torch.no_grad(), and run the microbatch again",
                             words, i);
                Py_DECREF(words);
            }
            return -1;
        }
    }
    return 0;
}

/* Raises it, if there is one. */
static int refuse_modified(size_t i, zbp_modified *modified)
{
    static const char *const what[] = {
        [ZBP_MODIFIED_HELD] = " holds for the weight pass",
        [ZBP_MODIFIED_OUTSIDE] = " needs where its weights were computed",
        [ZBP_MODIFIED_RECOMPUTED] = " would read to compute a checkpointed region again"};
    static const char *const advice[] = {
        [ZBP_MODIFIED_HELD] =
            "If something overwrites it between the two passes, clone it before. If "
            "a later node of the same backward does, leave the weight to the input "
            "pass with policy(exclude=[weight]), or give that node a clone.",
        [ZBP_MODIFIED_OUTSIDE] = "Run the weight pass before it changes.",
        [ZBP_MODIFIED_RECOMPUTED] = "With checkpoint=\"recompute\", run the weight pass of all "
                                    "groups of a microbatch before "
                                    "weights or inputs change, or choose checkpoint=\"keep\"."};

    if (modified->role == ZBP_MODIFIED_NONE) {
        return 0;
    }
    PyObject *reader = modified->reader != NULL
                           ? PyUnicode_FromFormat(" It is read by %U.", modified->reader)
                           : PyUnicode_FromString("");
    if (reader != NULL) {
        PyErr_Format(PyExc_RuntimeError,
                     "one of the variables needed for gradient computation has been modified by an "
                     "inplace operation: %U, which param_groups[%zu]%s, is at version %u; expected "
                     "version %u instead.%U %s",
                     modified->tensor, i, what[modified->role], (unsigned int)modified->now,
                     (unsigned int)modified->seen, reader, advice[modified->role]);
    }
    Py_XDECREF(reader);
    Py_CLEAR(modified->tensor);
    Py_CLEAR(modified->reader);
    return -1;
}

/* Of an I's list of weights that regions read: the last node for which its groups compute one again. */
typedef struct last_read {
    uint64_t recomputed_for;
    size_t group;
} last_read;

/* Each list once. last: as many as there are groups. */
static int check_recomputed(const weight_call *call, zbp_map *lists, last_read *last)
{
    zbp_error error = {0};
    zbp_modified modified = {0};

    for (size_t i = 0; i < call->count; ++i) {
        const void *list = zbp_group_reads(call->group[i]);
        const uint64_t now = list != NULL ? zbp_group_recomputed_for(call->group[i]) : 0;
        uint32_t number = lists->count;

        if (now == 0) {
            continue;
        }
        if (zbp_map_add(lists, list, number, &number, NULL) != ZBP_OK) {
            PyErr_NoMemory();
            return -1;
        }
        if (now > last[number].recomputed_for) {
            last[number] = (last_read){now, i};
        }
    }
    for (uint32_t n = 0; n < lists->count; ++n) {
        const size_t i = last[n].group;
        if (zbp_reads_modified(call->group[i], last[n].recomputed_for, &modified, &error) !=
            ZBP_OK) {
            return zbp_fail(&error);
        }
        if (refuse_modified(i, &modified) < 0) {
            return -1;
        }
    }
    return 0;
}

static int check_unmodified(const weight_call *call)
{
    zbp_error error = {0};
    zbp_modified modified = {0};
    zbp_map lists = {0};
    bool has_lists = false;

    for (size_t i = 0; i < call->count; ++i) {
        if (zbp_group_modified(call->group[i], &modified, &error) != ZBP_OK) {
            return zbp_fail(&error);
        }
        if (refuse_modified(i, &modified) < 0) {
            return -1;
        }
        has_lists = has_lists || zbp_group_reads(call->group[i]) != NULL;
    }
    if (!has_lists) {
        return 0;
    }
    last_read *last = PyMem_Calloc(call->count, sizeof *last);
    if (last == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    const int status = check_recomputed(call, &lists, last);
    zbp_map_fini(&lists);
    PyMem_Free(last);
    return status;
}

static int check_capture(const weight_call *call)
{
    zbp_error error = {0};

    for (size_t i = 0; i < call->count; ++i) {
        bool then = false, now = false;
        if (zbp_group_captures(call->group[i], &then, &now, &error) != ZBP_OK) {
            return zbp_fail(&error);
        }
        if (then != now) {
            PyErr_Format(
                PyExc_RuntimeError,
                "param_groups[%zu] was made by an input pass %s the capture of a CUDA graph, and "
                "its weight pass is called %s, where it would read memory that a replay "
                "overwrites; capture both passes in one graph, or neither",
                i, then ? "within" : "outside", then ? "outside of it" : "within one");
            return -1;
        }
    }
    return 0;
}

/* ---- main_grad */

/* Its main_grad; *value_out is new, NULL for None and where there is none. */
static int get_main_grad(PyObject *weight, PyObject **value_out)
{
    *value_out = PyObject_GetAttrString(weight, "main_grad");
    if (*value_out == Py_None) {
        Py_CLEAR(*value_out);
    } else if (*value_out == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
    }
    return 0;
}

/* The weight is added to its main_grad if it has one; then it is appended to `found`. */
static int take_main_grad(zbp_group *group, uint32_t w, PyObject *found)
{
    zbp_error error = {0};
    PyObject *main_grad = NULL;
    PyObject *weight = zbp_or_raise(zbp_weight_wrap(group, w, &error), &error);
    int status = weight != NULL ? get_main_grad(weight, &main_grad) : -1;

    if (main_grad != NULL) {
        status = zbp_weight_set_main_grad(group, w, main_grad, &error) == ZBP_OK
                     ? PyList_Append(found, weight)
                     : zbp_fail(&error);
    }
    Py_XDECREF(main_grad);
    Py_XDECREF(weight);
    return status;
}

/* So that hooks that would add .grad to main_grad see that there is nothing left to add. */
static int announce(PyObject *weights)
{
    static const char flag[] = "grad_added_to_main_grad";
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(weights); ++i) {
        PyObject *weight = PyList_GET_ITEM(weights, i);
        if (PyObject_HasAttrString(weight, flag) &&
            PyObject_SetAttrString(weight, flag, Py_True) < 0) {
            return -1;
        }
    }
    return 0;
}

/* A weight with an attribute main_grad that is a tensor is accumulated there, and its attribute
 * grad_added_to_main_grad, if it has one, becomes True. Until all have been looked at nothing is changed. */
static int find_main_grads(const weight_call *call)
{
    PyObject *found = PyList_New(0);
    int status = found != NULL ? 0 : -1;

    for (size_t i = 0; status == 0 && i < call->count; ++i) {
        zbp_group *group = call->group[i];
        for (uint32_t w = 0; status == 0 && w < group->layout.weight_count; ++w) {
            status = take_main_grad(group, w, found);
        }
    }
    if (status == 0) {
        status = announce(found);
    }
    Py_XDECREF(found);
    return status;
}

/* ---- the call */

static int run(weight_call *call, zbp_how how)
{
    zbp_error error = {0};
    int status = zbp_call_begin(call->shim, &error);

    if (status != ZBP_OK) {
        return zbp_fail(&error);
    }
    Py_BEGIN_ALLOW_THREADS status = zbp_pass_weights(call->group, call->count, how, &error);
    Py_END_ALLOW_THREADS const bool is_complete = status == ZBP_OK;
    status = zbp_call_end(call->shim, status, &error);
    for (size_t i = 0; is_complete && status != ZBP_OK && i < call->count; ++i) {
        zbp_book_report_again(&call->group[i]->book);
    }
    return status == ZBP_OK ? 0 : zbp_fail(&error);
}

int zbp_run_weight_pass(zbp_group *const *groups, size_t count, zbp_how how, bool main_grad)
{
    weight_call call = {.group = groups, .count = count};
    zbp_error error = {0};
    int status = -1;

    if (zbp_call_new(groups, count, &call.shim, &error) != ZBP_OK) {
        return zbp_fail(&error);
    }
    if (claim(&call) == 0 && check_leaves(&call) == 0 && check_unmodified(&call) == 0 &&
        check_capture(&call) == 0 && (!main_grad || find_main_grads(&call) == 0)) {
        status = run(&call, how);
    }
    end_call(&call);
    return status;
}
