#include "core/holders/zbp_ways.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"
#include "core/base/zbpi_lists.h"

/* Of index, while components are searched; larger than any other. */
#define UNMET UINT32_MAX
#define CLOSED (UINT32_MAX - 1)

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static int make_arrays(zbp_ways *ways, const zbp_heap *heap)
{
    const size_t words_of_a_way = sizeof *ways->way / sizeof(uint32_t);
    uint32_t *rest;
    int status;

    ways->count = heap->count;
    ways->reached = zbp_heap_reached(heap);
    ways->rest = ways->count - ways->reached;
    status = zbpi_block_new(&ways->alloc,
                            (uint64_t)ways->count * words_of_a_way + (uint64_t)ways->rest * 7 + 1 +
                                heap->edge_count,
                            0, &ways->block, &ways->block_size);
    if (status != ZBP_OK)
        return status;
    rest = ways->block;
    ways->way = (zbp_way_to *)(void *)zbpi_block_take(&rest, ways->count * words_of_a_way);
    ways->component = zbpi_block_take(&rest, ways->rest);
    ways->index = zbpi_block_take(&rest, ways->rest);
    ways->low = zbpi_block_take(&rest, ways->rest);
    ways->next = zbpi_block_take(&rest, ways->rest);
    ways->queue = zbpi_block_take(&rest, ways->rest);
    ways->stack = zbpi_block_take(&rest, ways->rest);
    ways->begin = zbpi_block_take(&rest, (size_t)ways->rest + 1);
    ways->other = zbpi_block_take(&rest, heap->edge_count);
    return ZBP_OK;
}

/* Below, vertices are counted from the first one that the roots do not reach. */

static void list_what_each_holds(zbp_ways *ways, const zbp_heap *heap)
{
    const zbp_holding *edge = heap->edge;

    zbpi_lists_clear(ways->begin, ways->rest);
    for (uint32_t e = 0; e < heap->edge_count; e++)
        ways->begin[edge[e].from - ways->reached]++;
    zbpi_lists_end(ways->begin, ways->rest);
    for (uint32_t e = heap->edge_count; e-- > 0;)
        ways->other[--ways->begin[edge[e].from - ways->reached]] = edge[e].to - ways->reached;
}

/* In the place of these lists. */
static void list_holders_in_cycles(zbp_ways *ways, const zbp_heap *heap)
{
    const zbp_holding *edge = heap->edge;
    const uint32_t *component = ways->component;

    zbpi_lists_clear(ways->begin, ways->rest);
    for (uint32_t e = 0; e < heap->edge_count; e++) {
        const uint32_t from = edge[e].from - ways->reached, to = edge[e].to - ways->reached;

        if (component[to] != ZBP_NO_VERTEX && component[from] == component[to])
            ways->begin[to]++;
    }
    zbpi_lists_end(ways->begin, ways->rest);
    for (uint32_t e = heap->edge_count; e-- > 0;) {
        const uint32_t from = edge[e].from - ways->reached, to = edge[e].to - ways->reached;

        if (component[to] != ZBP_NO_VERTEX && component[from] == component[to])
            ways->other[--ways->begin[to]] = from;
    }
}

/* ---- ways ---- */

static void go_on(zbp_way_to *way, uint32_t from, uint32_t to)
{
    const uint32_t depth = way[from].depth + 1;

    way[to] = (zbp_way_to){.parent = from,
                           .depth = depth,
                           .head = depth < ZBP_CHAIN_HEAD ? to : way[from].head,
                           .rank = way[from].rank};
}

static void begin_at(zbp_way_to *way, uint32_t v, uint8_t rank)
{
    way[v] = (zbp_way_to){.parent = ZBP_NO_VERTEX, .head = v, .rank = rank};
}

/* Parents come before their children. */
static void find_ways_from_roots(zbp_ways *ways, const zbp_heap *heap)
{
    for (uint32_t v = 0; v < ways->reached; v++) {
        if (heap->vertex[v].parent == ZBP_NO_VERTEX)
            begin_at(ways->way, v, ZBP_RANK_ROOT);
        else
            go_on(ways->way, heap->vertex[v].parent, v);
    }
    for (uint32_t v = ways->reached; v < ways->count; v++)
        begin_at(ways->way, v, ZBP_RANK_NONE);
}

/* Breadth first over what has no way yet, from the first `count` in the queue, which have theirs. */
static void spread(zbp_ways *ways, uint32_t count)
{
    const uint32_t reached = ways->reached;

    for (uint32_t i = 0; i < count; i++) {
        const uint32_t from = ways->queue[i];

        for (uint32_t e = ways->begin[from]; e < ways->begin[from + 1]; e++) {
            const uint32_t to = ways->other[e];

            if (ways->way[to + reached].rank == ZBP_RANK_NONE) {
                go_on(ways->way, from + reached, to + reached);
                ways->queue[count++] = to;
            }
        }
    }
}

static void find_ways_from_the_unseen(zbp_ways *ways, const uint8_t *blame)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < ways->rest; i++)
        if (blame[i] == ZBP_HELD_UNSEEN) {
            begin_at(ways->way, i + ways->reached, ZBP_RANK_HIDDEN);
            ways->queue[count++] = i;
        }
    spread(ways, count);
}

static void find_ways_from_cycles(zbp_ways *ways, const uint8_t *blame)
{
    uint32_t *const least_blame = ways->low; /* by component */
    uint32_t count = 0;

    memset(least_blame, 0xFF, (size_t)ways->rest * sizeof *least_blame);
    for (uint32_t i = 0; i < ways->rest; i++) {
        const uint32_t c = ways->component[i];

        if (c != ZBP_NO_VERTEX)
            least_blame[c] = least(least_blame[c], blame[i]);
    }
    for (uint32_t i = 0; i < ways->rest; i++) {
        const uint32_t c = ways->component[i];

        if (c != ZBP_NO_VERTEX && blame[i] == least_blame[c]) {
            begin_at(ways->way, i + ways->reached, ZBP_RANK_CYCLE);
            ways->queue[count++] = i;
        }
    }
    spread(ways, count);
}

/* ---- components of what has no way: Tarjan's algorithm, its recursion in an array ---- */

typedef struct search {
    uint32_t time, components;
    uint32_t path_count;  /* of ways->queue: from the root to where the search is */
    uint32_t stack_count; /* of ways->stack: what has been met and is in no component yet */
} search;

static void enter(search *s, zbp_ways *ways, uint32_t v)
{
    ways->index[v] = ways->low[v] = s->time++;
    ways->next[v] = ways->begin[v];
    ways->queue[s->path_count++] = v;
    ways->stack[s->stack_count++] = v;
}

static bool holds_itself(const zbp_ways *ways, uint32_t v)
{
    for (uint32_t e = ways->begin[v]; e < ways->begin[v + 1]; e++)
        if (ways->other[e] == v)
            return true;
    return false;
}

/* The component of v: all that has been met since. */
static void close_component(search *s, zbp_ways *ways, uint32_t v)
{
    const bool is_cycle = ways->stack[s->stack_count - 1] != v || holds_itself(ways, v);
    const uint32_t number = is_cycle ? s->components++ : ZBP_NO_VERTEX;
    uint32_t member;

    do {
        member = ways->stack[--s->stack_count];
        ways->component[member] = number;
        ways->index[member] = CLOSED;
    } while (member != v);
}

static void find_components_behind(search *s, zbp_ways *ways, uint32_t root)
{
    enter(s, ways, root);
    while (s->path_count > 0) {
        const uint32_t v = ways->queue[s->path_count - 1];

        if (ways->next[v] < ways->begin[v + 1]) {
            const uint32_t to = ways->other[ways->next[v]++];

            if (ways->way[to + ways->reached].rank != ZBP_RANK_NONE)
                continue;
            if (ways->index[to] == UNMET)
                enter(s, ways, to);
            else
                ways->low[v] = least(ways->low[v], ways->index[to]);
            continue;
        }
        s->path_count--;
        if (s->path_count > 0) {
            const uint32_t before = ways->queue[s->path_count - 1];

            ways->low[before] = least(ways->low[before], ways->low[v]);
        }
        if (ways->low[v] == ways->index[v])
            close_component(s, ways, v);
    }
}

static void find_components(zbp_ways *ways)
{
    search s = {0};

    for (uint32_t v = 0; v < ways->rest; v++) {
        ways->index[v] = UNMET;
        ways->component[v] = ZBP_NO_VERTEX;
    }
    for (uint32_t v = 0; v < ways->rest; v++)
        if (ways->index[v] == UNMET && ways->way[v + ways->reached].rank == ZBP_RANK_NONE)
            find_components_behind(&s, ways, v);
}

/* ---- the interface ---- */

int zbp_ways_build(zbp_ways *ways, const zbp_heap *heap, const uint8_t *blame,
                   const zbp_alloc *alloc)
{
    int status;

    memset(ways, 0, sizeof *ways);
    ways->alloc = zbpi_alloc_copy(alloc);
    status = make_arrays(ways, heap);
    if (status != ZBP_OK) {
        memset(ways, 0, sizeof *ways);
        return status;
    }
    find_ways_from_roots(ways, heap);
    list_what_each_holds(ways, heap);
    find_ways_from_the_unseen(ways, blame);
    find_components(ways);
    find_ways_from_cycles(ways, blame);
    list_holders_in_cycles(ways, heap);
    for (uint32_t i = 0; i < ways->rest; i++)
        ways->next[i] = UNMET;
    return ZBP_OK;
}

void zbp_ways_fini(zbp_ways *ways)
{
    zbpi_free(&ways->alloc, ways->block, ways->block_size);
    memset(ways, 0, sizeof *ways);
}

uint32_t zbp_ways_chain(const zbp_ways *ways, uint32_t v, uint32_t chain_out[ZBP_CHAIN_LONGEST])
{
    const zbp_way_to *way = ways->way;
    const bool is_long = way[v].depth > ZBP_CHAIN_HEAD + ZBP_CHAIN_TAIL;
    const uint32_t count = is_long ? ZBP_CHAIN_LONGEST : way[v].depth + 1;
    const uint32_t head = way[v].head;

    for (uint32_t i = count; i-- > 0; v = way[v].parent) {
        if (is_long && i == ZBP_CHAIN_HEAD) {
            chain_out[i--] = ZBP_NO_VERTEX;
            v = head;
        }
        chain_out[i] = v;
    }
    return count;
}

uint32_t zbp_ways_component(const zbp_ways *ways, uint32_t v)
{
    return v < ways->reached ? ZBP_NO_VERTEX : ways->component[v - ways->reached];
}

/* Backwards from v, breadth first, until v holds one of those that hold v. Returns that; next[] leads from there to v,
 * and is set for those that *met_out counts in the queue. */
static uint32_t find_way_back(zbp_ways *ways, uint32_t v, uint32_t *met_out)
{
    uint32_t met = 0, i = 0;

    ways->next[v] = v;
    ways->queue[met++] = v;
    for (; i < met; i++) {
        for (uint32_t e = ways->begin[ways->queue[i]]; e < ways->begin[ways->queue[i] + 1]; e++) {
            const uint32_t holder = ways->other[e];

            if (holder == v) {
                *met_out = met;
                return ways->queue[i];
            }
            if (ways->next[holder] == UNMET) {
                ways->next[holder] = ways->queue[i];
                ways->queue[met++] = holder;
            }
        }
    }
    *met_out = met;
    return v;
}

uint32_t zbp_ways_cycle(zbp_ways *ways, uint32_t v, const uint32_t **cycle_out)
{
    const uint32_t start = v - ways->reached;
    uint32_t met, count = 0;
    uint32_t member = find_way_back(ways, start, &met);

    ways->stack[count++] = v;
    for (; member != start; member = ways->next[member])
        ways->stack[count++] = member + ways->reached;
    for (uint32_t i = 0; i < met; i++)
        ways->next[ways->queue[i]] = UNMET;
    *cycle_out = ways->stack;
    return count;
}
