/* Plans of small graphs, by hand, and of random ones against the model. */
#include "check.h"
#include "checks.h"
#include "counting.h"
#include "model.h"
#include "core/graph/zbp_plan.h"

enum { I = ZBP_ROLE_INPUT, W = ZBP_ROLE_WEIGHT, R = ZBP_ROLE_ROOT, X = ZBP_ROLE_EXCLUDED };
enum {
    CLOSURE = ZBP_NODE_CLOSURE,
    WARD = ZBP_NODE_WEIGHTWARD,
    SPLIT = ZBP_NODE_CLOSURE | ZBP_NODE_SPLIT,
    WROOT = ZBP_NODE_WEIGHTWARD | ZBP_NODE_WEIGHT_ROOT,
    XWARD = ZBP_NODE_WEIGHTWARD | ZBP_NODE_EXCLUDED
};
#define NONE ZBP_NONE

static zbp_graph graph;
static zbp_plan plan;

/* A graph from marks and edges: "0>1 0>2". */
static void draw(uint32_t nodes, const uint8_t *mark, const char *edges)
{
    const char *reason = NULL;

    REQUIRE(zbp_graph_init(&graph, NULL) == ZBP_OK);
    for (uint32_t i = 0; i < nodes; i++) {
        REQUIRE(zbp_graph_add_node(&graph, model_key(i), NULL, NULL) == ZBP_OK);
        REQUIRE(zbp_graph_mark(&graph, i, mark[i]) == ZBP_OK);
    }
    for (int used = 0; *edges != '\0'; edges += used) {
        unsigned src, dst;

        REQUIRE(sscanf(edges, " %u>%u%n", &src, &dst, &used) == 2);
        REQUIRE(zbp_graph_add_edge(&graph, src, graph.edge_count, dst) == ZBP_OK);
    }
    REQUIRE(zbp_plan_build(&plan, &graph, NULL) == ZBP_OK);
    CHECK_VALID(zbp_plan_check(&plan, &graph, &reason));
    CHECK(model_differs(&plan, &graph) == NULL);
}

static void erase(void)
{
    zbp_plan_fini(&plan);
    zbp_graph_fini(&graph);
}

static bool nodes_are(const uint8_t *flag, const uint32_t *group)
{
    bool same = true;

    for (uint32_t i = 0; i < graph.node_count; i++)
        same = same && plan.flag[i] == flag[i] && plan.group[i] == group[i];
    return same;
}

/* Whether list number k holds exactly these; the last argument ends them. */
static bool list_is(const uint32_t *begin, const uint32_t *list, uint32_t k, const uint32_t *items)
{
    uint32_t n = 0;

    while (items[n] != NONE)
        n++;
    return begin[k + 1] - begin[k] == n && memcmp(list + begin[k], items, n * sizeof *items) == 0;
}

#define DRAW(edges, ...)                                                                           \
    draw(sizeof((uint8_t[]){__VA_ARGS__}), (const uint8_t[]){__VA_ARGS__}, edges)
#define FLAGS(...) ((const uint8_t[]){__VA_ARGS__})
#define GROUPS(...) ((const uint32_t[]){__VA_ARGS__})
#define LIST(name, k, ...)                                                                         \
    CHECK(list_is(plan.name##_begin, plan.name, k, (const uint32_t[]){__VA_ARGS__}))

static void empty_graph(void)
{
    draw(0, NULL, "");
    CHECK(plan.group_count == 0 && plan.node_count == 0 && plan.edge_count == 0);
    CHECK(plan.out_begin[0] == 0 && plan.split_begin[0] == 0 && plan.root_begin[0] == 0);
    CHECK(plan.weight_begin[0] == 0 && plan.weight_edge_begin[0] == 0);
    erase();
}

static void zeroed_plan(void)
{
    zbp_plan zeroed = {0};
    zbp_graph none = {0};
    const char *reason = NULL;

    CHECK(zbp_plan_check(&zeroed, &none, &reason) == ZBP_EINVAL &&
          strstr(reason, "block") == reason);
    zbp_plan_fini(&zeroed);
    zbp_plan_fini(&zeroed);
}

/* Two linear layers: each matrix product is a split node with a group of its own. */
static void chain(void)
{
    DRAW("0>1 0>2 1>3 1>4", R, 0, W, I, W);
    CHECK(plan.group_count == 2);
    CHECK(nodes_are(FLAGS(SPLIT, SPLIT, WARD, CLOSURE, WARD), GROUPS(0, 1, 0, NONE, 1)));
    LIST(split, 0, 0, NONE);
    LIST(split, 1, 1, NONE);
    LIST(weight, 0, 2, NONE);
    LIST(weight, 1, 4, NONE);
    LIST(root, 0, NONE);
    LIST(weight_edge, 0, NONE);
    LIST(out, 0, 0, 1, NONE);
    LIST(out, 1, 2, 3, NONE);
    LIST(out, 2, NONE);
    erase();
}

/* A transposed weight: the node between product and weight is WEIGHTWARD, its edge listed. */
static void weight_behind_a_node(void)
{
    DRAW("0>1 0>2 2>3", R, I, 0, W);
    CHECK(nodes_are(FLAGS(SPLIT, CLOSURE, WARD, WARD), GROUPS(0, NONE, 0, 0)));
    LIST(weight_edge, 0, 2, NONE);
    erase();
}

/* A residual: 0 adds 1 and the input. The node that adds is no split node. */
static void diamond(void)
{
    DRAW("0>1 0>2 1>2 1>3", R, 0, I, W);
    CHECK(nodes_are(FLAGS(CLOSURE, SPLIT, CLOSURE, WARD), GROUPS(NONE, 0, NONE, 0)));
    CHECK(plan.group_count == 1);
    erase();
}

static void shared_weight_joins_its_split_nodes(void)
{
    DRAW("0>1 0>2 1>3 1>2", R, 0, W, I);
    CHECK(nodes_are(FLAGS(SPLIT, SPLIT, WARD, CLOSURE), GROUPS(0, 0, 0, NONE)));
    LIST(split, 0, 0, 1, NONE);
    LIST(weight, 0, 2, NONE);
    erase();
}

/* x*a, x*b, x*(a*c), x*(b*c): c, met last, bridges the groups of a and b. */
static void later_weight_bridges_groups(void)
{
    DRAW("0>1 0>2 0>3 0>4 1>5 1>6 2>5 2>7 3>5 3>8 4>5 4>9 8>6 8>10 9>7 9>10", R, 0, 0, 0, 0, I, W,
         W, 0, 0, W);
    CHECK(plan.group_count == 1);
    LIST(split, 0, 1, 2, 3, 4, NONE);
    LIST(weight, 0, 6, 7, 10, NONE);
    LIST(weight_edge, 0, 12, 13, 14, 15, NONE);
    CHECK(plan.group[0] == NONE);
    erase();
}

/* A regulariser: a second output of weights alone. */
static void weight_root(void)
{
    DRAW("0>2 0>3 1>3 1>4", R, R, I, W, W);
    CHECK(nodes_are(FLAGS(SPLIT, WROOT, CLOSURE, WARD, WARD), GROUPS(0, 0, NONE, 0, 0)));
    LIST(root, 0, 1, NONE);
    LIST(weight_edge, 0, 2, 3, NONE);
    erase();
}

/* Groups are numbered by their lowest split node or weight root, not by their lowest node. */
static void numbers_go_by_split_nodes_and_weight_roots(void)
{
    DRAW("1>0 1>4 2>3 2>4 5>3", W, 0, 0, W, I, R);
    CHECK(nodes_are(FLAGS(WARD, SPLIT, SPLIT, WARD, CLOSURE, WROOT), GROUPS(0, 0, 1, 1, NONE, 1)));
    erase();
    DRAW("2>1 3>0", W, W, R, R);
    CHECK(nodes_are(FLAGS(WARD, WARD, WROOT, WROOT), GROUPS(1, 0, 0, 1)));
    erase();
}

static void weight_that_is_a_root(void)
{
    DRAW("", R | W);
    CHECK(nodes_are(FLAGS(WROOT), GROUPS(0)));
    LIST(root, 0, 0, NONE);
    LIST(weight, 0, 0, NONE);
    LIST(split, 0, NONE);
    erase();
}

static void input_that_is_also_a_weight_is_an_input(void)
{
    DRAW("0>1 0>2", R, I | W, W);
    CHECK(nodes_are(FLAGS(SPLIT, CLOSURE, WARD), GROUPS(0, NONE, 0)));
    LIST(weight, 0, 2, NONE);
    erase();
    DRAW("0>1", R, I | W);
    CHECK(nodes_are(FLAGS(CLOSURE, CLOSURE), GROUPS(NONE, NONE)) && plan.group_count == 0);
    erase();
}

static void input_that_is_a_root(void)
{
    DRAW("0>1", I | R, W);
    CHECK(nodes_are(FLAGS(CLOSURE, WARD), GROUPS(NONE, 0)));
    erase();
}

/* A node that both computes from an input and is named as a weight. */
static void weight_inside_the_closure_is_none(void)
{
    DRAW("0>1 1>2 1>3", R, W, I, W);
    CHECK(nodes_are(FLAGS(CLOSURE, SPLIT, CLOSURE, WARD), GROUPS(NONE, 0, NONE, 0)));
    LIST(weight, 0, 3, NONE);
    erase();
}

/* 2 computes from a weight that is left to I and one that is not; 0 reads it, 1 the other one alone. */
static void what_reaches_an_excluded_weight_is_excluded(void)
{
    DRAW("0>1 0>2 1>3 1>5 2>4 2>5", R, 0, 0, I, W | X, W);
    CHECK(nodes_are(FLAGS(SPLIT, SPLIT, XWARD, CLOSURE, XWARD, WARD), GROUPS(0, 0, 0, NONE, 0, 0)));
    erase();
    DRAW("0>1", R, W | X);
    CHECK(nodes_are(FLAGS(WROOT | XWARD, XWARD), GROUPS(0, 0)));
    erase();
}

/* The closure is no place for a weight, and without a weight there is nothing to leave to I. */
static void an_excluded_node_that_is_no_weight_of_the_plan_is_none(void)
{
    DRAW("0>1 1>2 1>3 0>4", R, W | X, I | X, W, X);
    CHECK(nodes_are(FLAGS(CLOSURE, SPLIT, CLOSURE, WARD, 0), GROUPS(NONE, 0, NONE, 0, NONE)));
    erase();
}

/* x @ (w * w): two edges to one node. */
static void parallel_edges(void)
{
    DRAW("0>1 0>2 0>2 2>3 2>3", R, I, 0, W);
    CHECK(plan.group_count == 1);
    LIST(out, 0, 0, 1, 2, NONE);
    LIST(weight_edge, 0, 3, 4, NONE);
    erase();
}

static void self_loops_and_cycles_end(void)
{
    DRAW("0>0", R);
    CHECK(nodes_are(FLAGS(0), GROUPS(NONE)));
    erase();
    DRAW("0>0 0>1 1>1", R, I);
    CHECK(nodes_are(FLAGS(CLOSURE, CLOSURE), GROUPS(NONE, NONE)));
    erase();
    DRAW("0>1 1>2 2>0 2>3 1>4 4>5 5>4 5>6", R, 0, 0, I, 0, 0, W);
    CHECK(nodes_are(FLAGS(CLOSURE, SPLIT, CLOSURE, CLOSURE, WARD, WARD, WARD),
                    GROUPS(NONE, 0, NONE, NONE, 0, 0, 0)));
    erase();
}

/* The whole graph belongs to W: every root is a weight root. */
static void no_inputs(void)
{
    DRAW("0>1 0>2 1>3 1>4", R, 0, W, 0, W);
    CHECK(nodes_are(FLAGS(WROOT, WARD, WARD, 0, WARD), GROUPS(0, 0, 0, NONE, 0)));
    LIST(weight, 0, 2, 4, NONE);
    LIST(weight_edge, 0, 0, 1, 2, 3, NONE);
    erase();
}

static void no_weights(void)
{
    DRAW("0>1 0>2 1>3", R, 0, 0, I);
    CHECK(nodes_are(FLAGS(CLOSURE, CLOSURE, 0, CLOSURE), GROUPS(NONE, NONE, NONE, NONE)));
    CHECK(plan.group_count == 0);
    erase();
}

/* No walk makes these; they come after the groups that something starts. */
static void groups_that_nothing_starts_come_last(void)
{
    DRAW("1>0 2>3 2>4", W, 0, R, I, W);
    CHECK(nodes_are(FLAGS(WARD, WARD, SPLIT, CLOSURE, WARD), GROUPS(1, 1, 0, NONE, 0)));
    LIST(split, 1, NONE);
    LIST(root, 1, NONE);
    LIST(weight, 1, 0, NONE);
    erase();
}

static void random_graphs_agree_with_the_model(void)
{
    uint64_t random = 3;
    unsigned long seen[6] = {0};

    for (int i = 0; i < 20000; i++) {
        zbp_graph g;
        zbp_plan p;
        const char *reason = NULL, *differs;

        REQUIRE(zbp_graph_init(&g, NULL) == ZBP_OK);
        REQUIRE(model_random_graph(&g, &random, i < 10000 ? 10 : 40) == ZBP_OK);
        REQUIRE(zbp_plan_build(&p, &g, NULL) == ZBP_OK);
        differs = model_differs(&p, &g);
        if (differs != NULL)
            fprintf(stderr, "graph %d: %s\n", i, differs);
        REQUIRE(differs == NULL);
        CHECK_VALID(zbp_plan_check(&p, &g, &reason));
        REQUIRE(reason == NULL);
        seen[0] += p.group_count > 1;
        seen[1] += p.group_count > 0 && p.root_begin[p.group_count] > 0;
        seen[2] += p.group_count > 0 && p.split_begin[p.group_count] > p.group_count;
        seen[3] += p.group_count > 0 && p.weight_edge_begin[p.group_count] > 0;
        seen[4] += p.group_count > 0 && p.split_begin[1] > 1;
        for (uint32_t n = 0; n < p.node_count; n++)
            seen[5] += (p.flag[n] & ZBP_NODE_EXCLUDED) != 0 && (g.mark[n] & ZBP_ROLE_EXCLUDED) == 0;
        zbp_plan_fini(&p);
        zbp_graph_fini(&g);
    }
    /* The graphs are worth something: each kind came up often. */
    for (size_t k = 0; k < sizeof seen / sizeof seen[0]; k++)
        CHECK(seen[k] > 500);
}

/* Same graph, other addresses, other allocator: the same arrays. */
static void results_do_not_depend_on_addresses(void)
{
    counting count;
    zbp_alloc alloc = counting_alloc(&count);
    uint64_t random = 4;

    for (int i = 0; i < 200; i++) {
        zbp_graph g, moved;
        zbp_plan p, q;

        REQUIRE(zbp_graph_init(&g, NULL) == ZBP_OK && zbp_graph_init(&moved, &alloc) == ZBP_OK);
        REQUIRE(model_random_graph(&g, &random, 40) == ZBP_OK);
        for (uint32_t n = 0; n < g.node_count; n++) {
            uintptr_t address = (uintptr_t)model_random(&random) | 1;

            REQUIRE(zbp_graph_add_node(&moved, (const void *)address, NULL, NULL) == ZBP_OK);
            REQUIRE(zbp_graph_mark(&moved, n, g.mark[n]) == ZBP_OK);
        }
        for (uint32_t e = 0; e < g.edge_count; e++)
            REQUIRE(zbp_graph_add_edge(&moved, g.edge[e].src, 0, g.edge[e].dst) == ZBP_OK);
        REQUIRE(zbp_plan_build(&p, &g, NULL) == ZBP_OK);
        REQUIRE(zbp_plan_build(&q, &moved, &alloc) == ZBP_OK);
        CHECK(p.block_size == q.block_size && memcmp(p.block, q.block, p.block_size) == 0);
        zbp_plan_fini(&p);
        zbp_plan_fini(&q);
        zbp_graph_fini(&g);
        zbp_graph_fini(&moved);
    }
    CHECK(count.live == 0);
}

/* Build and check with every allocation failing in turn: a status, a zeroed plan, no live block. */
static void failed_allocations(void)
{
    uint64_t random = 5;

    for (int i = 0; i < 200; i++) {
        zbp_graph g;
        int status = ZBP_ENOMEM, tries = 0;

        REQUIRE(zbp_graph_init(&g, NULL) == ZBP_OK);
        REQUIRE(model_random_graph(&g, &random, 20) == ZBP_OK);
        for (int n = 0; status == ZBP_ENOMEM; n++, tries++) {
            static const zbp_plan zeroed;
            counting count;
            zbp_alloc alloc = counting_alloc(&count);
            const char *reason = "unset";
            zbp_plan p;

            count.fail_at = n;
            memset(&p, 0xA5, sizeof p);
            status = zbp_plan_build(&p, &g, &alloc);
            if (status == ZBP_OK) {
                CHECK(model_differs(&p, &g) == NULL);
                count.fail_at = count.calls;
                CHECK(zbp_plan_check(&p, &g, &reason) == ZBP_ENOMEM && reason == NULL);
                zbp_plan_fini(&p);
            }
            CHECK(memcmp(&p, &zeroed, sizeof p) == 0);
            CHECK(count.live == 0);
        }
        CHECK(status == ZBP_OK && tries >= 3);
        zbp_graph_fini(&g);
    }
}

/* A plan takes one block, and one more while it is built, whatever the graph's size. */
static void two_allocations(void)
{
    counting count;
    zbp_alloc alloc = counting_alloc(&count);
    uint64_t random = 6;
    zbp_graph g;
    zbp_plan p;

    REQUIRE(zbp_graph_init(&g, NULL) == ZBP_OK);
    REQUIRE(model_random_graph(&g, &random, 64) == ZBP_OK);
    REQUIRE(zbp_plan_build(&p, &g, &alloc) == ZBP_OK);
    CHECK(count.calls == 2 && count.live == 1);
    zbp_plan_fini(&p);
    CHECK(count.live == 0);
    zbp_graph_fini(&g);
}

int main(void)
{
    check_sees_failure();
    RUN(empty_graph);
    RUN(zeroed_plan);
    RUN(chain);
    RUN(weight_behind_a_node);
    RUN(diamond);
    RUN(shared_weight_joins_its_split_nodes);
    RUN(later_weight_bridges_groups);
    RUN(weight_root);
    RUN(numbers_go_by_split_nodes_and_weight_roots);
    RUN(weight_that_is_a_root);
    RUN(input_that_is_also_a_weight_is_an_input);
    RUN(input_that_is_a_root);
    RUN(weight_inside_the_closure_is_none);
    RUN(what_reaches_an_excluded_weight_is_excluded);
    RUN(an_excluded_node_that_is_no_weight_of_the_plan_is_none);
    RUN(parallel_edges);
    RUN(self_loops_and_cycles_end);
    RUN(no_inputs);
    RUN(no_weights);
    RUN(groups_that_nothing_starts_come_last);
    RUN(random_graphs_agree_with_the_model);
    RUN(results_do_not_depend_on_addresses);
    RUN(failed_allocations);
    RUN(two_allocations);
    return check_end();
}
