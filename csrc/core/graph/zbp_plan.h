/* zbp_plan.h - which nodes run in the input pass, which in the weight pass, and in which groups.
 *
 * A plan is a pure function of a graph (see zbp_graph.h): same nodes, edges and marks in the same
 * order, same plan. It says
 *   - the input closure: the nodes from which a stage input can be reached, and what computes an
 *     excluded weight;
 *   - the split nodes: nodes of the closure, other than the inputs, with an edge towards a weight
 *     outside the closure. I runs their edges into the closure, W the others;
 *   - the weight roots: stage outputs outside the closure, from which W starts directly;
 *   - the parameter groups: weights, split nodes and weight roots joined by "reaches".
 *
 * Note [Nothing outside the closure leads back into it]
 * A node outside the closure reaches no input, so no node that it reaches does either: a path that
 * has left the closure stays outside. Hence W, started at the edges of a split node that leave the
 * closure, can meet neither an input nor another split node, and every group can run alone, or all
 * of them in one engine run, without a node ever running twice. It also means that a weight from
 * which an input can be reached is none for the plan: it is in the closure, in no group and in no
 * list.
 *
 * Note [What computes an excluded weight]
 * What such nodes have saved may be gone before W. So the nodes between the closure and an EXCLUDED
 * weight run in I, down to the last one that COMPUTES. They belong to the closure then, and the
 * last ones are split nodes, so that I keeps a gradient for each edge behind them. A node to which
 * a weight root leads stays outside: W runs it.
 *
 * Allocation: one block for all arrays; a second for the time of the build. Threads: a finished
 * plan is read by any number.
 */
#pragma once

#include <stdint.h>

#include "core/graph/zbp_graph.h"
#include "core/base/zbp_c.h"

ZBP_BEGIN_C

/* What the plan says about a node; or-ed. */
enum {
    ZBP_NODE_CLOSURE = 1,     /* I runs it, or stops at it */
    ZBP_NODE_WEIGHTWARD = 2,  /* outside the closure, and reaches a weight or is one */
    ZBP_NODE_SPLIT = 4,       /* in the closure, no input, has an edge to a WEIGHTWARD node */
    ZBP_NODE_WEIGHT_ROOT = 8, /* marked ROOT, and WEIGHTWARD */
    ZBP_NODE_EXCLUDED = 16,   /* WEIGHTWARD, and reaches one that is marked EXCLUDED or is one */
    ZBP_NODE_WEIGHT = 32      /* WEIGHTWARD, and marked WEIGHT */
};

/* Held by the caller; all fields are for reading alone. Zeroed is a legal plan that was not built:
 * its pointers are NULL. The arrays are borrowed until zbp_plan_fini.
 *
 * The lists come as "x_begin, x": those of number k are x[x_begin[k]] to x[x_begin[k + 1] - 1],
 * ascending. Lists by group hold node ids, those of a node's edges indices into graph->edge. */
typedef struct zbp_plan {
    uint32_t node_count, edge_count; /* the graph's when the plan was built */

    uint8_t *flag;   /* [node_count], ZBP_NODE_* */
    uint32_t *group; /* [node_count], the group of a SPLIT or WEIGHTWARD node, else ZBP_NONE */

    uint32_t *out_begin; /* [node_count + 1] */
    uint32_t *out;       /* [edge_count], the edges of each node */

    uint32_t group_count;
    uint32_t *split_begin;   /* [group_count + 1] */
    uint32_t *split;         /* SPLIT nodes */
    uint32_t *weight_begin;  /* [group_count + 1] */
    uint32_t *weight;        /* WEIGHT nodes */
    uint32_t *outside_begin; /* [group_count + 1] */
    uint32_t *outside;       /* WEIGHTWARD nodes between the split nodes and the weights */

    void *block; /* holds every array above */
} zbp_plan;

/* Builds the plan of a graph. plan is overwritten: fini an old one first. graph is borrowed for
 * the call alone.
 *
 * Groups: a split node is united with the WEIGHTWARD nodes that its edges lead to, and a
 * WEIGHTWARD node with those that its edges lead to. Numbers go by the lowest id among a group's
 * split nodes and weight roots. In a graph walked from its roots every group has one; in another
 * graph, groups that nothing starts come last, by the lowest id among their nodes.
 *
 * Error, *plan zeroed: ZBP_ENOMEM.
 * Linear in nodes + edges (times the inverse Ackermann function), no recursion; cycles are legal.
 */
ZBP_MUST_USE int zbp_plan_build(zbp_plan *plan, const zbp_graph *graph);

/* Frees what the plan holds and zeroes it. A zeroed plan is legal. */
void zbp_plan_fini(zbp_plan *plan);

ZBP_END_C
