#include "holders/zbp_explore.h"

#include "core/base/zbpi_alloc.h"

int zbp_vertices_add(zbp_vertices *vertices, uint32_t v, const zbp_alloc *alloc)
{
    if (vertices->count == vertices->capacity) {
        uint32_t *grown =
            zbpi_grow(alloc, vertices->item, &vertices->capacity, sizeof *vertices->item);

        if (grown == NULL)
            return ZBP_ENOMEM;
        vertices->item = grown;
    }
    vertices->item[vertices->count++] = v;
    return ZBP_OK;
}

void zbp_vertices_fini(zbp_vertices *vertices, const zbp_alloc *alloc)
{
    zbpi_free(alloc, vertices->item, vertices->capacity * sizeof *vertices->item);
    *vertices = (zbp_vertices){0};
}

void zbp_explore_init(zbp_explore *self, zbp_things *things, const zbp_alloc *alloc)
{
    *self = (zbp_explore){.things = things, .alloc = zbpi_alloc_copy(alloc)};
    zbp_heap_init(&self->heap, alloc);
}

void zbp_explore_fini(zbp_explore *self)
{
    zbp_heap_fini(&self->heap);
    zbp_vertices_fini(&self->works, &self->alloc);
}

int zbp_explore_ignore(zbp_explore *self, const void *object)
{
    return zbp_heap_ignore(&self->heap, object);
}

int zbp_explore_list(zbp_explore *self, const void *const **object_out, size_t *count_out,
                     zbp_error *error)
{
    const void *list = NULL;
    const int status = zbp_things_list(self->things, object_out, count_out, &list, error);

    return status == ZBP_OK ? zbp_explore_ignore(self, list) : status;
}

static bool is_torchs(uint8_t thing)
{
    return thing == ZBP_THING_TENSOR || thing == ZBP_THING_STORAGE || thing == ZBP_THING_NODE;
}

/* The key is NULL where it is of no interest. */
static int resolve(const zbp_explore *self, const zbp_reference *reference, zbp_thing *found)
{
    if (reference->counts_python)
        return zbp_things_resolve(self->things, reference->key, found);
    *found = (zbp_thing){.thing = reference->thing, .key = reference->key};
    return ZBP_OK;
}

/* *v_out: ZBP_NO_VERTEX if it is ignored, of no interest or dying. */
static int meet(zbp_explore *self, const zbp_reference *reference, uint32_t parent, uint32_t *v_out)
{
    bool lives = true, added = false;
    zbp_thing found;
    int status = resolve(self, reference, &found);

    *v_out = ZBP_NO_VERTEX;
    if (status != ZBP_OK || found.key == NULL)
        return status;
    if (is_torchs(found.thing) && !zbp_heap_knows(&self->heap, found.key))
        status = zbp_things_own(self->things, found, &lives);
    if (status != ZBP_OK || !lives)
        return status;
    status = zbp_heap_meet(&self->heap, found.key, found.thing, parent, reference->counts_python,
                           v_out, &added);
    if (status == ZBP_OK && added && found.type == ZBP_TYPE_WORK)
        status = zbp_vertices_add(&self->works, *v_out, &self->alloc);
    return status;
}

static zbp_reference to_object(const void *object)
{
    return (zbp_reference){ZBP_THING_PYTHON, object, NULL, -1, true};
}

int zbp_explore_root(zbp_explore *self, const void *object, uint32_t *v_out)
{
    const zbp_reference reference = to_object(object);

    return meet(self, &reference, ZBP_NO_VERTEX, v_out);
}

static int add_root(void *arg, const zbp_reference *reference)
{
    uint32_t v;

    return meet(arg, reference, ZBP_NO_VERTEX, &v);
}

int zbp_explore_root_of_torch(zbp_explore *self, const void *object, zbp_error *error)
{
    const zbp_reference reference = to_object(object);
    zbp_thing found;
    uint32_t v;
    const int status = zbp_things_resolve(self->things, object, &found);

    if (status != ZBP_OK || found.key == NULL)
        return status;
    if (found.type == ZBP_TYPE_SCRIPT_MODULE)
        return zbp_things_visit_scripts(self->things, object, add_root, self, error);
    return found.thing == ZBP_THING_PYTHON ? ZBP_OK : meet(self, &reference, ZBP_NO_VERTEX, &v);
}

static int visit_held(zbp_explore *self, uint32_t v, zbp_visit visit, void *arg, zbp_error *error)
{
    const zbp_vertex *vertex = &self->heap.vertex[v];

    return zbp_things_visit(self->things, vertex->thing, vertex->key, visit, arg, error);
}

typedef struct step {
    zbp_explore *self;
    uint32_t from;
} step;

static int meet_held(void *arg, const zbp_reference *reference)
{
    const step *at = arg;
    uint32_t v;

    return meet(at->self, reference, at->from, &v);
}

int zbp_explore_all(zbp_explore *self, zbp_error *error)
{
    step at = {.self = self};
    int status = ZBP_OK;

    while (status == ZBP_OK && zbp_heap_next(&self->heap, &at.from))
        status = visit_held(self, at.from, meet_held, &at, error);
    return status;
}

static int meet_held_natively(void *arg, const zbp_reference *reference)
{
    return reference->counts_python ? ZBP_OK : meet_held(arg, reference);
}

static int is_of_autograd(const zbp_explore *self, uint32_t v, bool *is_out)
{
    const zbp_vertex *vertex = &self->heap.vertex[v];
    zbp_thing found = {0};
    int status = ZBP_OK;

    if (vertex->thing == ZBP_THING_PYTHON)
        status = zbp_things_resolve(self->things, vertex->key, &found);
    *is_out = vertex->thing != ZBP_THING_PYTHON || found.type == ZBP_TYPE_SCRIPT;
    return status;
}

int zbp_explore_autograd(zbp_explore *self, zbp_error *error)
{
    step at = {.self = self};
    int status = ZBP_OK;

    while (status == ZBP_OK && zbp_heap_next(&self->heap, &at.from)) {
        bool is_passed;

        status = is_of_autograd(self, at.from, &is_passed);
        if (status == ZBP_OK && is_passed)
            status = visit_held(self, at.from, meet_held_natively, &at, error);
    }
    return status;
}

int zbp_explore_find(const zbp_explore *self, const zbp_reference *reference, uint32_t *v_out)
{
    zbp_thing found;
    const int status = resolve(self, reference, &found);

    *v_out = status == ZBP_OK ? zbp_heap_find(&self->heap, found.key) : ZBP_NO_VERTEX;
    return status;
}

int64_t zbp_explore_unexplained(const zbp_explore *self, uint32_t v, bool listed, bool native_only)
{
    const zbp_vertex *vertex = &self->heap.vertex[v];
    zbp_counts counts = zbp_things_count(vertex->thing, vertex->key);

    counts.python -= listed ? 1 : 0;
    return zbp_heap_unexplained(&self->heap, v, counts, native_only);
}
