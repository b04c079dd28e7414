/* zbp_policy.h - what the policy says, in numbers. */
#pragma once

#include <stdint.h>

#include "core/base/zbp_c.h"

ZBP_BEGIN_C

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

/* What I asks of it. */
typedef struct zbp_decision {
    uint8_t defer;      /* ZBP_DEFER_* */
    uint8_t checkpoint; /* ZBP_CHECKPOINT_* */
} zbp_decision;

ZBP_END_C
