/* zbp_reach.h - which weights of a group lie behind some of its faces, at once or through nodes outside the
 * closure.
 *
 * One zbp_reach answers any number of questions about one layout; each costs what it meets, not the
 * size of the group. Threads: one user at a time.
 */
#ifndef ZBP_REACH_H
#define ZBP_REACH_H

#include <stdint.h>

#include "core/base/zbp_alloc.h"
#include "core/base/zbp_status.h"
#include "core/pass/zbp_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Held by the caller; for reading alone. Zeroed is legal for an empty layout. */
typedef struct zbp_reach {
    const uint32_t *weight; /* [weight_count], of the current question, ascending after _weights */
    uint32_t weight_count;
    uint32_t question; /* the number of the current one */
    uint32_t *
        block; /* found weights, nodes to visit, and per weight and node the question that met it */
    uint32_t weights, nodes; /* of the layout */
    zbp_alloc alloc;
} zbp_reach;

/* alloc is copied; NULL is libc. ZBP_ENOMEM, the reach zeroed. */
ZBP_MUST_USE int zbp_reach_init(zbp_reach *reach, const zbp_layout *layout, const zbp_alloc *alloc);
void zbp_reach_fini(zbp_reach *reach);

/* A new question: behind no face yet. */
void zbp_reach_begin(zbp_reach *reach);
/* And behind this one. `layout` is the one of _init. */
void zbp_reach_add(zbp_reach *reach, const zbp_layout *layout, uint32_t face);
/* And behind this node outside the closure. */
void zbp_reach_add_outside(zbp_reach *reach, const zbp_layout *layout, uint32_t outside);
/* Sorts what was found: reach->weight[0] to [weight_count - 1], valid until the next question. */
void zbp_reach_weights(zbp_reach *reach);

#ifdef __cplusplus
}
#endif

#endif
