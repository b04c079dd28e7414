/* zbp_graph.h - the autograd graph as plain numbers.
 *
 * A node is an opaque pointer (libtorch's Node, which the core never reads), interned to a dense
 * id 0, 1, 2, ... in the order in which it was first added: the walk's discovery order. So every
 * array indexed by id, and every result derived from one, is the same on every run.
 *
 * Invariant: ids are < node_count; both ends of every edge are ids; keys are distinct and not
 * NULL. Nothing is ever removed. Cycles, self loops and parallel edges are legal.
 * Allocation: four growing arrays. Threads: one at a time, or many that only read.
 */
#pragma once

#include <stdint.h>

#include "core/base/zbp_map.h"
#include "core/base/zbp_c.h"

ZBP_BEGIN_C

/* No node, no edge, no group. Never an id: a graph has at most INT32_MAX of each. */
#define ZBP_NONE UINT32_MAX

/* What the caller says about a node; or-ed. A node that is INPUT and WEIGHT counts as INPUT. */
enum {
    ZBP_ROLE_INPUT = 1,    /* produces a stage input: the walk stops here */
    ZBP_ROLE_WEIGHT = 2,   /* accumulates (or produces) a weight */
    ZBP_ROLE_ROOT = 4,     /* produces a stage output: the walk starts here */
    ZBP_ROLE_EXCLUDED = 8, /* a WEIGHT whose gradient the policy leaves to I */
    ZBP_ROLE_COMPUTES = 16 /* does more to a gradient than to lay it out anew or to cast it */
};

/* Gradients flow from src to dst: dst is entry `slot` of src's next_edges. */
typedef struct zbp_edge {
    uint32_t src, slot, dst;
} zbp_edge;

/* Held by the caller, who sets marks; all other fields are for reading alone. Zeroed is a legal
 * empty graph. */
typedef struct zbp_graph {
    uint32_t node_count;
    uint32_t edge_count;
    const void **key; /* [node_count], borrowed pointers, never read through */
    uint8_t *mark;    /* [node_count], ZBP_ROLE_* */
    zbp_edge *edge;   /* [edge_count], in the order of zbp_graph_add_edge */

    uint32_t key_capacity, mark_capacity, edge_capacity;
    zbp_map id_of; /* key -> id */
} zbp_graph;

/* Frees what the graph holds and zeroes it. A zeroed graph is legal. */
void zbp_graph_fini(zbp_graph *graph);

/* Finds the node of key, or adds one with the next id and no marks. *id_out (may be NULL) is its
 * id. key is not NULL, borrowed, never read through, and must stay the name of one node for as long
 * as the graph is used.
 * ZBP_ENOMEM, also for a key that is there, the graph unchanged. Amortised O(1). */
ZBP_MUST_USE int zbp_graph_add_node(zbp_graph *graph, const void *key, uint32_t *id_out);

/* Adds an edge between two ids; its index is the edge_count before the call. slot is kept for the
 * caller and not looked at; the same edge may be added twice.
 * ZBP_ENOMEM, the graph unchanged. Amortised O(1). */
ZBP_MUST_USE int zbp_graph_add_edge(zbp_graph *graph, uint32_t src, uint32_t slot, uint32_t dst);

ZBP_END_C
