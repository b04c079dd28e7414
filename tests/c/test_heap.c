/* What a search has met: vertices, references, kept edges, what nothing explains; the validator; failing allocations. */
#include "check.h"
#include "checks.h"
#include "core/holders/zbp_heap.h"
#include "counting.h"

static const char place[4096];

static uint32_t meet(zbp_heap *heap, uint32_t i, uint32_t parent, bool counts_python)
{
    uint32_t v = 0;

    REQUIRE(zbp_heap_meet(heap, place + i, 3, parent, counts_python, &v, NULL) == ZBP_OK);
    return v;
}

static void vertices_are_numbered_as_they_are_met(void)
{
    const char *reason = NULL;
    zbp_heap heap;
    uint32_t v = 7;
    bool added = false;

    zbp_heap_init(&heap, NULL);
    CHECK(!zbp_heap_next(&heap, &v) && v == 7);
    CHECK(meet(&heap, 5, ZBP_NO_VERTEX, true) == 0);
    CHECK(meet(&heap, 5, ZBP_NO_VERTEX, true) == 0); /* a root counts no reference */
    CHECK(zbp_heap_next(&heap, &v) && v == 0);
    CHECK(zbp_heap_meet(&heap, place + 6, 2, 0, true, &v, &added) == ZBP_OK && v == 1 && added);
    CHECK(zbp_heap_meet(&heap, place + 6, 2, 0, false, &v, &added) == ZBP_OK && v == 1 && !added);
    CHECK(meet(&heap, 5, 1, false) == 0);
    CHECK(heap.count == 2 && heap.edge_count == 0 && zbp_heap_reached(&heap) == 2);
    CHECK(heap.vertex[0].parent == ZBP_NO_VERTEX && heap.vertex[0].thing == 3);
    CHECK(heap.vertex[0].python_refs == 0 && heap.vertex[0].native_refs == 1);
    CHECK(heap.vertex[1].parent == 0 && heap.vertex[1].thing == 2);
    CHECK(heap.vertex[1].python_refs == 1 && heap.vertex[1].native_refs == 1);
    CHECK(zbp_heap_find(&heap, place + 6) == 1 && zbp_heap_find(&heap, place) == ZBP_NO_VERTEX);
    CHECK(zbp_heap_next(&heap, &v) && v == 1 && !zbp_heap_next(&heap, &v));
    CHECK_VALID(zbp_heap_check(&heap, &reason));
    zbp_heap_fini(&heap);
    CHECK(heap.vertex == NULL && heap.count == 0);
    zbp_heap_fini(&heap);
}

static void what_is_ignored_is_no_vertex(void)
{
    zbp_heap heap;

    zbp_heap_init(&heap, NULL);
    CHECK(zbp_heap_ignore(&heap, place + 1) == ZBP_OK);
    CHECK(zbp_heap_ignore(&heap, NULL) == ZBP_EINVAL);
    CHECK(meet(&heap, 1, ZBP_NO_VERTEX, true) == ZBP_NO_VERTEX);
    CHECK(meet(&heap, 2, ZBP_NO_VERTEX, true) == 0);
    CHECK(meet(&heap, 1, 0, true) == ZBP_NO_VERTEX && heap.count == 1);
    CHECK(zbp_heap_knows(&heap, place + 1) && zbp_heap_find(&heap, place + 1) == ZBP_NO_VERTEX);
    CHECK(zbp_heap_knows(&heap, place + 2) && !zbp_heap_knows(&heap, place + 3));
    CHECK(zbp_heap_ignore(&heap, place + 2) == ZBP_OK && zbp_heap_find(&heap, place + 2) == 0);
    zbp_heap_fini(&heap);
}

static void edges_are_kept_between_what_the_roots_do_not_reach(void)
{
    const char *reason = NULL;
    zbp_heap heap;
    uint32_t v;

    zbp_heap_init(&heap, NULL);
    (void)meet(&heap, 0, ZBP_NO_VERTEX, true);
    (void)meet(&heap, 1, 0, true);
    while (zbp_heap_next(&heap, &v))
        ;
    zbp_heap_end_roots(&heap);
    CHECK(zbp_heap_reached(&heap) == 2);
    CHECK(meet(&heap, 2, ZBP_NO_VERTEX, true) == 2);
    CHECK(meet(&heap, 3, 2, true) == 3);
    (void)meet(&heap, 1, 2, true);
    (void)meet(&heap, 2, 3, false);
    CHECK(heap.edge_count == 2 && zbp_heap_reached(&heap) == 2);
    CHECK(heap.edge[0].from == 2 && heap.edge[0].to == 3);
    CHECK(heap.edge[1].from == 3 && heap.edge[1].to == 2);
    CHECK(heap.vertex[1].python_refs == 2);
    CHECK_VALID(zbp_heap_check(&heap, &reason));
    zbp_heap_fini(&heap);
}

static void what_no_edge_explains_is_counted(void)
{
    static const struct {
        zbp_counts counts;
        bool native_only;
        int64_t unexplained; /* of a vertex with two edges to its Python object and one to C++'s */
    } rows[] = {
        {{.python = 2, .has_python = true}, false, 0},
        {{.python = 5, .has_python = true}, false, 3},
        {{.python = 1, .has_python = true}, true, -1},
        {{.native = 1, .has_native = true}, false, 0},
        {{.native = 4, .has_native = true}, true, 3},
        {{.native = 0, .has_native = true}, false, -1},
        /* The Python object owns C++'s, and that the Python object. */
        {{3, 2, true, true, true, true}, false, 0},
        {{5, 3, true, true, true, true}, false, 3},
        {{5, 3, true, true, true, true}, true, 1},
        {{1, 1, true, true, true, true}, false, 0}, /* none is less than none */
        /* One of them the other. */
        {{2, 2, true, true, true, false}, false, 0},
        {{3, 2, true, true, true, false}, false, 1},
        {{3, 1, true, true, false, true}, false, 0},
        {{3, 2, true, true, false, true}, false, 1},
    };
    zbp_heap heap;

    zbp_heap_init(&heap, NULL);
    (void)meet(&heap, 0, ZBP_NO_VERTEX, true);
    (void)meet(&heap, 1, 0, true);
    (void)meet(&heap, 1, 0, true);
    (void)meet(&heap, 1, 0, false);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        CHECK(zbp_heap_unexplained(&heap, 1, rows[i].counts, rows[i].native_only) ==
              rows[i].unexplained);
    zbp_heap_fini(&heap);
}

static void what_is_no_vertex_is_refused(void)
{
    zbp_heap heap;
    uint32_t v = 9;

    zbp_heap_init(&heap, NULL);
    CHECK(zbp_heap_meet(&heap, place, 0, 0, true, &v, NULL) == ZBP_EINVAL);
    CHECK(zbp_heap_meet(&heap, NULL, 0, ZBP_NO_VERTEX, true, &v, NULL) == ZBP_EINVAL);
    CHECK(v == 9 && heap.count == 0);
    heap.count = heap.capacity = UINT32_MAX;
    CHECK(zbp_heap_meet(&heap, place, 0, ZBP_NO_VERTEX, true, &v, NULL) == ZBP_EOVERFLOW);
    heap.count = heap.capacity = 0;
    zbp_heap_end_roots(&heap);
    heap.edge_count = heap.edge_capacity = UINT32_MAX;
    CHECK(zbp_heap_meet(&heap, place, 0, ZBP_NO_VERTEX, true, &v, NULL) == ZBP_EOVERFLOW);
    heap.edge_count = heap.edge_capacity = 0;
    zbp_heap_fini(&heap);
}

static bool is_faulty(const zbp_heap *heap)
{
    const char *reason = NULL;

    return zbp_heap_check(heap, NULL) == ZBP_EINVAL &&
           zbp_heap_check(heap, &reason) == ZBP_EINVAL && reason != NULL;
}

/* Sets a number wrong, looks, and puts it back. */
#define CHECK_FOUND(field, wrong)                                                                  \
    do {                                                                                           \
        const uint32_t right = (field);                                                            \
        (field) = (wrong);                                                                         \
        CHECK(is_faulty(&heap));                                                                   \
        (field) = right;                                                                           \
    } while (0)

static void the_validator_finds_faults(void)
{
    const char *reason = NULL;
    zbp_heap heap;
    uint32_t v;

    zbp_heap_init(&heap, NULL);
    (void)meet(&heap, 0, ZBP_NO_VERTEX, true);
    (void)meet(&heap, 1, 0, true);
    CHECK_FOUND(heap.reached, 1);
    CHECK_FOUND(heap.edge_count, 1);
    while (zbp_heap_next(&heap, &v))
        ;
    heap.edge_capacity = 1;
    CHECK_FOUND(heap.edge_count, 1);
    CHECK_FOUND(heap.reached, 1);
    heap.edge_capacity = 0;
    zbp_heap_end_roots(&heap);
    (void)meet(&heap, 2, ZBP_NO_VERTEX, true);
    (void)meet(&heap, 3, 2, true);
    (void)meet(&heap, 3, 2, true);
    CHECK_VALID(zbp_heap_check(&heap, &reason));
    CHECK_FOUND(heap.capacity, 1);
    CHECK_FOUND(heap.next, 1);
    CHECK_FOUND(heap.next, 9);
    CHECK_FOUND(heap.id_of.count, 9);
    CHECK_FOUND(heap.vertex[1].parent, 1);
    CHECK_FOUND(heap.vertex[3].python_refs, 1);
    CHECK_FOUND(heap.edge[0].from, 1);
    CHECK_FOUND(heap.edge[0].from, 4);
    CHECK_FOUND(heap.edge[0].to, 1);
    CHECK_FOUND(heap.edge[0].to, 4);
    heap.vertex[2].key = place;
    CHECK(is_faulty(&heap));
    zbp_heap_fini(&heap);
}

static int fill(zbp_heap *heap)
{
    int status = zbp_heap_ignore(heap, place + 4000);
    uint32_t v;

    for (uint32_t i = 0; status == ZBP_OK && i < 2000; i++) {
        if (i == 100) {
            heap->next = heap->count;
            zbp_heap_end_roots(heap);
        }
        status = zbp_heap_meet(heap, place + i, 0, heap->count - 1, true, &v, NULL);
    }
    return status;
}

static void a_failed_allocation_leaves_the_heap_as_it_was(void)
{
    counting c;
    const zbp_alloc alloc = counting_alloc(&c);
    int status = ZBP_ENOMEM;

    for (long n = 0; status != ZBP_OK; n++) {
        const char *reason = NULL;
        zbp_heap heap;

        REQUIRE(n < 100);
        c.calls = 0;
        c.fail_at = n;
        zbp_heap_init(&heap, &alloc);
        status = fill(&heap);
        CHECK(status == ZBP_OK || status == ZBP_ENOMEM);
        CHECK_VALID(zbp_heap_check(&heap, &reason));
        zbp_heap_fini(&heap);
        CHECK(c.live == 0);
    }
}

int main(void)
{
    check_sees_failure();
    RUN(vertices_are_numbered_as_they_are_met);
    RUN(what_is_ignored_is_no_vertex);
    RUN(edges_are_kept_between_what_the_roots_do_not_reach);
    RUN(what_no_edge_explains_is_counted);
    RUN(what_is_no_vertex_is_refused);
    RUN(the_validator_finds_faults);
    RUN(a_failed_allocation_leaves_the_heap_as_it_was);
    return check_end();
}
