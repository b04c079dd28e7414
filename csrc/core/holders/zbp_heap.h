/* zbp_heap.h - all that lives, as numbers: what a search for holders has met, and from where.
 *
 * A vertex is an address that is never read, and a small number, `thing`, that is the caller's: what lies
 * there. Whatever two things are, they lie at two addresses. Vertices are numbered in the order of
 * discovery, which is the queue of a search breadth first: zbp_heap_next gives them in this order, and
 * whoever takes one meets what it holds. First what the roots reach; then, after zbp_heap_end_roots, the
 * rest, between whose vertices the edges are kept.
 *
 * Invariant: a vertex's parent, from which it was discovered, comes before it; kept edges run between
 * vertices that the roots do not reach. Nothing is removed.
 * Allocation: two growing arrays and a map. Threads: one at a time, or many that only read.
 */
#ifndef ZBP_HEAP_H
#define ZBP_HEAP_H

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_alloc.h"
#include "core/base/zbp_map.h"
#include "core/base/zbp_status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* No vertex; what is ignored. */
#define ZBP_NO_VERTEX UINT32_MAX

/* Millions of them: 24 bytes. */
typedef struct zbp_vertex {
    const void *key;
    uint32_t parent;      /* ZBP_NO_VERTEX for a root */
    uint32_t python_refs; /* edges to its Python object */
    uint32_t native_refs; /* edges to the object of C++ */
    uint8_t thing;
} zbp_vertex;

typedef struct zbp_holding {
    uint32_t from, to; /* from holds to */
} zbp_holding;

/* Held by the caller; all fields are for reading alone. Zeroed is a legal empty heap. */
typedef struct zbp_heap {
    uint32_t count;   /* vertices */
    uint32_t next;    /* the first one that zbp_heap_next has not given */
    uint32_t reached; /* vertices before this one are those that the roots reach; if has_rest */
    bool has_rest;
    uint32_t edge_count;
    zbp_vertex *vertex; /* [count] */
    zbp_holding *edge;  /* [edge_count], in the order in which they were met */

    uint32_t capacity, edge_capacity;
    zbp_map id_of; /* ZBP_NO_VERTEX: ignored */
    zbp_alloc alloc;
} zbp_heap;

/* Makes an empty heap; allocates nothing. alloc is copied; NULL is libc. */
void zbp_heap_init(zbp_heap *heap, const zbp_alloc *alloc);

/* Frees what the heap holds and zeroes it. A zeroed heap is legal. */
void zbp_heap_fini(zbp_heap *heap);

/* key will never be a vertex; if it is one already it stays one. Errors, the heap unchanged: as zbp_map_add's. */
ZBP_MUST_USE int zbp_heap_ignore(zbp_heap *heap, const void *key);

/* `parent` holds what lies at key, or ZBP_NO_VERTEX: a root is met. Finds its vertex, or adds one. Counts the
 * reference, to the Python object or to C++'s own, unless it is a root's. *v_out: its vertex; ZBP_NO_VERTEX where
 * key is ignored. *added_out (may be NULL): whether it is new.
 * Errors, the heap unchanged: ZBP_EINVAL (key is NULL, parent is no vertex), ZBP_ENOMEM, ZBP_EOVERFLOW (2^32 - 1
 * vertices, or edges). Amortised O(1). */
ZBP_MUST_USE int zbp_heap_meet(zbp_heap *heap, const void *key, uint8_t thing, uint32_t parent,
                               bool counts_python, uint32_t *v_out, bool *added_out);

/* Whether key is a vertex or ignored. O(1). */
bool zbp_heap_knows(const zbp_heap *heap, const void *key);

/* Its vertex, or ZBP_NO_VERTEX. O(1). */
uint32_t zbp_heap_find(const zbp_heap *heap, const void *key);

/* Whether there is a vertex that has not been given; then *v_out is the first of them, given now. O(1). */
bool zbp_heap_next(zbp_heap *heap, uint32_t *v_out);

/* What is met from now on the roots do not reach: all that they reach has been given. */
void zbp_heap_end_roots(zbp_heap *heap);

/* How many vertices the roots reach, of all that there are so far. */
uint32_t zbp_heap_reached(const zbp_heap *heap);

/* How often a thing is referred to: the Python object that stands for it, C++'s own, or both. */
typedef struct zbp_counts {
    int64_t python, native; /* without the caller's own references */
    bool has_python, has_native;
    bool python_owns; /* of both: the Python object refers to C++'s */
    bool native_owns; /* and that to the Python object */
} zbp_counts;

/* References that are counted and that no edge explains, 0 or less for none; with `native_only` to C++'s own
 * object alone, where it has one. O(1). */
int64_t zbp_heap_unexplained(const zbp_heap *heap, uint32_t v, zbp_counts counts, bool native_only);

#ifdef __cplusplus
}
#endif

#endif
