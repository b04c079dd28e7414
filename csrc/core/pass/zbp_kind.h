/* zbp_kind.h - which kind of weight task a split node gets, and why: from what the shim has seen of
 * a graph's nodes, and what the policy says. The core asks for no more than this to decide how a
 * backward is split; what a fact stands for in libtorch is the shim's (shim/group/facts.cpp).
 *
 * Whole is always right; product and deferred are the exceptions that pay. A product is confirmed
 * by the shim when I has its matrices at hand: it may become deferred then.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_c.h"
#include "core/pass/zbp_layout.h"

ZBP_BEGIN_C

/* ---- the policy */

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

typedef struct zbp_policy {
    uint8_t defer;      /* ZBP_DEFER_* */
    uint8_t checkpoint; /* ZBP_CHECKPOINT_* */
    /* 0 or 1: W adds to a weight's main_grad, and I asks whether a kernel has; as in zbp_how. */
    uint8_t main_grad, fuse;
} zbp_policy;

/* ---- facts */

/* What a split node's type is known to do. */
enum {
    ZBP_TYPE_UNKNOWN,
    ZBP_TYPE_DISAGREES, /* known, but this torch differs */
    ZBP_TYPE_FUNCTION,  /* a Python autograd Function */
    ZBP_TYPE_SEPARABLE, /* computes its gradients apart, as often as one likes */
    ZBP_TYPE_FACTORS,   /* likewise, and multiplies two tensors: its weights may be matrices */
    ZBP_TYPE_PRODUCT    /* likewise, and W knows an operation for the gradient of one of the two */
};

/* What an outside node does to its one gradient. */
enum {
    ZBP_STEP_NONE,          /* more than these, or something else */
    ZBP_STEP_TRANSPOSITION, /* of a matrix, or of each of several */
    ZBP_STEP_CAST,          /* on its device */
    ZBP_STEP_NOTHING,       /* it comes out as it went in */
    ZBP_STEP_VIEW           /* the same elements laid out anew */
};

/* Or-ed. */
enum {
    ZBP_FACT_POST_HOOK = 1, /* split: a hook is owed all of its gradients at once */
    ZBP_FACT_PACKED = 2,    /* split: something that it has saved lies behind hooks */
    ZBP_FACT_WATCHED = 4,   /* outside: a hook sees it run */
    /* split, two factors: the edge to the left or the right one takes two dimensions or more */
    ZBP_FACT_LEFT_MATRIX = 8,
    ZBP_FACT_RIGHT_MATRIX = 16
};

typedef struct zbp_fact {
    uint64_t sequence_nr; /* split: of the forward */
    uint8_t type;         /* split: ZBP_TYPE_* */
    /* split, two factors: the edge of the left one; the right one's is the next */
    uint8_t left_slot;
    uint8_t step; /* outside: ZBP_STEP_* */
    uint8_t flag; /* ZBP_FACT_* */
} zbp_fact;

typedef struct zbp_facts {
    const zbp_fact *fact; /* [nodes], of split and outside nodes; others are zeroed. The caller's */
    zbp_policy policy;
} zbp_facts;

/* ---- kinds */

/* Their words stand in zbpipe/_tasks.py, in this order. */
enum {
    ZBP_WHY_SEPARABLE, /* its type is known to be */
    ZBP_WHY_ROOT,      /* likewise */
    ZBP_WHY_POST_HOOK, /* whole, from here on: a hook is owed all of its gradients */
    ZBP_WHY_POLICY,    /* defers nothing */
    ZBP_WHY_EXCLUDED,  /* one of its weights is left to I by name */
    ZBP_WHY_FUNCTION,  /* a Python autograd Function */
    ZBP_WHY_UNKNOWN,   /* nobody knows that it computes its gradients apart */
    ZBP_WHY_DISAGREES, /* this torch computes them otherwise */
    ZBP_WHY_PACKED,    /* checkpointed or offloaded, which the policy leaves to I */
    ZBP_WHY_MATRICES,  /* deferred: factors of a subclass, sparse, complex, conjugated or packed */
    ZBP_WHY_LIGHT      /* its weights are vectors, which the policy leaves to I */
};

/* Of a node's faces, if it multiplies two factors. */
typedef struct zbp_sides {
    bool left, right; /* the factor is one of them */
    bool has_matrix;  /* one of these with two dimensions or more */
} zbp_sides;

/* A ZBP_TASK_*; *why_out is a ZBP_WHY_*. is_excluded: of one of the node's weights the policy says
 * so. */
uint8_t zbp_kind_of(const zbp_fact *fact, zbp_sides sides, zbp_policy policy, bool is_excluded,
                    uint8_t *why_out);

/* Of which weights the node's backward may hand over the work to W: a ZBP_DEFER_*, and nothing
 * unless it is a Function's. */
uint8_t zbp_takes_work(const zbp_fact *fact, zbp_policy policy, bool is_excluded);

ZBP_END_C
