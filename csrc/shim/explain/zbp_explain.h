/* zbp_explain.h - what an input pass would leave to W, and why. Conventions: zbp_shim.h. */
#ifndef ZBP_EXPLAIN_H
#define ZBP_EXPLAIN_H

#include <Python.h>

#include "shim/pass/zbp_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans I, runs nothing and changes nothing. outputs, inputs, weights: seqs of tensors.
 *
 * New list with a list per group, in zbp_input_pass()'s order, with a tuple per weight task, in
 * zbp_group_account()'s order:
 *
 *     (node, name, kind, why, edges)
 *
 * node: the autograd node, name: its name. kind: "product", "deferred", "whole" or "root". why: one of
 * "separable", "root", "post hook", "policy", "function", "unknown", "packed", "light": see group.h's Why.
 * edges: list with a tuple per edge towards weights:
 *
 *     (slot, shape, way, weights)
 *
 * slot: its position among the node's edges. shape: of the gradient there, empty for a nested tensor.
 * way: None where W adds to the weight directly; else what lies between, a str. weights: list of the leaf
 * tensors behind it.
 * NULL with an error set: what the policy's functions raise, a graph that has been consumed. */
PyObject *zbp_explain(PyObject *outputs, PyObject *inputs, PyObject *weights, zbp_policy policy);

/* *out: 1 if hooks watch the accumulation of `tensor`: its own, its accumulator's, as those of DDP. */
ZBP_MUST_USE int zbp_is_watched(PyObject *tensor, int *out);

#ifdef __cplusplus
}
#endif

#endif
