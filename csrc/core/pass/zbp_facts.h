/* zbp_facts.h - what the shim has seen of a graph's nodes and edges, as numbers.
 *
 * Indices are those of a zbp_graph. The core asks for no more than this to decide how a backward is
 * split; what a fact stands for in libtorch is the shim's (shim/group/facts.cpp).
 *
 * Threads: any number of readers.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_status.h"
#include "core/graph/zbp_graph.h"
#include "core/pass/zbp_policy.h"

ZBP_BEGIN_C

/* What a split node's type is known to do. */
enum {
    ZBP_TYPE_UNKNOWN,
    ZBP_TYPE_FUNCTION,  /* a Python autograd Function */
    ZBP_TYPE_SEPARABLE, /* computes its gradients apart, as often as one likes */
    ZBP_TYPE_FACTORS,   /* likewise, and multiplies two tensors: its weights may be matrices */
    ZBP_TYPE_PRODUCT    /* likewise: d(left) = dY rightT and d(right) = leftT dY, nothing scaled */
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
    ZBP_FACT_WATCHED = 4    /* outside: a hook sees it run */
};

typedef struct zbp_fact {
    uint64_t sequence_nr; /* split: of the forward */
    uint8_t type;         /* split: ZBP_TYPE_* */
    /* split, two factors: the edge of the left one; the right one's is the next */
    uint8_t left_slot;
    uint8_t step; /* outside: ZBP_STEP_* */
    uint8_t flag; /* ZBP_FACT_* */
} zbp_fact;

/* The arrays are the caller's. */
typedef struct zbp_facts {
    const zbp_fact *fact; /* [nodes], of split and outside nodes; others are zeroed */
    const bool
        *is_matrix; /* [edges], of a split node's edges to factors: has 2 dimensions or more */
    zbp_decision policy;
} zbp_facts;

ZBP_END_C
