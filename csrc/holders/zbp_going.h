/* zbp_going.h - what would be freed if nobody held some objects any more: found by letting go of one reference after
 * the other, as Python and libtorch do; nothing is let go of.
 *
 * Linear in what goes and in what that refers to; what several objects share counts for each. With the GIL.
 */
#ifndef ZBP_GOING_H
#define ZBP_GOING_H

#include <stdbool.h>
#include <stdint.h>

#include "holders/zbp_explore.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Held by the caller; all fields are for reading alone. */
typedef struct zbp_going {
    zbp_explore explore;
    zbp_vertices roots;    /* the objects', in their order */
    zbp_vertices storages; /* that go and have memory, in the order in which they do */
    uint32_t *begin;       /* [heap.count + 1], by vertex, for storages: places in holder */
    uint32_t *holder;      /* numbers of the objects that hold it, ascending */
    uint32_t holders;
} zbp_going;

void zbp_going_init(zbp_going *going, zbp_things *things, const zbp_alloc *alloc);
void zbp_going_fini(zbp_going *going);

/* objects: each once. To be called once; errors as zbp_explore_all's, then nothing but _fini is legal. */
ZBP_MUST_USE int zbp_going_find(zbp_going *going, const void *const *objects, uint32_t count,
                                zbp_error *error);

/* What a storage that goes is held by, first met nearest: a tensor on it and an autograd node on the way, or
 * ZBP_NO_VERTEX. Whether a Python object is on the way: saved-tensor hooks or a checkpointed region keep it. */
typedef struct zbp_going_way {
    uint32_t tensor, node;
    bool is_packed;
} zbp_going_way;

zbp_going_way zbp_going_way_to(const zbp_going *going, uint32_t storage);

#ifdef __cplusplus
}
#endif

#endif
