/* zbp_explain.h - what an input pass would leave to W, and why. Conventions: zbp_shim.h. */
#ifndef ZBP_EXPLAIN_H
#define ZBP_EXPLAIN_H

#include <Python.h>

#include "shim/pass/zbp_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a tensor is to the I that is planned. */
enum { ZBP_EXPLAIN_OUTPUT, ZBP_EXPLAIN_INPUT, ZBP_EXPLAIN_WEIGHT };

/* Adds one to a new scene (zbp_scene_new), which then begins (zbp_scene_begin); what requires no gradient is passed
 * over. zbp_pass_survey comes next (csrc/pass), with the GIL held: it plans I, runs nothing, changes nothing and looks
 * at no saved tensor: what I would refuse for one that was changed is I's to refuse. */
ZBP_MUST_USE int zbp_explain_add(zbp_scene *scene, int what, PyObject *tensor, zbp_error *error);

/* What the survey has found, with what zbp_pass_survey returned and raised, before the survey goes. Errors: what the
 * policy's functions raise, a graph that has been consumed. The scene is the caller's on (zbp_scene_free). */
ZBP_MUST_USE int zbp_explain_end(zbp_scene *scene, int status, zbp_error *error);

/* Its groups, in I's order; see zbp_tasks.h. Borrowed from the scene. */
size_t zbp_scene_group_count(const zbp_scene *scene);
zbp_turn zbp_scene_group(zbp_scene *scene, size_t i);

/* *out: 1 if hooks watch the accumulation of `tensor`: its own, its accumulator's, as those of DDP. */
ZBP_MUST_USE int zbp_is_watched(PyObject *tensor, int *out, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
