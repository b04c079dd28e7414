/* zbp_ways.h - by which ways the vertices of a heap are held: from the roots, from where nobody can look, by a cycle.
 *
 * What the roots reach is of rank ROOT, its way the one by which it was discovered. Of the rest, what somebody
 * holds of whom nothing is seen, and all behind it, is HIDDEN. What is left is garbage: it hangs on cycles, that is
 * strongly connected components with an edge within, and is of rank CYCLE where a way leads from the most to
 * blame of a cycle's members; NONE is what nothing leads to.
 *
 * Invariant: a vertex's way is a shortest one within its rank: its parent, which holds it, is of the same rank
 * and one step nearer to the beginning.
 * Allocation: one block, given back by _fini. Nothing recurses. Threads: one user at a time.
 */
#ifndef ZBP_WAYS_H
#define ZBP_WAYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_alloc.h"
#include "core/base/zbp_status.h"
#include "core/holders/zbp_heap.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ZBP_RANK_NONE, ZBP_RANK_ROOT, ZBP_RANK_HIDDEN, ZBP_RANK_CYCLE };

/* Millions of them: 16 bytes. */
typedef struct zbp_way_to {
    uint32_t parent; /* ZBP_NO_VERTEX where it begins */
    uint32_t depth;  /* steps from there */
    uint32_t head;   /* on the way, the vertex where what is shown of its beginning ends */
    uint8_t rank;    /* ZBP_RANK_* */
} zbp_way_to;

/* Held by the caller; way alone is for reading. Zeroed is the ways of an empty heap. */
typedef struct zbp_ways {
    zbp_way_to *way; /* [count], by vertex */
    uint32_t count;

    uint32_t reached,
        rest; /* the roots reach `reached` of the vertices; arrays of the `rest` others: */
    uint32_t *component; /* [rest], number of its cycle, ZBP_NO_VERTEX for none */
    uint32_t *begin;     /* [rest + 1], what holds each member of a cycle within it: */
    uint32_t *other;     /* [edges] */
    uint32_t *index, *low, *next, *queue, *stack; /* [rest], to work with */
    void *block;
    size_t block_size;
    zbp_alloc alloc;
} zbp_ways;

/* In the place of a vertex's blame: somebody of whom nothing is seen holds it. */
#define ZBP_HELD_UNSEEN UINT8_MAX

/* blame: of each vertex that the roots do not reach, in their order, ZBP_HELD_UNSEEN or how far it is from being
 * what made a cycle, 0 for the most to blame; borrowed for the call, NULL if there is none such. ways is overwritten.
 * alloc is copied; NULL is libc.
 * Errors, ways zeroed: ZBP_ENOMEM, ZBP_EOVERFLOW. Linear in vertices and kept edges. */
ZBP_MUST_USE int zbp_ways_build(zbp_ways *ways, const zbp_heap *heap, const uint8_t *blame,
                                const zbp_alloc *alloc);

/* Frees what the ways hold and zeroes them. Zeroed ones are legal. */
void zbp_ways_fini(zbp_ways *ways);

/* Of a long chain so many vertices at its ends are shown. */
enum { ZBP_CHAIN_HEAD = 12, ZBP_CHAIN_TAIL = 6 };
#define ZBP_CHAIN_LONGEST (ZBP_CHAIN_HEAD + 1 + ZBP_CHAIN_TAIL)

/* v's way, from the outermost holder to v, the last. ZBP_NO_VERTEX stands for a middle that is left out. Returns how
 * many there are. O(1). */
uint32_t zbp_ways_chain(const zbp_ways *ways, uint32_t v, uint32_t chain_out[ZBP_CHAIN_LONGEST]);

/* Number of the cycle whose member v is, ZBP_NO_VERTEX for none. O(1). */
uint32_t zbp_ways_component(const zbp_ways *ways, uint32_t v);

/* A shortest way from v, which the roots do not reach, back to it: v first, each holds the next, the last one holds
 * v. Where v is in no cycle it is alone. Returns how many there are; *cycle_out: borrowed until the next call. Linear
 * in the cycle's component. */
uint32_t zbp_ways_cycle(zbp_ways *ways, uint32_t v, const uint32_t **cycle_out);

#ifdef __cplusplus
}
#endif

#endif
