/* By which ways what lives is held: random heaps against the model, long ways, many cycles, the validator, failing
 * allocations. */
#include "check.h"
#include "checks.h"
#include "core/holders/zbp_ways.h"
#include "counting.h"
#include "model.h"
#include "ways_model.h"

static void ways_are_the_models(void)
{
    uint64_t random = 3;
    uint32_t ranks[4] = {0}, cycles = 0;

    for (int round = 0; round < 4000; round++) {
        uint8_t bytes[220], blame[DRAWN_MOST];
        const char *reason = NULL;
        drawing drawn;
        zbp_heap heap;
        zbp_ways ways;

        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)model_below(&random, 256);
        bytes[1] = (uint8_t)model_below(&random, 3);
        bytes[2] = model_below(&random, 4) == 0 ? bytes[2] : 0;
        drawing_read(&drawn, bytes, model_below(&random, sizeof bytes));
        zbp_heap_init(&heap, NULL);
        REQUIRE(drawing_explore(&drawn, &heap) == ZBP_OK);
        CHECK_VALID(zbp_heap_check(&heap, &reason));
        drawing_blame(&drawn, &heap, blame);
        REQUIRE(zbp_ways_build(&ways, &heap, blame, NULL) == ZBP_OK);
        CHECK_VALID(zbp_ways_check(&ways, &heap, &reason));
        reason = drawing_differs(&drawn, &heap, &ways);
        CHECK_VALID(reason == NULL ? ZBP_OK : ZBP_EINVAL);
        for (uint32_t v = 0; v < heap.count; v++) {
            ranks[ways.way[v].rank]++;
            cycles += zbp_ways_component(&ways, v) != ZBP_NO_VERTEX;
        }
        zbp_ways_fini(&ways);
        zbp_heap_fini(&heap);
    }
    /* The rounds have looked at all there is. */
    for (int rank = 0; rank < 4; rank++)
        CHECK(ranks[rank] > 1000);
    CHECK(cycles > 1000);
}

/* What nothing is wrong with says so, and sees a number that is made wrong. */
static void the_model_sees_a_fault(void)
{
    const uint8_t bytes[] = {3, 1, 3, 0, 0, 0};
    const uint8_t nobody[DRAWN_MOST] = {0};
    drawing drawn;
    zbp_heap heap;
    zbp_ways ways;

    drawing_read(&drawn, bytes, sizeof bytes);
    zbp_heap_init(&heap, NULL);
    REQUIRE(drawing_explore(&drawn, &heap) == ZBP_OK);
    REQUIRE(zbp_ways_build(&ways, &heap, nobody, NULL) == ZBP_OK);
    CHECK(drawing_differs(&drawn, &heap, &ways) == NULL);
    ways.way[2].parent = 0;
    CHECK(drawing_differs(&drawn, &heap, &ways) != NULL);
    ways.way[2].parent = 1;
    heap.vertex[2].python_refs++;
    CHECK(drawing_differs(&drawn, &heap, &ways) != NULL);
    zbp_ways_fini(&ways);
    zbp_heap_fini(&heap);
}

static void add(zbp_heap *heap, uint32_t from, uint32_t to)
{
    uint32_t v;

    REQUIRE(zbp_heap_meet(heap, (const void *)((uintptr_t)16 * (to + 1)), 0, from, true, &v,
                          NULL) == ZBP_OK);
    REQUIRE(v == to);
}

/* Everybody is garbage. */
static void build(zbp_ways *ways, const zbp_heap *heap)
{
    uint8_t *blame = calloc(heap->count, 1);

    REQUIRE(blame != NULL);
    REQUIRE(zbp_ways_build(ways, heap, blame, NULL) == ZBP_OK);
    free(blame);
}

static void the_middle_of_a_long_chain_is_left_out(void)
{
    enum { LONG = 100 };
    zbp_heap heap;
    zbp_ways ways;
    uint32_t chain[ZBP_CHAIN_LONGEST];

    zbp_heap_init(&heap, NULL);
    for (uint32_t i = 0; i < LONG; i++)
        add(&heap, i - 1, i);
    REQUIRE(zbp_ways_build(&ways, &heap, NULL, NULL) == ZBP_OK);
    CHECK(zbp_ways_component(&ways, 0) == ZBP_NO_VERTEX);
    for (uint32_t v = 0; v < LONG; v++) {
        const uint32_t count = zbp_ways_chain(&ways, v, chain);

        CHECK(chain[0] == 0 && chain[count - 1] == v);
        if (v <= 18) {
            CHECK(count == v + 1);
            continue;
        }
        CHECK(count == 19 && chain[11] == 11 && chain[12] == ZBP_NO_VERTEX && chain[13] == v - 5);
    }
    zbp_ways_fini(&ways);
    zbp_heap_fini(&heap);
}

/* A ring and a way out of it: on any stack, however long they are. */
static void nothing_recurses(void)
{
    enum { MANY = 300000 };
    const uint32_t *cycle = NULL;
    zbp_heap heap;
    zbp_ways ways;

    zbp_heap_init(&heap, NULL);
    zbp_heap_end_roots(&heap);
    for (uint32_t i = 0; i < 2 * MANY; i++)
        add(&heap, i - 1, i);
    add(&heap, MANY - 1, 0);
    build(&ways, &heap);
    CHECK(ways.way[2 * MANY - 1].rank == ZBP_RANK_CYCLE && ways.way[2 * MANY - 1].depth == MANY);
    CHECK(zbp_ways_component(&ways, MANY) == ZBP_NO_VERTEX);
    CHECK(zbp_ways_cycle(&ways, MANY, &cycle) == 1 && cycle[0] == MANY);
    CHECK(zbp_ways_cycle(&ways, 5, &cycle) == MANY && cycle[0] == 5 && cycle[1] == 6);
    zbp_ways_fini(&ways);
    zbp_heap_fini(&heap);
}

/* If each question cost the size of the heap, this would take minutes. */
static void a_cycle_costs_what_it_meets(void)
{
    enum { MANY = 200000 };
    const uint32_t *cycle = NULL;
    zbp_heap heap;
    zbp_ways ways;

    zbp_heap_init(&heap, NULL);
    zbp_heap_end_roots(&heap);
    for (uint32_t i = 0; i < MANY; i += 2) {
        add(&heap, ZBP_NO_VERTEX, i);
        add(&heap, i, i + 1);
        add(&heap, i + 1, i);
    }
    build(&ways, &heap);
    for (uint32_t v = 0; v < MANY; v++)
        CHECK(zbp_ways_cycle(&ways, v, &cycle) == 2 && cycle[0] == v && cycle[1] == (v ^ 1));
    zbp_ways_fini(&ways);
    zbp_heap_fini(&heap);
}

static bool is_faulty(const zbp_ways *ways, const zbp_heap *heap)
{
    const char *reason = NULL;

    return zbp_ways_check(ways, heap, NULL) == ZBP_EINVAL &&
           zbp_ways_check(ways, heap, &reason) == ZBP_EINVAL && reason != NULL;
}

/* Sets a number wrong, looks, and puts it back. */
#define CHECK_FOUND(type, field, wrong)                                                            \
    do {                                                                                           \
        const type right = (field);                                                                \
        (field) = (wrong);                                                                         \
        CHECK(is_faulty(&ways, &heap));                                                            \
        (field) = right;                                                                           \
        CHECK(zbp_ways_check(&ways, &heap, NULL) == ZBP_OK);                                       \
    } while (0)

/* 0 -> 1 from the roots; 2 -> 3 -> 4 from the unseen, 2 -> 4; 5 <-> 6 -> 7 a cycle; 8 holds itself; 9 -> 5. */
static void the_validator_finds_faults(void)
{
    const uint8_t blame[] = {ZBP_HELD_UNSEEN, 1, 1, 0, 1, 1, 1, 1};
    zbp_heap heap;
    zbp_ways ways;
    uint32_t v;

    zbp_heap_init(&heap, NULL);
    add(&heap, ZBP_NO_VERTEX, 0);
    add(&heap, 0, 1);
    while (zbp_heap_next(&heap, &v))
        ;
    zbp_heap_end_roots(&heap);
    add(&heap, ZBP_NO_VERTEX, 2);
    add(&heap, 2, 3);
    add(&heap, 2, 4);
    add(&heap, 3, 4);
    add(&heap, ZBP_NO_VERTEX, 5);
    add(&heap, 5, 6);
    add(&heap, 6, 5);
    add(&heap, 6, 7);
    add(&heap, ZBP_NO_VERTEX, 8);
    add(&heap, 8, 8);
    add(&heap, ZBP_NO_VERTEX, 9);
    add(&heap, 9, 5);
    REQUIRE(zbp_ways_build(&ways, &heap, blame, NULL) == ZBP_OK);
    CHECK(ways.way[5].rank == ZBP_RANK_CYCLE && ways.way[5].depth == 0 && ways.way[7].depth == 2);
    CHECK(ways.way[9].rank == ZBP_RANK_NONE && ways.way[4].rank == ZBP_RANK_HIDDEN);
    CHECK_FOUND(uint32_t, ways.count, 1);
    CHECK_FOUND(uint32_t, ways.reached, 1);
    CHECK_FOUND(uint32_t, ways.rest, 1);
    CHECK_FOUND(uint8_t, ways.way[1].rank, 9);
    CHECK_FOUND(uint8_t, ways.way[1].rank, ZBP_RANK_NONE);
    CHECK_FOUND(uint8_t, ways.way[9].rank, ZBP_RANK_ROOT);
    CHECK_FOUND(uint32_t, ways.way[0].depth, 1);
    CHECK_FOUND(uint32_t, ways.way[0].head, 1);
    CHECK_FOUND(uint32_t, ways.way[1].parent, 99);
    CHECK_FOUND(uint32_t, ways.way[1].depth, 2);
    CHECK_FOUND(uint32_t, ways.way[1].head, 0);
    CHECK_FOUND(uint32_t, ways.way[1].parent, ZBP_NO_VERTEX);
    CHECK_FOUND(uint32_t, ways.way[3].parent, 5);
    CHECK_FOUND(uint32_t, ways.way[9].parent, 5);
    CHECK_FOUND(zbp_way_to, ways.way[4], ((zbp_way_to){ZBP_NO_VERTEX, 0, 4, ZBP_RANK_NONE}));
    CHECK_FOUND(zbp_way_to, ways.way[4], ((zbp_way_to){ZBP_NO_VERTEX, 0, 4, ZBP_RANK_CYCLE}));
    CHECK_FOUND(zbp_way_to, ways.way[4], ((zbp_way_to){3, 2, 4, ZBP_RANK_HIDDEN}));
    CHECK_FOUND(zbp_way_to, ways.way[8], ((zbp_way_to){ZBP_NO_VERTEX, 0, 8, ZBP_RANK_HIDDEN}));
    CHECK_FOUND(uint32_t, ways.component[8 - 2], ZBP_NO_VERTEX);
    CHECK_FOUND(uint32_t, ways.component[7 - 2], 0);
    CHECK_FOUND(uint32_t, ways.component[6 - 2], ZBP_NO_VERTEX);
    zbp_ways_fini(&ways);
    zbp_heap_fini(&heap);
}

static void a_failed_allocation_leaves_nothing(void)
{
    counting c;
    const zbp_alloc alloc = counting_alloc(&c);
    zbp_heap heap;
    zbp_ways ways;

    zbp_heap_init(&heap, NULL);
    c.fail_at = 0;
    CHECK(zbp_ways_build(&ways, &heap, NULL, &alloc) == ZBP_ENOMEM && ways.block == NULL);
    zbp_ways_fini(&ways);
    c.fail_at = -1;
    REQUIRE(zbp_ways_build(&ways, &heap, NULL, &alloc) == ZBP_OK); /* of an empty heap */
    CHECK(ways.count == 0 && zbp_ways_check(&ways, &heap, NULL) == ZBP_OK && c.calls == 2);
    zbp_ways_fini(&ways);
    zbp_ways_fini(&ways);
    CHECK(c.live == 0);
    zbp_heap_fini(&heap);
}

int main(void)
{
    check_sees_failure();
    RUN(ways_are_the_models);
    RUN(the_model_sees_a_fault);
    RUN(the_middle_of_a_long_chain_is_left_out);
    RUN(nothing_recurses);
    RUN(a_cycle_costs_what_it_meets);
    RUN(the_validator_finds_faults);
    RUN(a_failed_allocation_leaves_nothing);
    return check_end();
}
