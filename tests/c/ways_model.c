#include "ways_model.h"

#include <string.h>

static const char place[DRAWN_MOST + 1];

enum { FAR = 1000 };

typedef struct model {
    uint32_t n;
    bool holds[DRAWN_MOST][DRAWN_MOST];
    uint32_t far[DRAWN_MOST][DRAWN_MOST]; /* edges from one to the other, at least one */
    uint8_t rank[DRAWN_MOST];
    uint32_t depth[DRAWN_MOST];
    bool begins[DRAWN_MOST];
    uint32_t vertex[DRAWN_MOST];
} model;

static uint8_t next(const uint8_t **data, size_t *size)
{
    if (*size == 0)
        return 0;
    --*size;
    return *(*data)++;
}

static void draw_edge(drawing *drawn, uint32_t from, uint32_t to, bool counts_python)
{
    if (drawn->edge_count == DRAWN_EDGES)
        return;
    drawn->edge[drawn->edge_count].from = (uint8_t)from;
    drawn->edge[drawn->edge_count].to = (uint8_t)to;
    drawn->edge[drawn->edge_count++].counts_python = counts_python;
}

void drawing_read(drawing *drawn, const uint8_t *data, size_t size)
{
    uint32_t chain;

    *drawn = (drawing){.things = next(&data, &size) % (DRAWN_MOST + 1)};
    drawn->roots = next(&data, &size) % (drawn->things + 1);
    chain = next(&data, &size) % (drawn->things + 1);
    for (uint32_t i = 0; i + 1 < chain; i++)
        draw_edge(drawn, i, i + 1, i % 2 == 0);
    for (uint32_t i = 0; i < drawn->things; i++) {
        const uint8_t byte = next(&data, &size);

        drawn->blame[i] = byte >= 250 ? ZBP_HELD_UNSEEN : byte % 5;
    }
    while (size >= 2 && drawn->things > 0) {
        const uint32_t from = next(&data, &size), to = next(&data, &size);

        draw_edge(drawn, from % drawn->things, to % (drawn->things + 1), from >= 128);
    }
}

static int explore(const drawing *drawn, zbp_heap *heap)
{
    int status = ZBP_OK;
    uint32_t v, to;

    while (status == ZBP_OK && zbp_heap_next(heap, &v)) {
        const uint32_t from = (uint32_t)((const char *)heap->vertex[v].key - place);

        for (uint32_t e = 0; status == ZBP_OK && e < drawn->edge_count; e++)
            if (drawn->edge[e].from == from)
                status = zbp_heap_meet(heap, place + drawn->edge[e].to, 1, v,
                                       drawn->edge[e].counts_python, &to, NULL);
    }
    return status;
}

int drawing_explore(const drawing *drawn, zbp_heap *heap)
{
    int status = zbp_heap_ignore(heap, place + drawn->things);
    uint32_t v;

    for (uint32_t i = 0; status == ZBP_OK && i < drawn->roots; i++)
        status = zbp_heap_meet(heap, place + i, 1, ZBP_NO_VERTEX, false, &v, NULL);
    if (status == ZBP_OK)
        status = explore(drawn, heap);
    if (status != ZBP_OK)
        return status;
    zbp_heap_end_roots(heap);
    for (uint32_t i = 0; status == ZBP_OK && i < drawn->things; i++)
        status = zbp_heap_meet(heap, place + i, 1, ZBP_NO_VERTEX, false, &v, NULL);
    return status == ZBP_OK ? explore(drawn, heap) : status;
}

void drawing_blame(const drawing *drawn, const zbp_heap *heap, uint8_t blame_out[DRAWN_MOST])
{
    for (uint32_t v = zbp_heap_reached(heap); v < heap->count; v++)
        blame_out[v - zbp_heap_reached(heap)] =
            drawn->blame[(const char *)heap->vertex[v].key - place];
}

/* ---- the model ---- */

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static void measure(model *m)
{
    for (uint32_t i = 0; i < m->n; i++)
        for (uint32_t j = 0; j < m->n; j++)
            m->far[i][j] = m->holds[i][j] ? 1 : FAR;
    for (uint32_t k = 0; k < m->n; k++)
        for (uint32_t i = 0; i < m->n; i++)
            for (uint32_t j = 0; j < m->n; j++)
                m->far[i][j] = smaller(m->far[i][j], m->far[i][k] + m->far[k][j]);
}

static bool in_one_cycle(const model *m, uint32_t i, uint32_t j)
{
    return m->rank[i] != ZBP_RANK_ROOT && m->rank[i] != ZBP_RANK_HIDDEN && m->far[i][j] < FAR &&
           m->far[j][i] < FAR;
}

/* Ranks what has none and is not far from where ways of this rank begin. */
static void rank(model *m, uint8_t of_rank)
{
    for (uint32_t j = 0; j < m->n; j++) {
        uint32_t least = m->begins[j] ? 0 : FAR;

        if (m->rank[j] != ZBP_RANK_NONE)
            continue;
        for (uint32_t i = 0; i < m->n; i++)
            if (m->begins[i])
                least = smaller(least, m->far[i][j]);
        m->depth[j] = least;
    }
    for (uint32_t j = 0; j < m->n; j++)
        if (m->rank[j] == ZBP_RANK_NONE && m->depth[j] < FAR)
            m->rank[j] = of_rank;
    memset(m->begins, 0, sizeof m->begins);
}

static bool is_most_to_blame(const model *m, const drawing *drawn, uint32_t i)
{
    for (uint32_t j = 0; j < m->n; j++)
        if (in_one_cycle(m, i, j) && drawn->blame[j] < drawn->blame[i])
            return false;
    return m->rank[i] == ZBP_RANK_NONE && in_one_cycle(m, i, i);
}

static void model_of(model *m, const drawing *drawn)
{
    memset(m, 0, sizeof *m);
    m->n = drawn->things;
    for (uint32_t e = 0; e < drawn->edge_count; e++)
        if (drawn->edge[e].to < m->n)
            m->holds[drawn->edge[e].from][drawn->edge[e].to] = true;
    measure(m);
    for (uint32_t i = 0; i < m->n; i++)
        m->begins[i] = i < drawn->roots;
    rank(m, ZBP_RANK_ROOT);
    for (uint32_t i = 0; i < m->n; i++)
        m->begins[i] = m->rank[i] == ZBP_RANK_NONE && drawn->blame[i] == ZBP_HELD_UNSEEN;
    rank(m, ZBP_RANK_HIDDEN);
    for (uint32_t i = 0; i < m->n; i++)
        m->begins[i] = is_most_to_blame(m, drawn, i);
    rank(m, ZBP_RANK_CYCLE);
}

static const char *heap_differs(const model *m, const drawing *drawn, const zbp_heap *heap)
{
    uint32_t python[DRAWN_MOST] = {0}, native[DRAWN_MOST] = {0}, kept = 0;

    if (heap->count != m->n || zbp_heap_find(heap, place + m->n) != ZBP_NO_VERTEX)
        return "the heap has other vertices";
    for (uint32_t e = 0; e < drawn->edge_count; e++) {
        const uint32_t from = drawn->edge[e].from, to = drawn->edge[e].to;

        if (to == m->n)
            continue;
        ++(drawn->edge[e].counts_python ? python : native)[to];
        kept += m->rank[from] != ZBP_RANK_ROOT && m->rank[to] != ZBP_RANK_ROOT;
    }
    if (heap->edge_count != kept)
        return "the heap has kept other edges";
    for (uint32_t i = 0; i < m->n; i++) {
        const uint32_t v = m->vertex[i];

        if (heap->vertex[v].python_refs != python[i] || heap->vertex[v].native_refs != native[i])
            return "the heap has counted other references";
        if ((v < zbp_heap_reached(heap)) != (m->rank[i] == ZBP_RANK_ROOT))
            return "the roots reach others";
    }
    return NULL;
}

static const char *way_differs(const model *m, const zbp_heap *heap, const zbp_ways *ways,
                               uint32_t i)
{
    const zbp_way_to *way = &ways->way[m->vertex[i]];
    uint32_t whole[DRAWN_MOST], chain[ZBP_CHAIN_LONGEST], count, length = 0;

    if (way->rank != m->rank[i])
        return "a rank";
    if (way->rank == ZBP_RANK_NONE)
        return NULL;
    if (way->depth != m->depth[i])
        return "a depth";
    for (uint32_t v = m->vertex[i]; v != ZBP_NO_VERTEX; v = ways->way[v].parent)
        whole[length++] = v;
    if (length != way->depth + 1)
        return "the length of a way";
    for (uint32_t k = 0; k + 1 < length; k++) {
        const uint32_t to = (uint32_t)((const char *)heap->vertex[whole[k]].key - place);
        const uint32_t from = (uint32_t)((const char *)heap->vertex[whole[k + 1]].key - place);

        if (!m->holds[from][to])
            return "a way goes where there is no edge";
    }
    count = zbp_ways_chain(ways, m->vertex[i], chain);
    if (count != smaller(length, ZBP_CHAIN_LONGEST))
        return "the length of a chain";
    for (uint32_t k = 0; k < count; k++) {
        const bool is_left_out = length > count && k == ZBP_CHAIN_HEAD;
        const uint32_t left = length > count && k < ZBP_CHAIN_HEAD ? length - 1 - k : count - 1 - k;

        if (chain[k] != (is_left_out ? ZBP_NO_VERTEX : whole[left]))
            return "a chain";
    }
    return NULL;
}

static const char *cycle_differs(const model *m, const zbp_heap *heap, zbp_ways *ways, uint32_t i)
{
    const uint32_t *cycle, v = m->vertex[i];
    uint32_t count;

    for (uint32_t j = 0; j < m->n; j++) {
        const uint32_t of_i = zbp_ways_component(ways, v);
        const bool together =
            of_i != ZBP_NO_VERTEX && of_i == zbp_ways_component(ways, m->vertex[j]);

        if (together != in_one_cycle(m, i, j))
            return "a component";
    }
    if (!in_one_cycle(m, i, i))
        return NULL;
    count = zbp_ways_cycle(ways, v, &cycle);
    if (count != m->far[i][i] || cycle[0] != v)
        return "a cycle is not a shortest one through its vertex";
    for (uint32_t k = 0; k < count; k++) {
        const char *from = heap->vertex[cycle[k]].key,
                   *to = heap->vertex[cycle[(k + 1) % count]].key;

        if (!m->holds[from - place][to - place])
            return "a cycle goes where there is no edge";
    }
    return NULL;
}

const char *drawing_differs(const drawing *drawn, const zbp_heap *heap, zbp_ways *ways)
{
    static _Thread_local model m;
    const char *reason;

    model_of(&m, drawn);
    for (uint32_t i = 0; i < m.n; i++) {
        m.vertex[i] = zbp_heap_find(heap, place + i);
        if (m.vertex[i] == ZBP_NO_VERTEX)
            return "the heap lacks a vertex";
    }
    reason = heap_differs(&m, drawn, heap);
    for (uint32_t i = 0; reason == NULL && i < m.n; i++) {
        reason = way_differs(&m, heap, ways, i);
        if (reason == NULL)
            reason = cycle_differs(&m, heap, ways, i);
    }
    return reason;
}
