/* zbp_explain.h - what an input pass would leave to W, and why. Conventions: zbp_shim.h. */
#ifndef ZBP_EXPLAIN_H
#define ZBP_EXPLAIN_H

#include <Python.h>

#include "shim/pass/zbp_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Begins it; outputs, inputs, weights: seqs of tensors. zbp_pass_survey comes next (csrc/pass), with the GIL
 * held: it plans I, runs nothing, changes nothing and
 * looks at no saved tensor: what I would refuse for one that was changed is I's to refuse. Errors: what is no tensor. */
ZBP_MUST_USE int zbp_explain_new(PyObject *outputs, PyObject *inputs, PyObject *weights,
                                 zbp_policy policy, zbp_scene **scene_out);

/* Ends it, with what zbp_pass_survey returned and raised, before the survey goes. Frees the scene.
 *
 * New list with a list per group, in I's order, with a tuple per weight task, in
 * zbp_group_account()'s order:
 *
 *     (node, name, kind, why, edges)
 *
 * node: the autograd node, name: its name. kind: "product", "deferred", "whole" or "root". why: one of
 * "separable", "root", "post hook", "policy", "function", "unknown", "packed", "light": see zbp_kind.h.
 * edges: list with a tuple per edge towards weights:
 *
 *     (slot, shape, way, weights)
 *
 * slot: its position among the node's edges. shape: of the gradient there, empty for a nested tensor.
 * way: None where W adds to the weight directly; else what lies between, a str. weights: list of the leaf
 * tensors behind it.
 * NULL with an error set: what the policy's functions raise, a graph that has been consumed. */
PyObject *zbp_explain_end(zbp_scene *scene, int status, zbp_error *error);

/* *out: 1 if hooks watch the accumulation of `tensor`: its own, its accumulator's, as those of DDP. */
ZBP_MUST_USE int zbp_is_watched(PyObject *tensor, int *out);

#ifdef __cplusplus
}
#endif

#endif
