/* zbp_policy.h - what the policy says of weights, and what follows for all that leads to them.
 *
 * Allocation: two lists for the time of zbp_policy_spread. Threads: any.
 */
#ifndef ZBP_POLICY_H
#define ZBP_POLICY_H

#include <stdint.h>

#include "core/pass/zbp_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What I leaves to W. */
enum {
    ZBP_DEFER_NOTHING,  /* no weight's gradient */
    ZBP_DEFER_MATRICES, /* those of nodes with a matrix or more as a factor */
    ZBP_DEFER_ALL       /* those of all nodes that can be split */
};

/* What becomes of what is saved behind hooks: checkpointed, offloaded. */
enum {
    ZBP_CHECKPOINT_KEEP,      /* what W reads of it is unpacked in I and kept */
    ZBP_CHECKPOINT_RECOMPUTE, /* it is unpacked in W, which computes the region again */
    ZBP_CHECKPOINT_INPUT_PASS /* the gradients of the region's weights are computed in I */
};

typedef struct zbp_decision {
    uint8_t defer;      /* ZBP_DEFER_* */
    uint8_t checkpoint; /* ZBP_CHECKPOINT_* */
} zbp_decision;

/* What any other decision wins over. */
zbp_decision zbp_decision_none(void);

/* For what leads to the weights of both: W wins over I, and keeping over computing again. */
zbp_decision zbp_decision_join(zbp_decision a, zbp_decision b);

/* Of a face's, or a hop's, two ends: that of the weight, or that of the outside node. */
zbp_decision zbp_decision_behind(const zbp_decision *of_weight, const zbp_decision *of_outside,
                                 int32_t weight, int32_t outside);

/* Joins, for every outside node, the decisions of the weights that it leads to. of_weight has one per
 * weight of the layout, of_outside_out room for one per outside node. A node that leads to no weight has
 * zbp_decision_none(). In a circle, which no autograd graph has, a node may miss what lies behind it.
 * ZBP_ENOMEM. Linear, whatever the nodes share. */
ZBP_MUST_USE int zbp_policy_spread(const zbp_layout *layout, const zbp_decision *of_weight,
                                   zbp_decision *of_outside_out);

#ifdef __cplusplus
}
#endif

#endif
