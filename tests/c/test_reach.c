/* What lies behind faces: random layouts against a naive search; failing allocations; the cost of many questions. */
#include "check.h"
#include "core/pass/zbp_reach.h"
#include "counting.h"

enum { WEIGHTS = 5, NODES = 6, FACES = 8 };

static uint32_t random_state = 7;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

/* Hops lead to nodes of any number, also back: loops are legal for the search. */
static void build(zbp_layout *layout)
{
    zbp_layout_init(layout, WEIGHTS, NODES, NULL);
    for (uint32_t node = 0; node < NODES; node++) {
        for (uint32_t i = random_below(4); i > 0; i--) {
            zbp_hop hop = {.outside = node, .slot = i, .to_outside = -1, .to_weight = -1};

            if (random_below(2) == 0)
                hop.to_outside = (int32_t)random_below(NODES);
            else
                hop.to_weight = (int32_t)random_below(WEIGHTS);
            REQUIRE(zbp_layout_add_hop(layout, hop) == ZBP_OK);
        }
    }
    REQUIRE(zbp_layout_add_task(layout, ZBP_TASK_WHOLE, 0) == ZBP_OK);
    for (uint32_t f = 0; f < FACES; f++) {
        zbp_face face = {.slot = f, .weight = -1, .outside = -1};

        if (random_below(2) == 0)
            face.outside = (int32_t)random_below(NODES);
        else
            face.weight = (int32_t)random_below(WEIGHTS);
        REQUIRE(zbp_layout_add_face(layout, face) == ZBP_OK);
    }
}

static void visit(const zbp_layout *layout, int32_t weight, int32_t node, bool *weights,
                  bool *nodes)
{
    if (weight >= 0) {
        weights[weight] = true;
    } else if (!nodes[node]) {
        nodes[node] = true;
        for (uint32_t h = 0; h < layout->hop_count; h++) {
            if (layout->hop[h].outside == (uint32_t)node)
                visit(layout, layout->hop[h].to_weight, layout->hop[h].to_outside, weights, nodes);
        }
    }
}

static void answers_are_those_of_a_naive_search(void)
{
    for (int round = 0; round < 500; round++) {
        zbp_layout layout;
        zbp_reach reach;

        build(&layout);
        REQUIRE(zbp_reach_init(&reach, &layout, NULL) == ZBP_OK);
        for (int question = 0; question < 6; question++) {
            bool weights[WEIGHTS] = {0}, nodes[NODES] = {0};
            uint32_t found = 0;

            zbp_reach_begin(&reach);
            for (uint32_t i = random_below(4); i > 0; i--) {
                const uint32_t f = random_below(FACES), node = random_below(NODES);

                if (random_below(4) == 0) {
                    zbp_reach_add_outside(&reach, &layout, node);
                    visit(&layout, -1, (int32_t)node, weights, nodes);
                    continue;
                }
                zbp_reach_add(&reach, &layout, f);
                visit(&layout, layout.face[f].weight, layout.face[f].outside, weights, nodes);
            }
            zbp_reach_weights(&reach);
            for (uint32_t w = 0; w < WEIGHTS; w++) {
                if (weights[w])
                    CHECK(found < reach.weight_count && reach.weight[found++] == w);
            }
            CHECK(found == reach.weight_count);
        }
        zbp_reach_fini(&reach);
        zbp_layout_fini(&layout);
    }
}

/* If each of them cost the size of the layout, this would take minutes. */
static void a_question_costs_what_it_meets(void)
{
    enum { MANY = 200000 };
    zbp_layout layout = {0};
    zbp_reach reach;

    zbp_layout_init(&layout, MANY, 0, NULL);
    REQUIRE(zbp_layout_add_task(&layout, ZBP_TASK_WHOLE, 0) == ZBP_OK);
    for (uint32_t f = 0; f < MANY; f++)
        REQUIRE(zbp_layout_add_face(&layout, (zbp_face){.weight = (int32_t)f, .outside = -1}) ==
                ZBP_OK);
    REQUIRE(zbp_reach_init(&reach, &layout, NULL) == ZBP_OK);
    for (uint32_t f = 0; f < MANY; f++) {
        zbp_reach_begin(&reach);
        zbp_reach_add(&reach, &layout, f);
        zbp_reach_weights(&reach);
        CHECK(reach.weight_count == 1 && reach.weight[0] == f);
    }
    zbp_reach_fini(&reach);
    zbp_layout_fini(&layout);
}

static void questions_may_be_counted_to_their_end(void)
{
    zbp_layout layout;
    zbp_reach reach;

    build(&layout);
    REQUIRE(zbp_reach_init(&reach, &layout, NULL) == ZBP_OK);
    zbp_reach_begin(&reach);
    zbp_reach_add(&reach, &layout, 0);
    reach.question = UINT32_MAX;
    zbp_reach_begin(&reach);
    CHECK(reach.question == 1 && reach.weight_count == 0);
    zbp_reach_fini(&reach);
    zbp_layout_fini(&layout);
}

static void a_failed_allocation_leaves_nothing(void)
{
    counting c;
    const zbp_alloc alloc = counting_alloc(&c);
    zbp_layout layout, empty = {0};
    zbp_reach reach;

    build(&layout);
    c.fail_at = 0;
    CHECK(zbp_reach_init(&reach, &layout, &alloc) == ZBP_ENOMEM && reach.block == NULL);
    CHECK(zbp_reach_init(&reach, &empty, &alloc) == ZBP_OK); /* nothing to allocate */
    zbp_reach_begin(&reach);
    zbp_reach_weights(&reach);
    CHECK(reach.weight_count == 0);
    zbp_reach_fini(&reach);
    c.fail_at = -1;
    REQUIRE(zbp_reach_init(&reach, &layout, &alloc) == ZBP_OK);
    zbp_reach_fini(&reach);
    CHECK(c.live == 0);
    zbp_layout_fini(&layout);
}

int main(void)
{
    check_sees_failure();
    RUN(answers_are_those_of_a_naive_search);
    RUN(a_question_costs_what_it_meets);
    RUN(questions_may_be_counted_to_their_end);
    RUN(a_failed_allocation_leaves_nothing);
    return check_end();
}
