/* zbp_scene.h - what the input pass (csrc/pass/input_pass.c) asks of the shim: nodes are walked and
 * looked at, stand-ins and edges put in place, the engine run, the result handed over.
 *
 * Nothing here decides what runs, what is cut, what becomes of a node: that stands in a split
 * (zbp_split.h). All functions are called with the GIL held, by the thread that began the call, in the
 * order of input_pass.c; each returns ZBP_OK, or another status and *error says what was raised. No C++
 * exception leaves a function.
 */
#ifndef ZBP_SCENE_H
#define ZBP_SCENE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/pass/zbp_split.h"
#include "shim/torch/zbp_error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What one call of I is about: outputs, gradients, inputs, weights, policy. The caller's; see
 * zbp_scene_new and zbp_scene_end (zbp_shim.h). */
typedef struct zbp_scene zbp_scene;

/* What I is planned on. Zeroed is none. */
typedef struct zbp_survey {
    zbp_graph graph;
    zbp_plan plan;
    zbp_facts facts;
    zbp_split split;
} zbp_survey;

/* Fills the empty graph with what can be reached from the outputs, up to the inputs; marks inputs,
 * weights and roots. Refuses what an earlier I has consumed. */
ZBP_MUST_USE int zbp_scene_walk(zbp_scene *scene, zbp_graph *graph, zbp_error *error);

/* The ids of the nodes from which the backward starts, one for each gradient that it starts with, as of
 * the last walk. Borrowed from the scene. */
const uint32_t *zbp_scene_roots(const zbp_scene *scene, uint32_t *count_out);

/* Fills the survey's facts, which have been made for its graph, from its nodes and the policy. */
ZBP_MUST_USE int zbp_scene_look(zbp_scene *scene, zbp_survey *survey, zbp_error *error);

/* Makes the groups, taking their layouts out of the survey's split. No edge is touched. */
ZBP_MUST_USE int zbp_scene_make_groups(zbp_scene *scene, zbp_survey *survey, zbp_error *error);

/* Puts stand-ins and captures in place and edits edges as the survey's split says. What is not handed
 * over is put back when the scene ends, the last edit first. */
ZBP_MUST_USE int zbp_scene_set(zbp_scene *scene, const zbp_survey *survey, zbp_error *error);

/* Runs the engine, without the GIL. */
ZBP_MUST_USE int zbp_scene_run(zbp_scene *scene, const zbp_survey *survey, zbp_error *error);

/* I has succeeded: the inputs' gradients are taken, the cuts undone, the split nodes retired, the outputs
 * detached. After an error what was set is put back as after a run that failed; where memory ran out for the last two,
 * the edges stay as they are. */
ZBP_MUST_USE int zbp_scene_hand_over(zbp_scene *scene, const zbp_survey *survey, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
