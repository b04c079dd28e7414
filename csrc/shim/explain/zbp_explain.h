/* zbp_explain.h - what an input pass would leave to W, and why. Conventions: zbp_shim.h. */
#ifndef ZBP_EXPLAIN_H
#define ZBP_EXPLAIN_H

#include <Python.h>

#include <stdint.h>

#include "shim/explain/zbp_account.h"
#include "shim/pass/zbp_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Begins it; outputs, inputs, weights: seqs of tensors. zbp_pass_survey comes next (csrc/pass), with the GIL
 * held: it plans I, runs nothing, changes nothing and looks at no saved tensor: what I would refuse for one that was
 * changed is I's to refuse. Errors: what is no tensor. */
ZBP_MUST_USE int zbp_explain_new(PyObject *outputs, PyObject *inputs, PyObject *weights,
                                 zbp_policy policy, zbp_scene **scene_out, zbp_error *error);

/* An edge towards weights. */
typedef struct zbp_explain_edge {
    uint32_t slot;      /* its position among the node's edges */
    zbp_shape shape;    /* of the gradient there */
    const char *way;    /* NULL where W adds to the weight directly; else what lies between */
    zbp_places weights; /* behind it */
} zbp_explain_edge;

/* Who is told: of each group, in I's order, of its tasks, in zbp_group_account()'s order, and of their edges. As
 * zbp_account_visitor; the weights are borrowed until the next group. */
typedef struct zbp_explain_visitor {
    void *arg;
    int (*group)(void *arg, PyObject *weights);
    /* node: the autograd node, name: its name. kind: "product", "deferred", "whole" or "root". why: one of
     * "separable", "root", "post hook", "policy", "function", "unknown", "packed", "light": see zbp_kind.h. */
    int (*task)(void *arg, PyObject *node, const char *name, const char *kind, const char *why);
    int (*edge)(void *arg, const zbp_explain_edge *edge);
} zbp_explain_visitor;

/* Ends it, with what zbp_pass_survey returned and raised, before the survey goes; if that was ZBP_OK, tells what is
 * planned. Frees the scene. Errors: what a visitor has set or the policy's functions raise, a graph that has been
 * consumed. */
ZBP_MUST_USE int zbp_explain_end(zbp_scene *scene, int status, zbp_error *error,
                                 const zbp_explain_visitor *visitor);

/* *out: 1 if hooks watch the accumulation of `tensor`: its own, its accumulator's, as those of DDP. */
ZBP_MUST_USE int zbp_is_watched(PyObject *tensor, int *out, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
