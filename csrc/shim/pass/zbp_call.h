/* zbp_call.h - a call of W before the pass: its groups kept, and what has changed since I told, one group and one
 * weight at a time. What of it is refused, and in which words, is for the bindings to say (weight_call.c).
 *
 * Conventions: zbp_shim.h. Indices are those of the group's layout, and in range. The groups' books are in the hands of
 * this call.
 */
#ifndef ZBP_CALL_H
#define ZBP_CALL_H

#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "shim/pass/zbp_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Keeps its groups until it is freed. zbp_pass_weights (csrc/pass) runs between begin and end, without the GIL, on the
 * same thread. Of the caller. */
typedef struct zbp_call zbp_call;

ZBP_MUST_USE int zbp_call_new(zbp_group *const *groups, size_t group_count, zbp_call **call_out,
                              zbp_error *error);
void zbp_call_free(zbp_call *call);       /* NULL is legal; may run Python code */
zbp_turn *zbp_call_turns(zbp_call *call); /* one per group; borrowed from the call */

ZBP_MUST_USE int zbp_call_begin(zbp_call *call, zbp_error *error);
/* With what zbp_pass_weights returned and raised, which it returns or raises unless a warning is an error. */
ZBP_MUST_USE int zbp_call_end(zbp_call *call, int status, zbp_error *error);

/* ---- weights */

/* The same for the tensor, whichever group or list it is in (zbp_tensor.h). */
const void *zbp_weight_tensor(const zbp_held *held, uint32_t weight);
/* *out: it has become the result of something that needs a gradient. */
ZBP_MUST_USE int zbp_weight_is_computed(const zbp_held *held, uint32_t weight, bool *out,
                                        zbp_error *error);
/* New: the weight; it in words. */
PyObject *zbp_weight_wrap(const zbp_held *held, uint32_t weight, zbp_error *error);
PyObject *zbp_weight_describe(const zbp_held *held, uint32_t weight, zbp_error *error);

/* It is accumulated in `main_grad`, and not in its .grad, until the group's are forgotten. Refuses what is no tensor,
 * or one that does not fit. */
ZBP_MUST_USE int zbp_weight_set_main_grad(zbp_held *held, uint32_t weight, PyObject *main_grad,
                                          zbp_error *error);
void zbp_held_forget_main_grads(zbp_held *held);

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
ZBP_MUST_USE int zbp_held_modified(const zbp_held *held, zbp_modified *out, zbp_error *error);

/* The weights that regions of its I read: one list for all groups of that I; NULL where W computes none again. */
const void *zbp_held_reads(const zbp_held *held);
/* Of the nodes for which W computes a region again, the highest sequence number; 0 if there are none. */
uint64_t zbp_held_recomputed_for(const zbp_held *held);
/* The first of the group's list that was changed, of those that regions read up to the node of that number. */
ZBP_MUST_USE int zbp_reads_modified(const zbp_held *held, uint64_t recomputed_for,
                                    zbp_modified *out, zbp_error *error);

/* Whether I ran, and whether the caller runs, within the capture of a graph of the device's. */
ZBP_MUST_USE int zbp_held_captures(const zbp_held *held, bool *then_out, bool *now_out,
                                   zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
