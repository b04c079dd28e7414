/* zbp_kind.h - which kind of weight task a split node gets, and why.
 *
 * Whole is always right; product and deferred are the exceptions that pay. A product is confirmed
 * by the shim when I has its matrices at hand: it may become deferred then.
 */
#pragma once

#include "core/base/zbp_c.h"
#include "core/pass/zbp_facts.h"
#include "core/pass/zbp_layout.h"

ZBP_BEGIN_C

enum {
    ZBP_WHY_SEPARABLE, /* its type is known to be */
    ZBP_WHY_ROOT,      /* likewise */
    ZBP_WHY_POST_HOOK, /* whole, from here on: a hook is owed all of its gradients */
    ZBP_WHY_POLICY,    /* defers nothing */
    ZBP_WHY_EXCLUDED,  /* one of its weights is left to I by name */
    ZBP_WHY_FUNCTION,  /* a Python autograd Function */
    ZBP_WHY_UNKNOWN,   /* nobody knows that it computes its gradients apart */
    ZBP_WHY_PACKED,    /* checkpointed or offloaded, which the policy leaves to I */
    ZBP_WHY_MATRICES,  /* deferred: a product of a subclass, sparse, complex or conjugated */
    ZBP_WHY_LIGHT      /* its weights are vectors, which the policy leaves to I */
};

/* Of a node's faces, if it multiplies two factors. */
typedef struct zbp_sides {
    bool left, right; /* the factor is one of them */
    bool has_matrix;  /* one of these with two dimensions or more */
} zbp_sides;

/* A ZBP_TASK_*; *why_out is a ZBP_WHY_*. is_excluded: of one of the node's weights the policy says
 * so. */
uint8_t zbp_kind_of(const zbp_fact *fact, zbp_sides sides, zbp_decision policy, bool is_excluded,
                    uint8_t *why_out);

/* Of which weights the node's backward may hand over the work to W: a ZBP_DEFER_*, and nothing
 * unless it is a Function's. */
uint8_t zbp_takes_work(const zbp_fact *fact, zbp_decision policy, bool is_excluded);

/* A ZBP_TASK_* and a ZBP_WHY_* in a word or two, for people; static. */
const char *zbp_kind_name(uint8_t kind);
const char *zbp_why_name(uint8_t why);

ZBP_END_C
