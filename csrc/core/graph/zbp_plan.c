#include "core/graph/zbp_plan.h"

#include <stdbool.h>
#include <string.h>

#include "core/base/zbpi_alloc.h"

/* What lives only while a plan is built: one block of arrays, and the sizes of the plan's lists. */
typedef struct work {
    const zbp_graph *graph;

    uint32_t *begin; /* [nodes + 1], the edges of each node in one direction: */
    uint32_t *edge;  /* [edges], by the nodes where they end, or where they begin */
    uint32_t *stack; /* [nodes] */
    uint32_t stack_count;
    uint32_t *parent; /* [nodes], union-find */
    uint32_t *size;   /* [nodes], of the set, at its representative */
    uint32_t *number; /* [nodes], of the group, at its representative */
    uint8_t *flag;    /* [nodes], as in the plan */

    uint32_t group_count, split_count, weight_count, outside_count;

    void *block;
} work;

/* The next array of a block of which *rest is left. */
static uint32_t *take(uint32_t **rest, size_t count)
{
    uint32_t *array = *rest;

    *rest += count;
    return array;
}

static int work_init(work *w, const zbp_graph *graph)
{
    size_t nodes = graph->node_count, edges = graph->edge_count;
    uint32_t *rest = zbpi_resize(NULL, (nodes * 5 + 1 + edges) * sizeof *rest + nodes);

    if (rest == NULL)
        return ZBP_ENOMEM;
    w->graph = graph;
    w->block = rest;
    w->begin = take(&rest, nodes + 1);
    w->edge = take(&rest, edges);
    w->stack = take(&rest, nodes);
    w->parent = take(&rest, nodes);
    w->size = take(&rest, nodes);
    w->number = take(&rest, nodes);
    w->flag = (uint8_t *)rest;
    return ZBP_OK;
}

/* The plan's arrays; the lists' counts and the flags are known. */
static int make_arrays(zbp_plan *plan, const work *w)
{
    size_t nodes = w->graph->node_count, edges = w->graph->edge_count;
    size_t begins = (size_t)w->group_count + 1;
    size_t words =
        nodes * 2 + 1 + edges + begins * 3 + w->split_count + w->weight_count + w->outside_count;
    uint32_t *rest = zbpi_resize(NULL, words * sizeof *rest + nodes);

    if (rest == NULL)
        return ZBP_ENOMEM;
    plan->block = rest;
    plan->node_count = w->graph->node_count;
    plan->edge_count = w->graph->edge_count;
    plan->group_count = w->group_count;
    plan->group = take(&rest, nodes);
    plan->out_begin = take(&rest, nodes + 1);
    plan->out = take(&rest, edges);
    plan->split_begin = take(&rest, begins);
    plan->split = take(&rest, w->split_count);
    plan->weight_begin = take(&rest, begins);
    plan->weight = take(&rest, w->weight_count);
    plan->outside_begin = take(&rest, begins);
    plan->outside = take(&rest, w->outside_count);
    plan->flag = (uint8_t *)rest;
    return ZBP_OK;
}

/* ---- lists ----
 *
 * Many in two arrays, by counting: begin has n + 1 places, and list i is item[begin[i]] to
 * item[begin[i + 1] - 1]. Clear, count the items of each list i into begin[i], end the lists, then
 * place the items in descending order at item[--begin[i]]. They come out ascending, and begin is
 * where each list begins. */

static void clear_lists(uint32_t *begin, uint32_t n)
{
    memset(begin, 0, ((size_t)n + 1) * sizeof *begin);
}

static void end_lists(uint32_t *begin, uint32_t n)
{
    for (uint32_t i = 1; i <= n; i++)
        begin[i] += begin[i - 1];
}

/* ---- flags ---- */

/* Of each node the edges that begin there, or, backwards, that end there. Inline: a loop each. */
static inline void list_edges(const zbp_graph *graph, bool backwards, uint32_t *begin,
                              uint32_t *list)
{
    const zbp_edge *edge = graph->edge;

    clear_lists(begin, graph->node_count);
    for (uint32_t e = 0; e < graph->edge_count; e++)
        begin[backwards ? edge[e].dst : edge[e].src]++;
    end_lists(begin, graph->node_count);
    for (uint32_t e = graph->edge_count; e-- > 0;)
        list[--begin[backwards ? edge[e].dst : edge[e].src]] = e;
}

/* Flags a node that was not yet, and puts it on the stack. Each node at most once per flag, so the
 * stack has room. */
static void flag_and_push(work *w, uint32_t id, uint8_t flag)
{
    w->flag[id] |= flag;
    w->stack[w->stack_count++] = id;
}

/* Flags every node that the nodes on the stack reach in the lists' direction, but none that has a
 * flag of `except` already. */
static void flag_reached(work *w, uint8_t flag, uint8_t except)
{
    while (w->stack_count > 0) {
        uint32_t id = w->stack[--w->stack_count];

        for (uint32_t i = w->begin[id]; i < w->begin[id + 1]; i++) {
            const zbp_edge *edge = &w->graph->edge[w->edge[i]];
            uint32_t other = edge->src == id ? edge->dst : edge->src;

            if ((w->flag[other] & (flag | except)) == 0)
                flag_and_push(w, other, flag);
        }
    }
}

/* Flags the nodes of a role that have `among`, if it is not 0, and none of `except`; and all that
 * they reach, likewise but for `among`. */
static void flag_from(work *w, uint8_t role, uint8_t among, uint8_t flag, uint8_t except)
{
    for (uint32_t i = 0; i < w->graph->node_count; i++)
        if ((w->graph->mark[i] & role) != 0 && (w->flag[i] & (among | except)) == among)
            flag_and_push(w, i, flag);
    flag_reached(w, flag, except);
}

static bool computes_excluded(const work *w, uint32_t id)
{
    return (w->graph->mark[id] & (ZBP_ROLE_COMPUTES | ZBP_ROLE_WEIGHT)) == ZBP_ROLE_COMPUTES &&
           (w->flag[id] & ZBP_NODE_EXCLUDED) != 0;
}

/* See Note [What computes an excluded weight]. */
static void widen_closure(work *w)
{
    enum { COMPUTES = 64, ROOTED = 128 }; /* for the time of this */
    uint32_t nodes = w->graph->node_count, first = 0;

    while (first < nodes && !computes_excluded(w, first))
        first++;
    if (first == nodes)
        return;
    list_edges(w->graph, false, w->begin, w->edge);
    flag_from(w, ZBP_ROLE_ROOT, 0, ROOTED, ZBP_NODE_CLOSURE);
    list_edges(w->graph, true, w->begin, w->edge);
    for (uint32_t i = first; i < nodes; i++)
        if (computes_excluded(w, i) && (w->flag[i] & ROOTED) == 0)
            flag_and_push(w, i, COMPUTES);
    flag_reached(w, COMPUTES, ZBP_NODE_CLOSURE);
    for (uint32_t i = 0; i < nodes; i++) {
        if ((w->flag[i] & COMPUTES) != 0)
            w->flag[i] = ZBP_NODE_CLOSURE;
        w->flag[i] &= (uint8_t)~ROOTED;
    }
}

/* ---- groups: union by size, path halving ---- */

static uint32_t find(uint32_t *parent, uint32_t id)
{
    while (parent[id] != id) {
        parent[id] = parent[parent[id]];
        id = parent[id];
    }
    return id;
}

static void unite(work *w, uint32_t a, uint32_t b)
{
    a = find(w->parent, a);
    b = find(w->parent, b);
    if (a == b)
        return;
    if (w->size[a] < w->size[b]) {
        uint32_t t = a;

        a = b;
        b = t;
    }
    w->parent[b] = a;
    w->size[a] += w->size[b];
}

/* Flags the split nodes, and joins the groups over the edges that lead to WEIGHTWARD nodes. Those
 * start at a WEIGHTWARD node, or in the closure: at an input, where the walk stops, or at what is
 * thereby a split node. */
static void flag_split_and_unite(work *w)
{
    const zbp_graph *graph = w->graph;

    for (uint32_t i = 0; i < graph->node_count; i++) {
        w->parent[i] = i;
        w->size[i] = 1;
        w->number[i] = ZBP_NONE;
    }
    for (uint32_t e = 0; e < graph->edge_count; e++) {
        uint32_t src = graph->edge[e].src, dst = graph->edge[e].dst;

        if ((w->flag[dst] & ZBP_NODE_WEIGHTWARD) == 0 || (graph->mark[src] & ZBP_ROLE_INPUT) != 0)
            continue;
        if ((w->flag[src] & ZBP_NODE_CLOSURE) != 0)
            w->flag[src] |= ZBP_NODE_SPLIT;
        unite(w, src, dst);
    }
}

static void number_group_of(work *w, uint32_t id)
{
    uint32_t set = find(w->parent, id);

    if (w->number[set] == ZBP_NONE)
        w->number[set] = w->group_count++;
}

/* Flags the weights and the weight roots, numbers the groups and counts the members of the lists to
 * come. */
static void number_groups(work *w)
{
    const zbp_graph *graph = w->graph;

    for (uint32_t i = 0; i < graph->node_count; i++) {
        bool weightward = (w->flag[i] & ZBP_NODE_WEIGHTWARD) != 0;
        bool weight = weightward && (graph->mark[i] & ZBP_ROLE_WEIGHT) != 0;

        if (weight)
            w->flag[i] |= ZBP_NODE_WEIGHT;
        if (weightward && (graph->mark[i] & ZBP_ROLE_ROOT) != 0)
            w->flag[i] |= ZBP_NODE_WEIGHT_ROOT;
        if ((w->flag[i] & (ZBP_NODE_SPLIT | ZBP_NODE_WEIGHT_ROOT)) != 0)
            number_group_of(w, i);
        w->split_count += (w->flag[i] & ZBP_NODE_SPLIT) != 0;
        w->weight_count += weight;
        w->outside_count += weightward && !weight;
    }
    for (uint32_t i = 0; i < graph->node_count; i++)
        if ((w->flag[i] & ZBP_NODE_WEIGHTWARD) != 0)
            number_group_of(w, i);
}

/* ---- the plan's arrays ---- */

static void fill_nodes(zbp_plan *plan, const work *w)
{
    if (plan->node_count > 0)
        memcpy(plan->flag, w->flag, plan->node_count);
    for (uint32_t i = 0; i < plan->node_count; i++) {
        bool grouped = (w->flag[i] & (ZBP_NODE_SPLIT | ZBP_NODE_WEIGHTWARD)) != 0;

        plan->group[i] = grouped ? w->number[find(w->parent, i)] : ZBP_NONE;
    }
}

/* Lists by group the nodes that have this flag and not the other one. */
static void list_nodes(const zbp_plan *plan, uint8_t flag, uint8_t except, uint32_t *begin,
                       uint32_t *list)
{
    clear_lists(begin, plan->group_count);
    for (uint32_t i = 0; i < plan->node_count; i++)
        if ((plan->flag[i] & (flag | except)) == flag)
            begin[plan->group[i]]++;
    end_lists(begin, plan->group_count);
    for (uint32_t i = plan->node_count; i-- > 0;)
        if ((plan->flag[i] & (flag | except)) == flag)
            list[--begin[plan->group[i]]] = i;
}

int zbp_plan_build(zbp_plan *plan, const zbp_graph *graph)
{
    work w = {0};
    zbp_plan built = {0};
    int status;

    memset(plan, 0, sizeof *plan);
    status = work_init(&w, graph);
    if (status != ZBP_OK)
        goto done;
    if (graph->node_count > 0)
        memset(w.flag, 0, graph->node_count);
    list_edges(graph, true, w.begin, w.edge);
    flag_from(&w, ZBP_ROLE_INPUT, 0, ZBP_NODE_CLOSURE, 0);
    flag_from(&w, ZBP_ROLE_WEIGHT, 0, ZBP_NODE_WEIGHTWARD, ZBP_NODE_CLOSURE);
    flag_from(&w, ZBP_ROLE_EXCLUDED, ZBP_NODE_WEIGHTWARD, ZBP_NODE_EXCLUDED, ZBP_NODE_CLOSURE);
    widen_closure(&w);
    flag_split_and_unite(&w);
    number_groups(&w);

    status = make_arrays(&built, &w);
    if (status != ZBP_OK)
        goto done;
    fill_nodes(&built, &w);
    list_edges(graph, false, built.out_begin, built.out);
    list_nodes(&built, ZBP_NODE_SPLIT, 0, built.split_begin, built.split);
    list_nodes(&built, ZBP_NODE_WEIGHT, 0, built.weight_begin, built.weight);
    list_nodes(&built, ZBP_NODE_WEIGHTWARD, ZBP_NODE_WEIGHT, built.outside_begin, built.outside);
    *plan = built;
done:
    zbpi_free(w.block);
    return status;
}

void zbp_plan_fini(zbp_plan *plan)
{
    zbpi_free(plan->block);
    memset(plan, 0, sizeof *plan);
}
