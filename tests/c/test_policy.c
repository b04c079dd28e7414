/* What the policy says of nodes: joins, and random layouts against a naive search. */
#include "check.h"
#include "core/pass/zbp_policy.h"
#include "counting.h"
#include "model.h"

enum { WEIGHTS = 5, NODES = 9 };

static bool equal(zbp_decision a, zbp_decision b)
{
    return a.defer == b.defer && a.checkpoint == b.checkpoint;
}

static zbp_decision numbered(uint32_t i)
{
    return (zbp_decision){(uint8_t)(i % 3), (uint8_t)(i / 3 % 3)};
}

static void joining_is_the_same_in_any_order_and_with_oneself(void)
{
    for (uint32_t i = 0; i < 9; i++) {
        CHECK(equal(zbp_decision_join(numbered(i), numbered(i)), numbered(i)));
        CHECK(equal(zbp_decision_join(numbered(i), zbp_decision_none()), numbered(i)));
        for (uint32_t j = 0; j < 9; j++) {
            const zbp_decision both = zbp_decision_join(numbered(i), numbered(j));

            CHECK(equal(both, zbp_decision_join(numbered(j), numbered(i))));
            for (uint32_t k = 0; k < 9; k++)
                CHECK(equal(
                    zbp_decision_join(both, numbered(k)),
                    zbp_decision_join(numbered(i), zbp_decision_join(numbered(j), numbered(k)))));
        }
    }
}

static void w_wins_over_i_and_keeping_over_computing_again(void)
{
    const zbp_decision in_i = {ZBP_DEFER_NOTHING, ZBP_CHECKPOINT_INPUT_PASS};
    const zbp_decision in_w = {ZBP_DEFER_ALL, ZBP_CHECKPOINT_RECOMPUTE};
    const zbp_decision kept = {ZBP_DEFER_MATRICES, ZBP_CHECKPOINT_KEEP};

    CHECK(equal(zbp_decision_join(in_i, in_w), in_w));
    CHECK(
        equal(zbp_decision_join(in_w, kept), ((zbp_decision){ZBP_DEFER_ALL, ZBP_CHECKPOINT_KEEP})));
}

/* Hops lead to higher numbers only, in any order of the nodes that they reach. */
static void build(zbp_layout *layout, uint64_t *state, const zbp_alloc *alloc)
{
    zbp_layout_init(layout, WEIGHTS, NODES, alloc);
    for (uint32_t node = 0; node < NODES; node++) {
        for (uint32_t i = model_below(state, 4); i > 0; i--) {
            zbp_hop hop = {.outside = node, .slot = i, .to_outside = -1, .to_weight = -1};

            if (node + 1 < NODES && model_below(state, 2) == 0)
                hop.to_outside = (int32_t)(node + 1 + model_below(state, NODES - node - 1));
            else
                hop.to_weight = (int32_t)model_below(state, WEIGHTS);
            REQUIRE(zbp_layout_add_hop(layout, hop) == ZBP_OK);
        }
    }
}

static zbp_decision naive(const zbp_layout *layout, const zbp_decision *of_weight, int32_t node)
{
    zbp_decision decision = zbp_decision_none();

    for (uint32_t h = 0; h < layout->hop_count; h++) {
        const zbp_hop *hop = &layout->hop[h];

        if (hop->outside == (uint32_t)node)
            decision = zbp_decision_join(decision, hop->to_weight >= 0
                                                       ? of_weight[hop->to_weight]
                                                       : naive(layout, of_weight, hop->to_outside));
    }
    return decision;
}

static void each_node_has_what_all_weights_behind_it_say(void)
{
    uint64_t state = 3;

    for (int round = 0; round < 2000; round++) {
        zbp_decision of_weight[WEIGHTS], of_outside[NODES];
        zbp_layout layout;

        build(&layout, &state, NULL);
        for (uint32_t w = 0; w < WEIGHTS; w++)
            of_weight[w] = numbered(model_below(&state, 9));
        CHECK(zbp_policy_spread(&layout, of_weight, of_outside) == ZBP_OK);
        for (uint32_t node = 0; node < NODES; node++) {
            CHECK(equal(of_outside[node], naive(&layout, of_weight, (int32_t)node)));
            CHECK(equal(zbp_decision_behind(of_weight, of_outside, -1, (int32_t)node),
                        of_outside[node]));
        }
        zbp_layout_fini(&layout);
    }
}

/* No autograd graph has one; it must end. */
static void a_circle_ends(void)
{
    const zbp_decision of_weight[1] = {{ZBP_DEFER_ALL, ZBP_CHECKPOINT_KEEP}};
    zbp_decision of_outside[3];
    zbp_layout layout;

    zbp_layout_init(&layout, 1, 3, NULL);
    for (uint32_t node = 0; node < 3; node++)
        REQUIRE(zbp_layout_add_hop(&layout, (zbp_hop){node, 0, (int32_t)((node + 1) % 3), -1}) ==
                ZBP_OK);
    REQUIRE(zbp_layout_add_hop(&layout, (zbp_hop){2, 1, -1, 0}) == ZBP_OK);
    CHECK(zbp_policy_spread(&layout, of_weight, of_outside) == ZBP_OK);
    for (uint32_t node = 0; node < 3; node++)
        CHECK(equal(of_outside[node], of_weight[0]));
    zbp_layout_fini(&layout);
}

static void a_failed_allocation_is_said(void)
{
    const zbp_decision of_weight[WEIGHTS] = {{0}};
    zbp_decision of_outside[NODES];
    counting c;
    const zbp_alloc alloc = counting_alloc(&c);
    zbp_layout layout;
    uint64_t state = 5;
    int failed = 0;

    build(&layout, &state, &alloc);
    for (int status = ZBP_ENOMEM; status != ZBP_OK; failed++) {
        const long live = c.live;

        c.calls = 0;
        c.fail_at = failed;
        status = zbp_policy_spread(&layout, of_weight, of_outside);
        CHECK(status == ZBP_OK || status == ZBP_ENOMEM);
        CHECK(c.live == live);
        REQUIRE(failed < 10);
    }
    CHECK(failed > 1);
    zbp_layout_fini(&layout);
    CHECK(c.live == 0);
    zbp_layout_init(&layout, 2, 0, &alloc);
    CHECK(zbp_policy_spread(&layout, of_weight, of_outside) ==
          ZBP_OK); /* nothing to do, nothing to get */
    zbp_layout_fini(&layout);
}

int main(void)
{
    check_sees_failure();
    RUN(joining_is_the_same_in_any_order_and_with_oneself);
    RUN(w_wins_over_i_and_keeping_over_computing_again);
    RUN(each_node_has_what_all_weights_behind_it_say);
    RUN(a_circle_ends);
    RUN(a_failed_allocation_is_said);
    return check_end();
}
