#include "core/holders/zbp_heap.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

void zbp_heap_init(zbp_heap *heap, const zbp_alloc *alloc)
{
    memset(heap, 0, sizeof *heap);
    heap->alloc = zbpi_alloc_copy(alloc);
    zbp_map_init(&heap->id_of, alloc);
}

void zbp_heap_fini(zbp_heap *heap)
{
    zbpi_free(&heap->alloc, heap->vertex, heap->capacity * sizeof *heap->vertex);
    zbpi_free(&heap->alloc, heap->edge, heap->edge_capacity * sizeof *heap->edge);
    zbp_map_fini(&heap->id_of);
    memset(heap, 0, sizeof *heap);
}

int zbp_heap_ignore(zbp_heap *heap, const void *key)
{
    return zbp_map_add(&heap->id_of, key, ZBP_NO_VERTEX, NULL, NULL);
}

/* Room for one more vertex and one more edge; the map sees to itself. */
static int make_room(zbp_heap *heap)
{
    if (heap->count == heap->capacity) {
        zbp_vertex *vertex;

        if (heap->count == ZBP_NO_VERTEX)
            return ZBP_EOVERFLOW;
        vertex = zbpi_grow(&heap->alloc, heap->vertex, &heap->capacity, sizeof *vertex);
        if (vertex == NULL)
            return ZBP_ENOMEM;
        heap->vertex = vertex;
    }
    if (heap->has_rest && heap->edge_count == heap->edge_capacity) {
        zbp_holding *edge;

        if (heap->edge_count == UINT32_MAX)
            return ZBP_EOVERFLOW;
        edge = zbpi_grow(&heap->alloc, heap->edge, &heap->edge_capacity, sizeof *edge);
        if (edge == NULL)
            return ZBP_ENOMEM;
        heap->edge = edge;
    }
    return ZBP_OK;
}

static void add_reference(zbp_heap *heap, uint32_t from, uint32_t to, bool counts_python)
{
    if (counts_python)
        heap->vertex[to].python_refs++;
    else
        heap->vertex[to].native_refs++;
    if (heap->has_rest && from >= heap->reached && to >= heap->reached)
        heap->edge[heap->edge_count++] = (zbp_holding){from, to};
}

int zbp_heap_meet(zbp_heap *heap, const void *key, uint8_t thing, uint32_t parent,
                  bool counts_python, uint32_t *v_out, bool *added_out)
{
    uint32_t v = ZBP_NO_VERTEX;
    bool added = false;
    int status;

    if (parent >= heap->count && parent != ZBP_NO_VERTEX)
        return ZBP_EINVAL;
    status = make_room(heap);
    if (status == ZBP_OK)
        status = zbp_map_add(&heap->id_of, key, heap->count, &v, &added);
    if (status != ZBP_OK)
        return status;
    if (added)
        heap->vertex[heap->count++] = (zbp_vertex){.key = key, .parent = parent, .thing = thing};
    if (v != ZBP_NO_VERTEX && parent != ZBP_NO_VERTEX)
        add_reference(heap, parent, v, counts_python);
    *v_out = v;
    if (added_out != NULL)
        *added_out = added;
    return ZBP_OK;
}

bool zbp_heap_knows(const zbp_heap *heap, const void *key)
{
    return zbp_map_find(&heap->id_of, key, NULL);
}

uint32_t zbp_heap_find(const zbp_heap *heap, const void *key)
{
    uint32_t v = ZBP_NO_VERTEX;

    (void)zbp_map_find(&heap->id_of, key, &v);
    return v;
}

bool zbp_heap_next(zbp_heap *heap, uint32_t *v_out)
{
    if (heap->next == heap->count)
        return false;
    *v_out = heap->next++;
    return true;
}

void zbp_heap_end_roots(zbp_heap *heap)
{
    heap->reached = heap->count;
    heap->has_rest = true;
}

uint32_t zbp_heap_reached(const zbp_heap *heap)
{
    return heap->has_rest ? heap->reached : heap->count;
}

static int64_t positive(int64_t number)
{
    return number > 0 ? number : 0;
}

int64_t zbp_heap_unexplained(const zbp_heap *heap, uint32_t v, zbp_counts counts, bool native_only)
{
    const int64_t python = counts.python - heap->vertex[v].python_refs;
    const int64_t native = counts.native - heap->vertex[v].native_refs;

    if (!counts.has_native)
        return python;
    if (!counts.has_python)
        return native;
    return positive(native - counts.python_owns) +
           (native_only ? 0 : positive(python - counts.native_owns));
}
