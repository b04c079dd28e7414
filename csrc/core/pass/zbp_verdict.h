/* zbp_verdict.h - what becomes of work that a Function offers from within its backward: W computes
 * the gradients of some of its weights later, it is computed at once, or nobody wants it.
 *
 * Pure: no state, no allocation.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_c.h"
#include "core/pass/zbp_layout.h"

ZBP_BEGIN_C

typedef enum zbp_verdict {
    ZBP_VERDICT_AT_ONCE,   /* I needs a gradient of these, or the task takes no such work */
    ZBP_VERDICT_HAND_OVER, /* W computes them */
    ZBP_VERDICT_SKIP       /* nobody wants any of them */
} zbp_verdict;

/* All borrowed. */
typedef struct zbp_offer {
    bool is_watched;     /* the node's post hooks are owed all gradients when it has run */
    const int32_t *slot; /* [slot_count]: the node's edge whose gradient it computes; -1 for none */
    const bool *leads;   /* [slot_count]: that edge leads somewhere */
    size_t slot_count;
    /* [faces of the task]: the face takes the gradient of a matrix, not of a vector */
    const bool *is_matrix;
} zbp_offer;

/* Of work that is offered to a task. face_out: [slot_count], the face that takes the gradient,
 * counted from the task's first; -1 where none does. The task is one of the layout. */
zbp_verdict zbp_verdict_of(const zbp_layout *layout, uint32_t task, const zbp_offer *offer,
                           int32_t *face_out);

ZBP_END_C
