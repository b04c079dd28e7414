/* The detectors must see every fault: one number of a right plan is made wrong, and both
 * zbp_plan_check and the model must say so, and name the field. */
#include "check.h"
#include "checks.h"
#include "model.h"
#include "core/graph/zbp_plan.h"

static unsigned long planted;

/* Whether text names the field. A wrong "x_begin" may come out as a wrong "x"; a number in the
 * wrong group, as whatever about groups is met first. */
static bool names(const char *text, const char *field)
{
    size_t length = strlen(field);

    if (length > 6 && strcmp(field + length - 6, "_begin") == 0)
        length -= 6;
    return strncmp(text, field, length) == 0 ||
           (strncmp(field, "group", 5) == 0 && strncmp(text, "group", 5) == 0);
}

/* Both detectors must see a fault in the field. */
static void expect(const zbp_plan *p, const zbp_graph *g, const char *field)
{
    const char *reason = NULL, *differs = model_differs(p, g);
    int status = zbp_plan_check(p, g, &reason);

    planted++;
    CHECK(status == ZBP_EINVAL && reason != NULL && names(reason, field));
    CHECK(differs != NULL && names(differs, field));
}

static void spoil_numbers(const zbp_plan *p, const zbp_graph *g, uint32_t *x, uint32_t count,
                          const char *field)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t right = x[i], wrong[] = {right + 1, right - 1, 0, ZBP_NONE, right ^ 0x80000000u};

        for (size_t k = 0; k < sizeof wrong / sizeof wrong[0]; k++) {
            x[i] = wrong[k];
            if (wrong[k] != right)
                expect(p, g, field);
        }
        x[i] = right;
    }
}

/* Order counts too: swap neighbours. */
static void spoil_order(const zbp_plan *p, const zbp_graph *g, uint32_t *x, uint32_t count,
                        const char *field)
{
    for (uint32_t i = 0; i + 1 < count; i++) {
        uint32_t first = x[i];

        if (x[i] == x[i + 1])
            continue;
        x[i] = x[i + 1];
        x[i + 1] = first;
        expect(p, g, field);
        x[i + 1] = x[i];
        x[i] = first;
    }
}

static void spoil_list(const zbp_plan *p, const zbp_graph *g, uint32_t *begin, uint32_t *list,
                       uint32_t lists, const char *begin_field)
{
    char field[32];

    snprintf(field, sizeof field, "%.*s", (int)(strlen(begin_field) - strlen("_begin")),
             begin_field);
    spoil_numbers(p, g, begin, lists + 1, begin_field);
    spoil_numbers(p, g, list, begin[lists], field);
    spoil_order(p, g, list, begin[lists], field);
}

static void spoil(zbp_plan *p, const zbp_graph *g)
{
    for (uint32_t i = 0; i < p->node_count; i++)
        for (int bit = 1; bit < 256; bit <<= 1) {
            p->flag[i] ^= (uint8_t)bit;
            expect(p, g, "flag");
            p->flag[i] ^= (uint8_t)bit;
        }
    spoil_numbers(p, g, p->group, p->node_count, "group");
    spoil_numbers(p, g, &p->group_count, 1, "group_count");
    spoil_list(p, g, p->out_begin, p->out, p->node_count, "out_begin");
    spoil_list(p, g, p->split_begin, p->split, p->group_count, "split_begin");
    spoil_list(p, g, p->root_begin, p->root, p->group_count, "root_begin");
    spoil_list(p, g, p->weight_begin, p->weight, p->group_count, "weight_begin");
    spoil_list(p, g, p->weight_edge_begin, p->weight_edge, p->group_count, "weight_edge_begin");
    p->node_count++;
    expect(p, g, "node_count");
    p->node_count--;
    p->edge_count--;
    expect(p, g, "edge_count");
    p->edge_count++;
}

static void every_planted_fault_is_named(void)
{
    uint64_t random = 7;

    for (int i = 0; i < 300; i++) {
        zbp_graph g;
        zbp_plan p;
        const char *reason = NULL;

        REQUIRE(zbp_graph_init(&g, NULL) == ZBP_OK);
        REQUIRE(model_random_graph(&g, &random, 12) == ZBP_OK);
        REQUIRE(zbp_plan_build(&p, &g, NULL) == ZBP_OK);
        spoil(&p, &g);
        CHECK_VALID(zbp_plan_check(&p, &g, &reason));
        CHECK(model_differs(&p, &g) == NULL);
        zbp_plan_fini(&p);
        zbp_graph_fini(&g);
    }
    CHECK(planted > 10000);
}

/* Whole groups under wrong numbers: no two nodes that hang together disagree. */
static void renamed_groups_are_named(void)
{
    uint64_t random = 10;
    int seen = 0;

    for (int i = 0; i < 2000; i++) {
        zbp_graph g;
        zbp_plan p;
        const char *reason = NULL;

        REQUIRE(zbp_graph_init(&g, NULL) == ZBP_OK);
        REQUIRE(model_random_graph(&g, &random, 20) == ZBP_OK);
        REQUIRE(zbp_plan_build(&p, &g, NULL) == ZBP_OK);
        if (p.group_count >= 2) {
            seen++;
            for (uint32_t n = 0; n < p.node_count; n++)
                if (p.group[n] <= 1)
                    p.group[n] ^= 1; /* 0 is 1 and 1 is 0 */
            CHECK(zbp_plan_check(&p, &g, &reason) == ZBP_EINVAL &&
                  strcmp(reason, "group: the numbers do not go by the lowest id") == 0);
            CHECK(model_differs(&p, &g) != NULL);
            for (uint32_t n = 0; n < p.node_count; n++)
                if (p.group[n] != ZBP_NONE && p.group[n] > 0)
                    p.group[n]--; /* the two are one */
            p.group_count--;
            CHECK(zbp_plan_check(&p, &g, &reason) == ZBP_EINVAL && strstr(reason, "one number"));
            CHECK(model_differs(&p, &g) != NULL);
        }
        zbp_plan_fini(&p);
        zbp_graph_fini(&g);
    }
    CHECK(seen > 300);
}

/* The plan of another graph: one edge or one mark more. */
static void another_graph_is_named(void)
{
    uint64_t random = 8;
    int seen = 0;

    for (int i = 0; i < 2000; i++) {
        zbp_graph g;
        zbp_plan before, after;
        uint32_t id;
        uint8_t mark;

        REQUIRE(zbp_graph_init(&g, NULL) == ZBP_OK);
        REQUIRE(model_random_graph(&g, &random, 12) == ZBP_OK);
        REQUIRE(zbp_graph_add_node(&g, model_key(100), NULL, NULL) == ZBP_OK);
        REQUIRE(zbp_plan_build(&before, &g, NULL) == ZBP_OK);
        id = model_below(&random, g.node_count);
        mark = (uint8_t)(1u << model_below(&random, 4));
        REQUIRE(zbp_graph_mark(&g, id, mark) == ZBP_OK);
        REQUIRE(zbp_plan_build(&after, &g, NULL) == ZBP_OK);
        if (before.block_size != after.block_size ||
            memcmp(before.block, after.block, after.block_size) != 0) {
            seen++;
            CHECK(zbp_plan_check(&before, &g, NULL) == ZBP_EINVAL);
            CHECK(model_differs(&before, &g) != NULL);
        }
        zbp_plan_fini(&after);
        REQUIRE(zbp_graph_add_edge(&g, id, 0, id) == ZBP_OK);
        CHECK(zbp_plan_check(&before, &g, NULL) == ZBP_EINVAL);
        zbp_plan_fini(&before);
        zbp_graph_fini(&g);
    }
    CHECK(seen > 300);
}

int main(void)
{
    check_sees_failure();
    RUN(every_planted_fault_is_named);
    RUN(renamed_groups_are_named);
    RUN(another_graph_is_named);
    return check_end();
}
