/* zbp_shim.h - the C interface of the shim for the two passes and their groups.
 *
 * Conventions, also of the shim's other headers. Functions return a status: ZBP_OK, or what has been raised is in
 * *error (zbp_error.h), and outputs are not to be used; those that return an object return NULL then. That is so,
 * too, where all is done and a warning is an error. No C++ exception leaves a function. All are called with the GIL
 * held. "new" is a new reference, to be released by the caller; arguments are borrowed.
 */
#ifndef ZBP_SHIM_H
#define ZBP_SHIM_H

#include <Python.h>
#include <stdbool.h>

#include "core/base/zbp_status.h"
#include "core/pass/zbp_policy.h"
#include "shim/pass/zbp_scene.h"
#include "shim/pass/zbp_touch.h"
#include "shim/torch/zbp_error.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ZBP_GROUP_READY, ZBP_GROUP_RUNNING, ZBP_GROUP_SPENT };

/* A parameter group: what I leaves for W. Owned by the caller. */
typedef struct zbp_group zbp_group;

typedef struct zbp_group_info {
    size_t params;      /* weights */
    size_t split_nodes; /* split nodes and weight roots */
    size_t bytes_held; /* of the tensors held for W, each storage once; 0 for one of unknown size */
} zbp_group_info;

/* What the policy says to I. */
typedef struct zbp_policy {
    zbp_decision leaves; /* what I leaves to W */
    bool
        main_grad; /* what a reentrant checkpoint adds to .grad must be added in I, which moves it */
} zbp_policy;

/* A call of I: made, given its arguments in the order of the functions below, begun, and ended or, if that was
 * refused, freed. all_leaves: its weights are every leaf that accumulates, and none is added. */
ZBP_MUST_USE int zbp_scene_new(zbp_policy policy, bool all_leaves, zbp_scene **scene_out,
                               zbp_error *error);
void zbp_scene_free(zbp_scene *scene); /* NULL is legal */

/* What an output is to I. */
enum {
    ZBP_OUTPUT_ROOT, /* the backward starts from it */
    ZBP_OUTPUT_PASSIVE, /* it takes no gradient, or its gradient is False; it is detached with the others */
    ZBP_OUTPUT_UNUSED, /* it could take a gradient and was given none */
};

/* Output number i: a tensor, a GradientEdge or None. grad: a tensor, None or False; NULL: no gradients were given, and
 * every output that takes one gets ones. */
ZBP_MUST_USE int zbp_scene_add_output(zbp_scene *scene, size_t i, PyObject *output, PyObject *grad,
                                      int *use_out, zbp_error *error);
/* The next input: anything; a tensor that requires a gradient gets one. */
ZBP_MUST_USE int zbp_scene_add_input(zbp_scene *scene, PyObject *input, zbp_error *error);
/* A tensor whose gradient I computes, if it is a weight. */
ZBP_MUST_USE int zbp_scene_exclude(zbp_scene *scene, PyObject *weight, zbp_error *error);
/* Weight number i: a leaf tensor. */
ZBP_MUST_USE int zbp_scene_add_weight(zbp_scene *scene, size_t i, PyObject *weight,
                                      zbp_error *error);

/* Now zbp_pass_inputs (csrc/pass) can run, on the same thread, with the GIL held. range: the
 * call's name for profilers, or NULL. */
ZBP_MUST_USE int zbp_scene_begin(zbp_scene *scene, const char *range, zbp_error *error);

/* Ends it, with what zbp_pass_inputs returned and raised. Frees the scene.
 *
 * dinputs_out:  new tuple, a gradient or None per input. The inputs' .grad is set or added to.
 * groups_out:   new array (PyMem_Free), of new groups (zbp_group_free), group_count_out of them.
 * Outputs are detached. After an error in the run the graph has its edges back, no gradient of an
 * input was set, and what ran has released its saved tensors, as after a failed ordinary backward. */
ZBP_MUST_USE int zbp_scene_end(zbp_scene *scene, int status, zbp_error *error,
                               PyObject **dinputs_out, zbp_group ***groups_out,
                               size_t *group_count_out);

/* Its layout, its book and itself; borrowed. */
zbp_turn zbp_group_turn(const zbp_group *group);
void zbp_group_free(zbp_group *group);       /* NULL is legal; frees all that W would have needed */
int zbp_group_state(const zbp_group *group); /* ZBP_GROUP_*; never fails, looks at a flag */
/* While W runs, all is 0. */
ZBP_MUST_USE int zbp_group_get_info(const zbp_group *group, zbp_group_info *info_out,
                                    zbp_error *error);

bool zbp_in_anomaly_mode(void); /* of autograd */

#ifdef __cplusplus
}
#endif

#endif
