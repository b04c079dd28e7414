#include "holders/zbp_going.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"
#include "core/base/zbpi_lists.h"

void zbp_going_init(zbp_going *going, zbp_things *things, const zbp_alloc *alloc)
{
    *going = (zbp_going){0};
    zbp_explore_init(&going->explore, things, alloc);
}

void zbp_going_fini(zbp_going *going)
{
    const zbp_alloc *alloc = &going->explore.alloc;

    zbp_vertices_fini(&going->roots, alloc);
    zbp_vertices_fini(&going->storages, alloc);
    if (going->begin != NULL)
        zbpi_free(alloc, going->begin, (going->explore.heap.count + (size_t)1) * sizeof(uint32_t));
    zbpi_free(alloc, going->holder, going->holders * sizeof(uint32_t));
    zbp_explore_fini(&going->explore);
}

/* From the vertices to those that they hold: of what goes, for nothing else was looked at. */
typedef struct edges {
    uint32_t *begin; /* [count + 1] */
    uint32_t *to;
} edges;

/* Who holds which storage: pairs, by holder and then as they were found. */
typedef struct pairs {
    zbp_vertices storage, holder;
} pairs;

static void fill_edges(const zbp_heap *heap, edges *held)
{
    zbpi_lists_clear(held->begin, heap->count);
    for (uint32_t e = 0; e < heap->edge_count; e++)
        held->begin[heap->edge[e].from]++;
    zbpi_lists_end(held->begin, heap->count);
    for (uint32_t e = heap->edge_count; e-- > 0;)
        held->to[--held->begin[heap->edge[e].from]] = heap->edge[e].to;
}

/* Adds a pair for each storage that root number i leads to. seen: by vertex, the last number that has been there. */
static int add_pairs(const zbp_going *going, uint32_t i, const edges *held, uint32_t *seen,
                     zbp_vertices *stack, pairs *found)
{
    const zbp_explore *explore = &going->explore;
    int status = zbp_vertices_add(stack, going->roots.item[i], &explore->alloc);

    while (status == ZBP_OK && stack->count > 0) {
        const uint32_t v = stack->item[--stack->count];

        if (seen[v] == i)
            continue;
        seen[v] = i;
        if (explore->heap.vertex[v].thing == ZBP_THING_STORAGE) {
            status = zbp_vertices_add(&found->storage, v, &explore->alloc);
            if (status == ZBP_OK)
                status = zbp_vertices_add(&found->holder, i, &explore->alloc);
        }
        for (uint32_t e = held->begin[v]; status == ZBP_OK && e < held->begin[v + 1]; e++)
            status = zbp_vertices_add(stack, held->to[e], &explore->alloc);
    }
    return status;
}

static int find_pairs(const zbp_going *going, pairs *found)
{
    const zbp_explore *explore = &going->explore;
    const uint32_t count = explore->heap.count;
    zbp_vertices stack = {0};
    void *block;
    uint32_t *rest, *seen;
    edges held;
    size_t size;
    int status = zbpi_block_new(&explore->alloc, 2 * (uint64_t)count + 1 + explore->heap.edge_count,
                                0, &block, &size);

    if (status != ZBP_OK)
        return status;
    rest = block;
    seen = zbpi_block_take(&rest, count);
    held.begin = zbpi_block_take(&rest, count + (size_t)1);
    held.to = zbpi_block_take(&rest, explore->heap.edge_count);
    memset(seen, 0xff, count * sizeof *seen); /* no number of a root */
    fill_edges(&explore->heap, &held);
    for (uint32_t i = 0; status == ZBP_OK && i < going->roots.count; i++)
        status = add_pairs(going, i, &held, seen, &stack, found);
    zbp_vertices_fini(&stack, &explore->alloc);
    zbpi_free(&explore->alloc, block, size);
    return status;
}

/* The pairs as a list for each storage. */
static int fill_holders(zbp_going *going, const pairs *found)
{
    const zbp_alloc *alloc = &going->explore.alloc;
    const uint32_t vertices = going->explore.heap.count, count = found->storage.count;

    going->begin = zbpi_resize(alloc, NULL, 0, (vertices + (size_t)1) * sizeof(uint32_t));
    if (going->begin == NULL)
        return ZBP_ENOMEM;
    zbpi_lists_clear(going->begin, vertices);
    if (count == 0)
        return ZBP_OK;
    going->holder = zbpi_resize(alloc, NULL, 0, count * sizeof(uint32_t));
    if (going->holder == NULL)
        return ZBP_ENOMEM;
    going->holders = count;
    for (uint32_t i = 0; i < count; i++)
        going->begin[found->storage.item[i]]++;
    zbpi_lists_end(going->begin, vertices);
    for (uint32_t i = count; i-- > 0;)
        going->holder[--going->begin[found->storage.item[i]]] = found->holder.item[i];
    return ZBP_OK;
}

/* Wrappers of tensors, and meta tensors, have storages without memory. */
static bool has_memory(const zbp_vertex *vertex)
{
    zbp_memory memory = {0};

    if (vertex->thing == ZBP_THING_STORAGE)
        (void)zbp_storage_look(vertex->key, &memory); /* it is owned, and so there */
    return memory.address != 0;
}

int zbp_going_find(zbp_going *going, const void *const *objects, uint32_t count, zbp_error *error)
{
    zbp_explore *explore = &going->explore;
    zbp_vertices gone = {0};
    pairs found = {0};
    int status = ZBP_OK;

    zbp_heap_end_roots(&explore->heap); /* from here on the heap keeps who holds whom */
    for (uint32_t i = 0; status == ZBP_OK && i < count; i++) {
        uint32_t v;

        status = zbp_explore_root(explore, objects[i], &v);
        if (status == ZBP_OK)
            status = zbp_vertices_add(&going->roots, v, &explore->alloc);
    }
    if (status == ZBP_OK)
        status = zbp_explore_let_go(explore, &going->roots, &gone, error);
    for (uint32_t i = 0; status == ZBP_OK && i < gone.count; i++)
        if (has_memory(&explore->heap.vertex[gone.item[i]]))
            status = zbp_vertices_add(&going->storages, gone.item[i], &explore->alloc);
    if (status == ZBP_OK)
        status = find_pairs(going, &found);
    if (status == ZBP_OK)
        status = fill_holders(going, &found);
    zbp_vertices_fini(&found.storage, &explore->alloc);
    zbp_vertices_fini(&found.holder, &explore->alloc);
    zbp_vertices_fini(&gone, &explore->alloc);
    return status;
}

zbp_going_way zbp_going_way_to(const zbp_going *going, uint32_t storage)
{
    const zbp_heap *heap = &going->explore.heap;
    zbp_going_way way = {ZBP_NO_VERTEX, ZBP_NO_VERTEX, false};

    for (uint32_t at = heap->vertex[storage].parent; at != ZBP_NO_VERTEX;
         at = heap->vertex[at].parent) {
        const uint8_t thing = heap->vertex[at].thing;

        way.is_packed = way.is_packed || thing == ZBP_THING_PYTHON;
        if (thing == ZBP_THING_NODE && way.node == ZBP_NO_VERTEX)
            way.node = at;
        if (thing == ZBP_THING_TENSOR && way.tensor == ZBP_NO_VERTEX)
            way.tensor = at;
    }
    return way;
}
