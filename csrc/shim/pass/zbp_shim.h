/* zbp_shim.h - the C interface of the shim: everything that the bindings need of libtorch.
 *
 * Conventions. Functions return a status: ZBP_OK or ZBP_EPYTHON, and then a Python error is set and
 * no output has been written. No C++ exception leaves a function. All are called with the GIL held;
 * those that run the engine release it meanwhile. `seq` arguments are borrowed results of
 * PySequence_Fast(). "new" is a new reference, to be released by the caller.
 */
#ifndef ZBP_SHIM_H
#define ZBP_SHIM_H

#include <Python.h>

#include "core/base/zbp_status.h"
#include "core/pass/zbp_policy.h"
#include "shim/pass/zbp_scene.h"
#include "shim/pass/zbp_touch.h"

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

/* What I leaves to W: a ZBP_DEFER_* and a ZBP_CHECKPOINT_* (zbp_policy.h). Each number's function (borrowed;
 * NULL for none) wins over it: it is called once for each weight, with the parameter, and returns one of
 * the numbers. */
typedef struct zbp_policy {
    int defer;
    int checkpoint;
    PyObject *defer_of;
    PyObject *checkpoint_of;
    int refuse_reentrant; /* a backward of its own within I would add to .grad, and must not */
} zbp_policy;

/* Begins a call of I. Between _new and _end, on the same thread with the GIL held, goes zbp_pass_inputs
 * (csrc/pass), or zbp_pass_survey.
 *
 * outputs:      seq of tensors, GradientEdges or None.
 * output_grads: seq, as long as outputs, of tensors or None; or NULL: ones for every output.
 * inputs:       seq of anything; tensors that require a gradient get one.
 * weights:      seq of leaf tensors; or NULL: every leaf that accumulates.
 * policy:       what is left to W.
 * An error refuses the arguments; nothing was touched. */
ZBP_MUST_USE int zbp_scene_new(PyObject *outputs, PyObject *output_grads, PyObject *inputs,
                               PyObject *weights, zbp_policy policy, zbp_scene **scene_out);

/* Ends it, with what zbp_pass_inputs returned and raised. Frees the scene.
 *
 * dinputs_out:  new tuple, a gradient or None per input. The inputs' .grad is set or added to.
 * groups_out:   new array (PyMem_Free), of new groups (zbp_group_free), group_count_out of them.
 * Outputs are detached. After an error in the run the graph has its edges back, no gradient of an
 * input was set, and what ran has released its saved tensors, as after a failed ordinary backward. */
ZBP_MUST_USE int zbp_scene_end(zbp_scene *scene, int status, zbp_error *error,
                               PyObject **dinputs_out, zbp_group ***groups_out,
                               size_t *group_count_out);

/* A call of W: its groups, which no other call can have meanwhile. Between _new and _end, which both
 * need the GIL, zbp_pass_weights (csrc/pass) runs without it, on the same thread. */
typedef struct zbp_call zbp_call;

/* Begins a call for `groups` (borrowed). weights: seq of tensors, or NULL for no check. Refuses: groups that
 * are spent, listed twice or running elsewhere; groups none or only some of whose weights are listed;
 * matrices that were modified since I. main_grad: a weight with an attribute of that name that is a
 * tensor is accumulated there, its .grad is left alone, and its attribute grad_added_to_main_grad, if
 * it has one, becomes True. */
ZBP_MUST_USE int zbp_call_new(zbp_group *const *groups, size_t group_count, PyObject *weights,
                              int main_grad, zbp_call **call_out);
zbp_turn *zbp_call_turns(zbp_call *call); /* one per group; borrowed from the call */
int zbp_in_anomaly_mode(void);            /* of autograd */

/* Ends it, with what zbp_pass_weights returned and raised. After an error the same groups can be given
 * again: what was added is not added twice. Frees the call. */
ZBP_MUST_USE int zbp_call_end(zbp_call *call, int status, zbp_error *error);

void zbp_group_free(zbp_group *group);       /* NULL is legal; frees all that W would have needed */
int zbp_group_state(const zbp_group *group); /* ZBP_GROUP_*; never fails, looks at a flag */
/* While W runs, all is 0. */
ZBP_MUST_USE int zbp_group_get_info(const zbp_group *group, zbp_group_info *info_out);

/* New objects, or NULL with an error set; KeyError when the group is spent.
 * params: set of the accumulators' nodes. intermediates: list of the split nodes, None for one that
 * is gone. grads: list with, per intermediate, a tuple with a tensor or None per node input. */
PyObject *zbp_group_params(const zbp_group *group);
PyObject *zbp_group_intermediates(const zbp_group *group);
PyObject *zbp_group_grads(const zbp_group *group);

/* Replaces the output gradients from which W starts; value as zbp_group_grads returns it. A node that
 * ran whole has no output gradients any more, it reads as a tuple of None, and given back so it is
 * left alone; others are refused unless it can run again. */
ZBP_MUST_USE int zbp_group_set_grads(zbp_group *group, PyObject *value);

#ifdef __cplusplus
}
#endif

#endif
