/* The plan's validator. It shares nothing with zbp_plan.c but the definitions: adjacency is linked
 * lists instead of sorted arrays, and groups are found by search instead of union-find. */
#include <stdbool.h>
#include <string.h>

#include "checks.h"
#include "core/base/zbpi_alloc.h"

/* One check: what is compared, and the scratch block's arrays. */
typedef struct check {
    const zbp_plan *plan;
    const zbp_graph *graph;
    uint32_t *first_in, *first_out; /* [nodes], an edge into / out of the node, or ZBP_NONE */
    uint32_t *next_in, *next_out;   /* [edges], the next such edge of the same node */
    uint32_t *queue;                /* [nodes] */
    uint32_t queue_count;
    uint8_t *flag;   /* [nodes], the flags that the plan should have */
    uint8_t *seen;   /* [nodes], its group was searched */
    uint8_t *closed; /* [group_count], the group was met */
    const char *reason;
} check;

static bool has(const check *c, uint32_t id, int flag)
{
    return (c->flag[id] & flag) != 0;
}

static bool marked(const check *c, uint32_t id, int mark)
{
    return (c->graph->mark[id] & mark) != 0;
}

static bool grouped(const check *c, uint32_t id)
{
    return has(c, id, ZBP_NODE_SPLIT | ZBP_NODE_WEIGHTWARD);
}

/* ---- flags ---- */

static void link_edges(check *c)
{
    for (uint32_t i = 0; i < c->graph->node_count; i++)
        c->first_in[i] = c->first_out[i] = ZBP_NONE;
    for (uint32_t e = 0; e < c->graph->edge_count; e++) {
        uint32_t src = c->graph->edge[e].src, dst = c->graph->edge[e].dst;

        c->next_out[e] = c->first_out[src];
        c->first_out[src] = e;
        c->next_in[e] = c->first_in[dst];
        c->first_in[dst] = e;
    }
}

/* Flags what reaches a seed: breadth first, against the edges; only nodes whose flags are `among` so far. */
static void reach(check *c, int mark, uint8_t flag, uint8_t among)
{
    c->queue_count = 0;
    for (uint32_t i = 0; i < c->graph->node_count; i++)
        if (marked(c, i, mark) && c->flag[i] == among) {
            c->flag[i] |= flag;
            c->queue[c->queue_count++] = i;
        }
    for (uint32_t q = 0; q < c->queue_count; q++)
        for (uint32_t e = c->first_in[c->queue[q]]; e != ZBP_NONE; e = c->next_in[e]) {
            uint32_t src = c->graph->edge[e].src;

            if (c->flag[src] == among) {
                c->flag[src] |= flag;
                c->queue[c->queue_count++] = src;
            }
        }
}

static void derive_flags(check *c)
{
    reach(c, ZBP_ROLE_INPUT, ZBP_NODE_CLOSURE, 0);
    reach(c, ZBP_ROLE_WEIGHT, ZBP_NODE_WEIGHTWARD, 0);
    reach(c, ZBP_ROLE_EXCLUDED, ZBP_NODE_EXCLUDED, ZBP_NODE_WEIGHTWARD);
    for (uint32_t i = 0; i < c->graph->node_count; i++) {
        if (has(c, i, ZBP_NODE_WEIGHTWARD) && marked(c, i, ZBP_ROLE_ROOT))
            c->flag[i] |= ZBP_NODE_WEIGHT_ROOT;
        if (has(c, i, ZBP_NODE_CLOSURE) && !marked(c, i, ZBP_ROLE_INPUT))
            for (uint32_t e = c->first_out[i]; e != ZBP_NONE; e = c->next_out[e])
                if (has(c, c->graph->edge[e].dst, ZBP_NODE_WEIGHTWARD))
                    c->flag[i] |= ZBP_NODE_SPLIT;
    }
}

static void check_flags(check *c)
{
    for (uint32_t i = 0; c->reason == NULL && i < c->graph->node_count; i++) {
        int wrong = c->plan->flag[i] ^ c->flag[i];

        if ((wrong & ZBP_NODE_CLOSURE) != 0)
            c->reason = "flag: CLOSURE is not \"an input is reachable\"";
        else if ((wrong & ZBP_NODE_WEIGHTWARD) != 0)
            c->reason = "flag: WEIGHTWARD is not \"outside the closure, a weight is reachable\"";
        else if ((wrong & ZBP_NODE_SPLIT) != 0)
            c->reason = "flag: SPLIT is not \"in the closure, no input, has a WEIGHTWARD target\"";
        else if ((wrong & ZBP_NODE_WEIGHT_ROOT) != 0)
            c->reason = "flag: WEIGHT_ROOT is not \"marked ROOT and WEIGHTWARD\"";
        else if ((wrong & ZBP_NODE_EXCLUDED) != 0)
            c->reason = "flag: EXCLUDED is not \"WEIGHTWARD, an excluded weight is reachable\"";
        else if (wrong != 0)
            c->reason = "flag: an unknown bit";
    }
}

/* ---- groups ---- */

static void visit(check *c, uint32_t id)
{
    if (!c->seen[id]) {
        c->seen[id] = 1;
        c->queue[c->queue_count++] = id;
    }
}

/* Whether an edge joins its two ends to one group. */
static bool joins(const check *c, uint32_t e)
{
    return grouped(c, c->graph->edge[e].src) && has(c, c->graph->edge[e].dst, ZBP_NODE_WEIGHTWARD);
}

/* All that hangs together with id must be one group, and a group that was not met before. */
static void check_group_of(check *c, uint32_t id)
{
    uint32_t group = c->plan->group[id];

    if (c->closed[group]) {
        c->reason = "group: two groups that do not hang together have one number";
        return;
    }
    c->closed[group] = 1;
    c->queue_count = 0;
    visit(c, id);
    for (uint32_t q = 0; q < c->queue_count; q++) {
        uint32_t at = c->queue[q];

        if (c->plan->group[at] != group) {
            c->reason = "group: nodes that hang together have two numbers";
            return;
        }
        for (uint32_t e = c->first_out[at]; e != ZBP_NONE; e = c->next_out[e])
            if (joins(c, e))
                visit(c, c->graph->edge[e].dst);
        for (uint32_t e = c->first_in[at]; e != ZBP_NONE; e = c->next_in[e])
            if (joins(c, e))
                visit(c, c->graph->edge[e].src);
    }
}

static void check_groups(check *c)
{
    uint32_t nodes = c->graph->node_count, met = 0;

    for (uint32_t i = 0; c->reason == NULL && i < nodes; i++) {
        if (grouped(c, i) && c->plan->group[i] >= c->plan->group_count)
            c->reason = "group: a SPLIT or WEIGHTWARD node has no group, or one beyond the last";
        else if (!grouped(c, i) && c->plan->group[i] != ZBP_NONE)
            c->reason = "group: a node that is neither SPLIT nor WEIGHTWARD has a group";
    }
    for (uint32_t i = 0; c->reason == NULL && i < nodes; i++)
        if (grouped(c, i) && !c->seen[i])
            check_group_of(c, i);
    for (int pass = 0; c->reason == NULL && pass < 2; pass++) {
        int starts = pass == 0 ? ZBP_NODE_SPLIT | ZBP_NODE_WEIGHT_ROOT : ZBP_NODE_WEIGHTWARD;

        for (uint32_t i = 0; c->reason == NULL && i < nodes; i++) {
            if (!has(c, i, starts))
                continue;
            if (c->plan->group[i] > met)
                c->reason = "group: the numbers do not go by the lowest id";
            else if (c->plan->group[i] == met)
                met++;
        }
    }
    if (c->reason == NULL && met != c->plan->group_count)
        c->reason = "group_count: there are fewer groups";
}

/* ---- lists ---- */

/* A list holds, by number, ascending, exactly the items for which number_of is not ZBP_NONE.
 * Ascending items, each under its own number, as many as there are: so each is there once. */
typedef struct list_spec {
    const char *begin_reason, *reason;
    const uint32_t *begin, *list;
    uint32_t lists, items;
    uint32_t (*number_of)(const check *c, uint32_t item);
} list_spec;

static void check_list(check *c, const list_spec *s)
{
    uint32_t expected = 0;

    if (c->reason != NULL)
        return;
    for (uint32_t i = 0; i < s->items; i++)
        expected += s->number_of(c, i) != ZBP_NONE;
    c->reason = s->begin[0] == 0 && s->begin[s->lists] == expected ? NULL : s->begin_reason;
    for (uint32_t k = 0; c->reason == NULL && k < s->lists; k++)
        if (s->begin[k] > s->begin[k + 1])
            c->reason = s->begin_reason;
    for (uint32_t k = 0; c->reason == NULL && k < s->lists; k++)
        for (uint32_t i = s->begin[k]; c->reason == NULL && i < s->begin[k + 1]; i++)
            if (s->list[i] >= s->items || s->number_of(c, s->list[i]) != k ||
                (i > s->begin[k] && s->list[i] <= s->list[i - 1]))
                c->reason = s->reason;
}

static uint32_t group_if(const check *c, uint32_t id, bool listed)
{
    return listed ? c->plan->group[id] : ZBP_NONE;
}

static uint32_t split_number(const check *c, uint32_t id)
{
    return group_if(c, id, has(c, id, ZBP_NODE_SPLIT));
}

static uint32_t root_number(const check *c, uint32_t id)
{
    return group_if(c, id, has(c, id, ZBP_NODE_WEIGHT_ROOT));
}

static uint32_t weight_number(const check *c, uint32_t id)
{
    return group_if(c, id, has(c, id, ZBP_NODE_WEIGHTWARD) && marked(c, id, ZBP_ROLE_WEIGHT));
}

static uint32_t weight_edge_number(const check *c, uint32_t e)
{
    uint32_t src = c->graph->edge[e].src;

    return group_if(c, src, has(c, src, ZBP_NODE_WEIGHTWARD));
}

static uint32_t out_number(const check *c, uint32_t e)
{
    return c->graph->edge[e].src;
}

static void check_lists(check *c)
{
    const zbp_plan *p = c->plan;
    uint32_t nodes = p->node_count, edges = p->edge_count, groups = p->group_count;

    check_list(c, &(list_spec){"out_begin: wrong", "out: not the edges of the node, ascending",
                               p->out_begin, p->out, nodes, edges, out_number});
    check_list(c,
               &(list_spec){"split_begin: wrong", "split: not the group's split nodes, ascending",
                            p->split_begin, p->split, groups, nodes, split_number});
    check_list(c, &(list_spec){"root_begin: wrong", "root: not the group's weight roots, ascending",
                               p->root_begin, p->root, groups, nodes, root_number});
    check_list(c, &(list_spec){"weight_begin: wrong", "weight: not the group's weights, ascending",
                               p->weight_begin, p->weight, groups, nodes, weight_number});
    check_list(c, &(list_spec){"weight_edge_begin: wrong",
                               "weight_edge: not the edges of the group's nodes, ascending",
                               p->weight_edge_begin, p->weight_edge, groups, edges,
                               weight_edge_number});
}

int zbp_plan_check(const zbp_plan *plan, const zbp_graph *graph, const char **reason_out)
{
    check c = {.plan = plan, .graph = graph};
    size_t nodes = graph->node_count, edges = graph->edge_count;
    /* One byte more, lest an empty graph ask for none. */
    uint64_t size = (uint64_t)nodes * (3 * sizeof(uint32_t) + 3) + (uint64_t)edges * 8 + 1;
    char *block = NULL;
    int status = ZBP_OK;

    if (plan->block == NULL)
        c.reason = "block: the plan was not built";
    else if (plan->node_count != graph->node_count)
        c.reason = "node_count: not the graph's";
    else if (plan->edge_count != graph->edge_count)
        c.reason = "edge_count: not the graph's";
    else if (plan->group_count > plan->node_count)
        c.reason = "group_count: more groups than nodes";
    if (c.reason != NULL)
        goto done;
    block = size > SIZE_MAX ? NULL : zbpi_resize(&plan->alloc, NULL, 0, (size_t)size);
    if (block == NULL) {
        status = ZBP_ENOMEM;
        goto done;
    }
    memset(block, 0, (size_t)size);
    c.first_in = (uint32_t *)(void *)block;
    c.first_out = c.first_in + nodes;
    c.queue = c.first_out + nodes;
    c.next_in = c.queue + nodes;
    c.next_out = c.next_in + edges;
    c.flag = (uint8_t *)(c.next_out + edges);
    c.seen = c.flag + nodes;
    c.closed = c.seen + nodes;

    link_edges(&c);
    derive_flags(&c);
    check_flags(&c);
    if (c.reason == NULL)
        check_groups(&c);
    check_lists(&c);
done:
    zbpi_free(&plan->alloc, block, (size_t)size);
    if (reason_out != NULL)
        *reason_out = c.reason;
    if (status == ZBP_OK && c.reason != NULL)
        status = ZBP_EINVAL;
    return status;
}
