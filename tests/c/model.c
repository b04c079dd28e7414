#include "model.h"

#include <stdbool.h>
#include <string.h>

typedef struct model {
    uint64_t reach[MODEL_NODES]; /* bit j of reach[i]: j can be reached from i, i itself too */
    bool input[MODEL_NODES], weight[MODEL_NODES], root[MODEL_NODES];
    bool closure[MODEL_NODES], weightward[MODEL_NODES], excluded[MODEL_NODES], split[MODEL_NODES];
    uint32_t label[MODEL_NODES]; /* of the group: its lowest id */
    uint32_t group[MODEL_NODES];
    uint32_t group_count;
} model;

static bool reaches(const model *m, const bool *wanted, uint32_t from, uint32_t n)
{
    for (uint32_t j = 0; j < n; j++)
        if (wanted[j] && (m->reach[from] >> j & 1) != 0)
            return true;
    return false;
}

static void lower_labels(model *m, const zbp_graph *g)
{
    for (bool changed = true; changed;) {
        changed = false;
        for (uint32_t e = 0; e < g->edge_count; e++) {
            uint32_t src = g->edge[e].src, dst = g->edge[e].dst;
            uint32_t low = m->label[src] < m->label[dst] ? m->label[src] : m->label[dst];

            if (!m->weightward[dst] || !(m->split[src] || m->weightward[src]))
                continue;
            changed = changed || m->label[src] != low || m->label[dst] != low;
            m->label[src] = m->label[dst] = low;
        }
    }
}

static void number_labels(model *m, uint32_t n, const bool *starts)
{
    for (uint32_t i = 0; i < n; i++) {
        if (!starts[i] || m->group[i] != ZBP_NONE)
            continue;
        for (uint32_t j = 0; j < n; j++)
            if ((m->split[j] || m->weightward[j]) && m->label[j] == m->label[i])
                m->group[j] = m->group_count;
        m->group_count++;
    }
}

/* What computes an excluded weight is the closure's, unless a root outside leads to it. */
static void widen_closure(model *m, const zbp_graph *g)
{
    bool computes[MODEL_NODES] = {false}, widened[MODEL_NODES] = {false};
    uint32_t n = g->node_count;

    for (uint32_t i = 0; i < n; i++) {
        computes[i] = m->excluded[i] && !m->weight[i] && (g->mark[i] & ZBP_ROLE_COMPUTES) != 0;
        for (uint32_t r = 0; r < n; r++)
            if (m->root[r] && !m->closure[r] && (m->reach[r] >> i & 1) != 0)
                computes[i] = false;
    }
    for (uint32_t i = 0; i < n; i++)
        widened[i] = m->excluded[i] && reaches(m, computes, i, n);
    for (uint32_t i = 0; i < n; i++) {
        m->closure[i] = m->closure[i] || widened[i];
        m->weightward[i] = m->weightward[i] && !widened[i];
        m->excluded[i] = m->excluded[i] && !widened[i];
    }
}

static void model_of(model *m, const zbp_graph *g)
{
    bool starts[MODEL_NODES] = {false}, left_to_i[MODEL_NODES] = {false};
    uint32_t n = g->node_count;

    memset(m, 0, sizeof *m);
    for (uint32_t i = 0; i < n; i++) {
        m->reach[i] = UINT64_C(1) << i;
        m->label[i] = i;
        m->group[i] = ZBP_NONE;
        m->input[i] = (g->mark[i] & ZBP_ROLE_INPUT) != 0;
        m->weight[i] = (g->mark[i] & ZBP_ROLE_WEIGHT) != 0 && !m->input[i];
        m->root[i] = (g->mark[i] & ZBP_ROLE_ROOT) != 0;
    }
    for (uint32_t e = 0; e < g->edge_count; e++)
        m->reach[g->edge[e].src] |= UINT64_C(1) << g->edge[e].dst;
    for (uint32_t k = 0; k < n; k++)
        for (uint32_t i = 0; i < n; i++)
            if ((m->reach[i] >> k & 1) != 0)
                m->reach[i] |= m->reach[k];
    for (uint32_t i = 0; i < n; i++) {
        m->closure[i] = reaches(m, m->input, i, n);
        m->weightward[i] = !m->closure[i] && reaches(m, m->weight, i, n);
        left_to_i[i] = m->weightward[i] && (g->mark[i] & ZBP_ROLE_EXCLUDED) != 0;
    }
    for (uint32_t i = 0; i < n; i++)
        m->excluded[i] = m->weightward[i] && reaches(m, left_to_i, i, n);
    widen_closure(m, g);
    for (uint32_t e = 0; e < g->edge_count; e++)
        if (m->closure[g->edge[e].src] && !m->input[g->edge[e].src] &&
            m->weightward[g->edge[e].dst])
            m->split[g->edge[e].src] = true;
    lower_labels(m, g);
    for (uint32_t i = 0; i < n; i++)
        starts[i] = m->split[i] || (m->weightward[i] && m->root[i]);
    number_labels(m, n, starts);
    number_labels(m, n, m->weightward);
}

static const char *flags_differ(const model *m, const zbp_plan *p)
{
    for (uint32_t i = 0; i < p->node_count; i++) {
        int flag = (m->closure[i] ? ZBP_NODE_CLOSURE : 0) |
                   (m->weightward[i] ? ZBP_NODE_WEIGHTWARD : 0) |
                   (m->split[i] ? ZBP_NODE_SPLIT : 0) |
                   (m->weightward[i] && m->root[i] ? ZBP_NODE_WEIGHT_ROOT : 0) |
                   (m->excluded[i] ? ZBP_NODE_EXCLUDED : 0) |
                   (m->weightward[i] && m->weight[i] ? ZBP_NODE_WEIGHT : 0);

        if (p->flag[i] != flag)
            return "flag";
        if (p->group[i] != m->group[i])
            return "group";
    }
    return p->group_count != m->group_count ? "group_count" : NULL;
}

/* Compares one list with the items that are wanted, number by number; name is "x", the other
 * "x_begin". number[i] is item i's, ZBP_NONE where it is in no list. */
static bool list_differs(const uint32_t *begin, const uint32_t *list, uint32_t lists,
                         const uint32_t *number, uint32_t items)
{
    uint32_t at = 0;

    for (uint32_t k = 0; k < lists; k++) {
        if (begin[k] != at)
            return true;
        for (uint32_t i = 0; i < items; i++) {
            if (number[i] != k)
                continue;
            if (at >= begin[lists] || list[at] != i)
                return true;
            at++;
        }
    }
    return begin[lists] != at;
}

static bool nodes_differ(const model *m, const zbp_plan *p, const bool *listed,
                         const uint32_t *begin, const uint32_t *list)
{
    uint32_t number[MODEL_NODES] = {0};

    for (uint32_t i = 0; i < p->node_count; i++)
        number[i] = listed[i] ? m->group[i] : ZBP_NONE;
    return list_differs(begin, list, p->group_count, number, p->node_count);
}

enum { MODEL_EDGES = 1 << 12 };

static const char *edges_differ(const zbp_plan *p, const zbp_graph *g)
{
    static _Thread_local uint32_t src[MODEL_EDGES];

    for (uint32_t e = 0; e < g->edge_count; e++)
        src[e] = g->edge[e].src;
    return list_differs(p->out_begin, p->out, p->node_count, src, p->edge_count) ? "out" : NULL;
}

const char *model_differs(const zbp_plan *p, const zbp_graph *g)
{
    bool weight[MODEL_NODES] = {false}, outside[MODEL_NODES] = {false};
    const char *name;
    model m;

    if (g->node_count > MODEL_NODES || g->edge_count > MODEL_EDGES)
        return "model: the graph is too large";
    if (p->node_count != g->node_count)
        return "node_count";
    if (p->edge_count != g->edge_count)
        return "edge_count";
    model_of(&m, g);
    name = flags_differ(&m, p);
    if (name != NULL)
        return name;
    for (uint32_t i = 0; i < g->node_count; i++) {
        weight[i] = m.weightward[i] && m.weight[i];
        outside[i] = m.weightward[i] && !m.weight[i];
    }
    if (nodes_differ(&m, p, m.split, p->split_begin, p->split))
        return "split";
    if (nodes_differ(&m, p, weight, p->weight_begin, p->weight))
        return "weight";
    if (nodes_differ(&m, p, outside, p->outside_begin, p->outside))
        return "outside";
    return edges_differ(p, g);
}

const void *model_key(uint32_t i)
{
    static const char names[1 << 20];

    return &names[i];
}

uint64_t model_random(uint64_t *state)
{
    uint64_t x = *state += UINT64_C(0x9E3779B97F4A7C15);

    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

uint32_t model_below(uint64_t *state, uint32_t n)
{
    return (uint32_t)(model_random(state) % n);
}

int model_random_graph(zbp_graph *g, uint64_t *state, uint32_t nodes)
{
    uint32_t n = model_below(state, nodes + 1);
    uint32_t edges = n == 0 ? 0 : model_below(state, 3 * n + 1);
    bool walked = model_below(state, 2) != 0, cycles = model_below(state, 3) == 0;
    uint32_t inputs = model_below(state, 6), weights = 2 + model_below(state, 6);
    int status = ZBP_OK;

    for (uint32_t i = 0; status == ZBP_OK && i < n; i++) {
        uint8_t mark = 0;

        status = zbp_graph_add_node(g, (const void *)(uintptr_t)(model_random(state) | 1), NULL);
        if (inputs != 0 && model_below(state, 4 + inputs) == 0)
            mark |= ZBP_ROLE_INPUT;
        if (model_below(state, weights) == 0)
            mark |= ZBP_ROLE_WEIGHT;
        if (i == 0 || model_below(state, 8) == 0)
            mark |= ZBP_ROLE_ROOT;
        if (model_below(state, 8) == 0)
            mark |= ZBP_ROLE_EXCLUDED;
        if (model_below(state, 4) == 0)
            mark |= ZBP_ROLE_COMPUTES;
        if (status == ZBP_OK)
            g->mark[i] |= mark;
        if (status == ZBP_OK && walked && i > 0)
            status = zbp_graph_add_edge(g, model_below(state, i), 0, i);
    }
    for (uint32_t e = 0; status == ZBP_OK && e < edges; e++) {
        uint32_t a = model_below(state, n), b = model_below(state, n);

        if (!cycles && a >= b)
            continue;
        status = zbp_graph_add_edge(g, a, e, b);
    }
    return status;
}
