#include "holders/zbp_search.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

void zbp_search_init(zbp_search *search, zbp_things *things, const zbp_alloc *alloc)
{
    *search = (zbp_search){0};
    zbp_map_init(&search->allowed, alloc);
    zbp_explore_init(&search->explore, things, alloc);
}

static void forget_sought(zbp_search *search)
{
    const zbp_alloc *alloc = &search->explore.alloc;

    zbpi_free(alloc, search->sought, search->sought_capacity * sizeof *search->sought);
    zbpi_free(alloc, search->tensor, search->tensor_count * sizeof *search->tensor);
    zbpi_free(alloc, search->is_found, search->born.count * sizeof *search->is_found);
    zbp_born_fini(&search->born);
    search->sought = NULL;
    search->tensor = NULL;
    search->is_found = NULL;
    search->sought_count = search->sought_capacity = search->tensor_count = 0;
}

void zbp_search_fini(zbp_search *search)
{
    zbp_things_unlist(search->explore.things);
    forget_sought(search);
    zbp_map_fini(&search->allowed);
    zbp_ways_fini(&search->ways);
    zbp_explore_fini(&search->explore);
}

/* What is sought ---------------------------------------------------------------------------------------- */

static bool is_sought(zbp_search *search, const void *storage, const zbp_memory *memory)
{
    const uint32_t block = zbp_born_find(&search->born, memory->address);

    if (search->target != NULL)
        return zbp_tensor_storage(search->target) == storage;
    if (block != ZBP_NO_BLOCK)
        search->is_found[block] = true;
    return block != ZBP_NO_BLOCK ||
           (search->older != NULL &&
            zbp_storages_lack(search->older, &search->born, storage, memory));
}

/* *places: of each in `sought`. */
static int find_storages(zbp_search *search, zbp_map *places)
{
    const zbp_heap *heap = &search->explore.heap;
    int status = ZBP_OK;

    for (uint32_t v = 0; status == ZBP_OK && v < heap->count; v++) {
        const void *key = heap->vertex[v].key;
        zbp_memory memory = {0};

        if (heap->vertex[v].thing != ZBP_THING_STORAGE)
            continue;
        (void)zbp_storage_look(key, &memory); /* it is owned, and so there */
        if (!is_sought(search, key, &memory) || zbp_map_find(&search->allowed, key, NULL))
            continue;
        if (search->sought_count == search->sought_capacity) {
            zbp_sought *grown = zbpi_grow(&search->explore.alloc, search->sought,
                                          &search->sought_capacity, sizeof *search->sought);

            if (grown == NULL)
                return ZBP_ENOMEM;
            search->sought = grown;
        }
        status = zbp_map_add(places, key, search->sought_count, NULL, NULL);
        search->sought[search->sought_count++] = (zbp_sought){.storage = v, .memory = memory};
    }
    return status;
}

/* The sought storage of a vertex that is a tensor, or false. */
static bool is_tensor_of(const zbp_heap *heap, uint32_t v, const zbp_map *places, uint32_t *place)
{
    return heap->vertex[v].thing == ZBP_THING_TENSOR &&
           zbp_map_find(places, zbp_tensor_storage(heap->vertex[v].key), place);
}

/* Each storage's tensors side by side, in the order in which they were met. */
static int find_tensors(zbp_search *search, const zbp_map *places)
{
    const zbp_heap *heap = &search->explore.heap;
    uint32_t place, count = 0;

    for (uint32_t v = 0; v < heap->count; v++)
        if (is_tensor_of(heap, v, places, &place)) {
            search->sought[place].tensors_end++;
            count++;
        }
    if (count == 0)
        return ZBP_OK;
    search->tensor = zbpi_resize(&search->explore.alloc, NULL, 0, count * sizeof *search->tensor);
    if (search->tensor == NULL)
        return ZBP_ENOMEM;
    search->tensor_count = count;
    for (uint32_t i = 0, begin = 0; i < search->sought_count; i++) {
        const uint32_t tensors = search->sought[i].tensors_end;

        search->sought[i].tensors_begin = search->sought[i].tensors_end = begin;
        begin += tensors;
    }
    for (uint32_t v = 0; v < heap->count; v++)
        if (is_tensor_of(heap, v, places, &place))
            search->tensor[search->sought[place].tensors_end++] = v;
    return ZBP_OK;
}

static int take_blocks(zbp_search *search)
{
    int status = ZBP_OK;

    if (search->target == NULL)
        status = zbp_born_take(&search->born, search->since, search->until, &search->explore.alloc);
    if (status != ZBP_OK || search->born.count == 0)
        return status;
    search->is_found =
        zbpi_resize(&search->explore.alloc, NULL, 0, search->born.count * sizeof *search->is_found);
    if (search->is_found == NULL)
        return ZBP_ENOMEM;
    memset(search->is_found, 0, search->born.count * sizeof *search->is_found);
    return ZBP_OK;
}

static int find_sought(zbp_search *search)
{
    zbp_map places;
    int status = take_blocks(search);

    zbp_map_init(&places, &search->explore.alloc);
    if (status == ZBP_OK)
        status = find_storages(search, &places);
    if (status == ZBP_OK)
        status = find_tensors(search, &places);
    zbp_map_fini(&places);
    return status;
}

/* What the roots do not reach --------------------------------------------------------------------------- */

/* Meets what Python's collector has listed; flags what of it the roots do not reach. */
static int meet_listed(zbp_search *search, zbp_vertices *listed, zbp_error *error)
{
    zbp_explore *explore = &search->explore;
    int status = ZBP_OK;

    zbp_heap_end_roots(&explore->heap);
    for (size_t i = 0; status == ZBP_OK && i < search->listed_count; i++) {
        uint32_t v;

        status = zbp_explore_root(explore, search->listed[i], &v);
        if (status == ZBP_OK && v != ZBP_NO_VERTEX && v >= zbp_heap_reached(&explore->heap))
            status = zbp_vertices_add(listed, v, &explore->alloc);
    }
    return status == ZBP_OK ? zbp_explore_all(explore, error) : status;
}

/* Of each vertex that the roots do not reach. While the collector's list still refers to those of `listed`. */
static void fill_blame(const zbp_search *search, const zbp_vertices *listed, uint8_t *blame)
{
    const zbp_explore *explore = &search->explore;
    const uint32_t reached = zbp_heap_reached(&explore->heap);

    memset(blame, 0, explore->heap.count - reached);
    for (uint32_t i = 0; i < listed->count; i++)
        blame[listed->item[i] - reached] = true;
    for (uint32_t v = reached; v < explore->heap.count; v++) {
        const zbp_vertex *vertex = &explore->heap.vertex[v];
        const bool is_target = vertex->key == search->target;
        const bool is_held = vertex->thing != ZBP_THING_STORAGE &&
                             zbp_explore_unexplained(explore, v, blame[v - reached], is_target) > 0;

        blame[v - reached] =
            is_held ? ZBP_HELD_UNSEEN : zbp_things_blame(vertex->thing, vertex->key);
    }
}

static int build_ways(zbp_search *search, const zbp_vertices *listed)
{
    const zbp_explore *explore = &search->explore;
    const uint32_t rest = explore->heap.count - zbp_heap_reached(&explore->heap);
    uint8_t *blame = NULL;
    int status;

    if (rest > 0) {
        blame = zbpi_resize(&explore->alloc, NULL, 0, rest);
        if (blame == NULL)
            return ZBP_ENOMEM;
        fill_blame(search, listed, blame);
    }
    status = zbp_ways_build(&search->ways, &explore->heap, blame, &explore->alloc);
    zbpi_free(&explore->alloc, blame, rest);
    return status;
}

static int search_the_rest(zbp_search *search, zbp_error *error)
{
    zbp_vertices listed = {0};
    int status = meet_listed(search, &listed, error);

    if (status == ZBP_OK)
        status = build_ways(search, &listed);
    zbp_vertices_fini(&listed, &search->explore.alloc);
    return status;
}

static bool is_all_found(const zbp_search *search)
{
    for (uint32_t i = 0; i < search->born.count; i++)
        if (!search->is_found[i])
            return false;
    return search->older == NULL && (search->target == NULL || search->sought_count > 0);
}

static int find(zbp_search *search, zbp_error *error)
{
    int status = zbp_explore_all(&search->explore, error);

    if (status == ZBP_OK)
        status = find_sought(search);
    if (status != ZBP_OK)
        return status;
    if (is_all_found(search))
        return build_ways(search, &(zbp_vertices){0});
    forget_sought(search);
    status = search_the_rest(search, error);
    return status == ZBP_OK ? find_sought(search) : status;
}

int zbp_search_begin(zbp_search *search, zbp_error *error)
{
    return zbp_explore_list(&search->explore, &search->listed, &search->listed_count, error);
}

int zbp_search_run(zbp_search *search, zbp_error *error)
{
    const int status = find(search, error);

    zbp_things_unlist(search->explore.things);
    return status;
}
