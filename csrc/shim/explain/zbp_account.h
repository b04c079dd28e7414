/* zbp_account.h - what a parameter group holds, one weight task at a time. Conventions: zbp_shim.h. */
#ifndef ZBP_ACCOUNT_H
#define ZBP_ACCOUNT_H

#include <Python.h>

#include <stdint.h>

#include "shim/pass/zbp_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zbp_shape {
    const int64_t *size; /* -1 where it is not known as a number */
    size_t dims;         /* 0 also for a nested tensor */
} zbp_shape;

/* Weights of a group: where they stand among all of them, each once. */
typedef struct zbp_places {
    const uint32_t *place;
    size_t count;
} zbp_places;

/* A tensor that W will read. */
typedef struct zbp_account_tensor {
    /* "matrix", "output gradient", "light gradient" (of a vector, computed in I), "kept gradient" (of a matrix,
     * likewise), "saved" (by the node, or what work was given) or "waiting gradient". */
    const char *role;
    /* The same for tensors that share memory, NULL for one without a storage. */
    const void *storage;
    size_t bytes; /* of the whole storage */
    zbp_shape shape;
    PyObject *dtype, *device;
    zbp_places weights; /* whose gradients are computed from it */
} zbp_account_tensor;

/* Who is told: first of the group, then of each task, in the group's order, with its tensors; then of what is no task.
 * Each function returns 0, or -1 with a Python error set, which ends the account. What they get is borrowed until they
 * return; the weights until the account ends. */
typedef struct zbp_account_visitor {
    void *arg; /* their first argument */
    /* weights: tuple of the group's leaf tensors. */
    int (*group)(void *arg, PyObject *weights);
    /* node: the name of its autograd node, NULL if I let go of it. kind: "product", "deferred", "whole" or "root";
     * "handed over" for a whole node whose Function has left work to W; "outside" for a node between the tasks and
     * the weights, which W runs and which has saved something; "waiting" for a weight to which a W that
     * raised could not add its gradient. */
    int (*task)(void *arg, const char *node, const char *kind);
    int (*tensor)(void *arg, const zbp_account_tensor *tensor);
} zbp_account_visitor;

/* A spent group has no task. The tensors themselves are not told: nothing is unpacked, and nothing but the weights
 * can be kept alive. Errors: what a visitor has set; RuntimeError, nobody told, while the group's W runs. */
ZBP_MUST_USE int zbp_group_account(const zbp_group *group, const zbp_account_visitor *visitor,
                                   zbp_error *error);

/* *out: 1 if the group's W may read weights themselves, or what has their memory, beside what it holds: it runs nodes
 * again, or ones between its tasks and the weights, or unpacks what was saved. 0 otherwise, and for a spent group.
 * Called with the GIL held and no W of the group running. */
ZBP_MUST_USE int zbp_group_reads_weights(const zbp_group *group, int *out, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
