/* zbp_weight.h - the weight pass (W): one call of it, and every touch of a weight, a gradient, the engine.
 *
 * The bindings begin and end a call, and say what of it is refused (weight_call.c). In between zbp_pass_weights
 * (csrc/pass/weight_pass.c) decides what is added in which order. Conventions: zbp_input.h; between begin and end
 * the functions are called without the GIL, on one thread. ZBP_ENOMEM leaves *error as it was. After an error a
 * function has done nothing, unless it says otherwise. Indices are those of the group's layout, and in range. The
 * groups' books are in the hands of this call.
 */
#ifndef ZBP_WEIGHT_H
#define ZBP_WEIGHT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_status.h"
#include "core/pass/zbp_group.h"
#include "shim/torch/zbp_error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct _object PyObject; /* as in zbp_input.h */

/* Keeps its groups until it is freed. Of the caller. */
typedef struct zbp_call zbp_call;

ZBP_MUST_USE int zbp_call_new(zbp_group *const *groups, size_t group_count, zbp_call **call_out,
                              zbp_error *error);
void zbp_call_free(zbp_call *call); /* NULL is legal; may run Python code */

bool zbp_in_anomaly_mode(void); /* of autograd */

/* ---- what has changed since I */

enum {
    ZBP_MODIFIED_NONE,
    ZBP_MODIFIED_HELD,      /* by the group */
    ZBP_MODIFIED_OUTSIDE,   /* saved between the tasks and the weights */
    ZBP_MODIFIED_RECOMPUTED /* read by a checkpointed region that W computes again */
};

typedef struct zbp_modified {
    uint8_t role;       /* ZBP_MODIFIED_* */
    PyObject *tensor;   /* new: in words; NULL for none */
    PyObject *reader;   /* new: who reads it, in words; NULL where no task holds it */
    uint32_t seen, now; /* its versions, in I and now */
} zbp_modified;

/* The first tensor that W reads and that was changed since I; weights that regions read are not among them. */
ZBP_MUST_USE int zbp_group_modified(const zbp_group *group, zbp_modified *out, zbp_error *error);

/* The weights that regions of its I read: one list for all groups of that I; NULL where W computes none again. */
const void *zbp_group_reads(const zbp_group *group);
/* Of the nodes for which W computes a region again, the highest sequence number; 0 if there are none. */
uint64_t zbp_group_recomputed_for(const zbp_group *group);
/* The first of the group's list that was changed, of those that regions read up to the node of that number. */
ZBP_MUST_USE int zbp_reads_modified(const zbp_group *group, uint64_t recomputed_for,
                                    zbp_modified *out, zbp_error *error);

/* Whether I ran, and whether the caller runs, within the capture of a graph of the device's. */
ZBP_MUST_USE int zbp_group_captures(const zbp_group *group, bool *then_out, bool *now_out,
                                    zbp_error *error);

/* ---- weights */

/* *out: it has become the result of something that needs a gradient. */
ZBP_MUST_USE int zbp_weight_is_computed(const zbp_group *group, uint32_t weight, bool *out,
                                        zbp_error *error);
/* New: the weight; it in words. */
PyObject *zbp_weight_wrap(const zbp_group *group, uint32_t weight, zbp_error *error);
PyObject *zbp_weight_describe(const zbp_group *group, uint32_t weight, zbp_error *error);

/* It is accumulated in `main_grad`, and not in its .grad, until the group's are forgotten. Refuses what is no tensor,
 * or one that does not fit. */
ZBP_MUST_USE int zbp_weight_set_main_grad(zbp_group *group, uint32_t weight, PyObject *main_grad,
                                          zbp_error *error);
void zbp_group_forget_main_grads(zbp_group *group);

/* ---- the pass */

ZBP_MUST_USE int zbp_call_begin(zbp_call *call, zbp_error *error);
/* With what zbp_pass_weights returned and raised, which it returns or raises unless a warning is an error. */
ZBP_MUST_USE int zbp_call_end(zbp_call *call, int status, zbp_error *error);

/* Tells the book of each weight's hooks, and gives up the paths on which a hook was put. */
ZBP_MUST_USE int zbp_look(zbp_group *group, zbp_error *error);

/* The same for the same weight, whichever group it is asked of; never NULL. */
const void *zbp_weight_key(zbp_group *group, uint32_t weight);

/* Streams: the tasks' wait for the caller's, and the caller's for the tasks'. */
ZBP_MUST_USE int zbp_follow_caller(zbp_group *group, zbp_error *error);
ZBP_MUST_USE int zbp_join_streams(zbp_group *group, zbp_error *error);

/* Without the engine: adds the face's gradient to its weight: a product in place to the gradient that is there, where
 * that can take it, anything else by the accumulator's rules. Unless how.retain, what I kept for the face goes. After
 * an error nothing was added. */
ZBP_MUST_USE int zbp_add_alone(zbp_group *group, uint32_t face, zbp_how how, zbp_error *error);

/* One run of the engine for several groups; owned by the caller. Its sinks report to the books. */
typedef struct zbp_run zbp_run;

ZBP_MUST_USE int zbp_run_new(zbp_how how, zbp_run **run_out, zbp_error *error);
void zbp_run_free(zbp_run *run); /* NULL is legal */

/* The group's tasks run, for what the book still wants. Groups of one run share no weight. */
ZBP_MUST_USE int zbp_run_add(zbp_run *run, zbp_group *group, zbp_error *error);

/* Runs; without a group it does nothing. An error that a weight's hooks or addition raised is reported
 * when all else has run: see Note [Why a sink does not stop the engine] in weight_nodes.h. */
ZBP_MUST_USE int zbp_run_go(zbp_run *run, zbp_error *error);

/* ---- afterwards; none of them fails */

void zbp_group_release(zbp_group *group); /* what the tasks hold goes; the weights stay */
void zbp_group_close(zbp_group *group); /* the weights too, and stage outputs lose their history */
void zbp_group_again(zbp_group *group); /* what ran is to run again */

#ifdef __cplusplus
}
#endif

#endif
