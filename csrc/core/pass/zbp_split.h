/* zbp_split.h - how a backward is split: what each parameter group is made of, and where every edge
 * of the input closure leads while I runs.
 *
 * A pure function of a graph, its plan, what is known of its nodes, and the roots. It changes no
 * edge and names no node but by its id: the shim makes it true.
 *
 * Allocation: one block, and each group's layout. Threads: a finished one is read by any number.
 */
#pragma once

#include "core/base/zbp_c.h"
#include "core/graph/zbp_plan.h"
#include "core/pass/zbp_kind.h"
#include "core/pass/zbp_layout.h"

ZBP_BEGIN_C

/* Where an edge or a root sends its gradient while I runs. */
enum {
    ZBP_TO_NODE,     /* to its node, which is in the closure and runs as it is */
    ZBP_TO_STAND_IN, /* to what stands in for a split node */
    ZBP_TO_CAPTURE,  /* to what captures the gradient of an input */
    ZBP_TO_NOWHERE   /* it leaves the closure */
};

/* A change of one edge. The node's own edge is put back after the run. But one that leads to a
 * stand-in stays changed, once I has succeeded. */
typedef struct zbp_edit {
    uint32_t edge;       /* of the graph */
    uint8_t to;          /* ZBP_TO_* */
    bool is_of_stand_in; /* the edge's node is split: its stand-in gets the new edge */
    bool is_of_node;     /* the node's own edge is replaced */
} zbp_edit;

/* Held by the caller. Zeroed is legal: it was not built. */
typedef struct zbp_split {
    uint32_t group_count, node_count, edge_count, root_count;

    zbp_layout *layout; /* [group_count]; whoever moves one out leaves a zeroed one */
    uint32_t *task;     /* [node_count], of a split node: its number in its layout; else ZBP_NONE */
    uint32_t *root_task; /* [root_count], of a root where W starts: likewise */
    uint8_t *root_to;    /* [root_count], ZBP_TO_* */
    zbp_edit *edit;      /* in the order of the edges; the others stay as they are */
    uint32_t edit_count;

    void *block;
} zbp_split;

/* Builds it; split is overwritten. plan is that of graph, facts were made for graph, root has the
 * ids of the nodes from which the backward starts, one for each gradient that it starts with. All
 * are borrowed for the call alone.
 *
 * A weight that a face reaches by plain steps alone is the face's (zbp_face.weight), unless
 * gradients meet on the way: see Note [The order of sums] in zbp_book.h. Tasks come in the order of
 * the plan's split nodes, those of roots behind them; outside nodes and weights in the plan's.
 *
 * ZBP_ENOMEM, *split zeroed. Linear, but for the steps of paths, of which
 * each has at most 8. */
ZBP_MUST_USE int zbp_split_build(zbp_split *split, const zbp_graph *graph, const zbp_plan *plan,
                                 const zbp_facts *facts, const uint32_t *root, uint32_t root_count);

void zbp_split_fini(zbp_split *split); /* zeroes it; a zeroed one is legal */

ZBP_END_C
