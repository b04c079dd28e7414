/* Plans of small graphs, by hand and against the model, which sees every number that is wrong;
 * random ones are fuzz_plan.c's. */
#include "check.h"
#include "counting.h"
#include "model.h"
#include "core/graph/zbp_plan.h"

enum {
    I = ZBP_ROLE_INPUT,
    W = ZBP_ROLE_WEIGHT,
    R = ZBP_ROLE_ROOT,
    X = ZBP_ROLE_EXCLUDED,
    C = ZBP_ROLE_COMPUTES
};

/* A letter for what a node is marked as, and for what the plan says of it. */
static const uint8_t MARK[128] = {['r'] = R,     ['i'] = I,     ['w'] = W,     ['x'] = X,
                                  ['R'] = R | W, ['I'] = I | W, ['o'] = I | R, ['X'] = W | X,
                                  ['Y'] = I | X, ['*'] = C,     ['@'] = R | C};
static const uint8_t FLAG[128] = {
    ['c'] = ZBP_NODE_CLOSURE,
    ['s'] = ZBP_NODE_CLOSURE | ZBP_NODE_SPLIT,
    ['w'] = ZBP_NODE_WEIGHTWARD,
    ['r'] = ZBP_NODE_WEIGHTWARD | ZBP_NODE_WEIGHT_ROOT,
    ['x'] = ZBP_NODE_WEIGHTWARD | ZBP_NODE_EXCLUDED,
    ['y'] = ZBP_NODE_WEIGHTWARD | ZBP_NODE_WEIGHT_ROOT | ZBP_NODE_EXCLUDED,
};

/* A letter and a digit a node ('.', '-': none); edges, "0>1 0>2". */
static const struct {
    const char *name, *marks, *edges, *flags, *groups;
} PLANS[] = {
    {"nothing", "", "", "", ""},
    {"two linear layers: a split node with a group each", "r.wiw", "0>1 0>2 1>3 1>4", "sswcw",
     "010-1"},
    {"a transposed weight", "ri.w", "0>1 0>2 2>3", "scww", "0-00"},
    {"a residual: the node that adds is no split node", "r.iw", "0>1 0>2 1>2 1>3", "cscw", "-0-0"},
    {"a shared weight joins its split nodes", "r.wi", "0>1 0>2 1>3 1>2", "sswc", "000-"},
    {"x*a, x*b, x*(a*c), x*(b*c): c, met last, bridges", "r....iww..w",
     "0>1 0>2 0>3 0>4 1>5 1>6 2>5 2>7 3>5 3>8 4>5 4>9 8>6 8>10 9>7 9>10", "csssscwwwww",
     "-0000-00000"},
    {"a regulariser: an output of weights alone", "rriww", "0>2 0>3 1>3 1>4", "srcww", "00-00"},
    {"numbers go by split nodes and weight roots", "w..wir", "1>0 1>4 2>3 2>4 5>3", "wsswcr",
     "0011-1"},
    {"numbers go by weight roots", "wwrr", "2>1 3>0", "wwrr", "1001"},
    {"a weight that is a root", "R", "", "r", "0"},
    {"an input that is also a weight is an input", "rIw", "0>1 0>2", "scw", "0-0"},
    {"and leaves no weight", "rI", "0>1", "cc", "--"},
    {"an input that is a root", "ow", "0>1", "cw", "-0"},
    {"a weight inside the closure is none", "rwiw", "0>1 1>2 1>3", "cscw", "-0-0"},
    {"what reaches an excluded weight is excluded", "r..iXw", "0>1 0>2 1>3 1>5 2>4 2>5", "ssxcxw",
     "000-00"},
    {"an excluded weight's root", "rX", "0>1", "yx", "00"},
    {"an excluded node that is no weight of the plan is none", "rXYwx", "0>1 1>2 1>3 0>4", "cscw.",
     "-0-0-"},
    {"what computes an excluded weight is the closure's, its steps are not", "ri.*.X",
     "0>1 0>2 2>3 3>4 4>5", "cccsxx", "---000"},
    {"unless a root leads to it", "ri.*.Xr", "0>1 0>2 2>3 3>4 4>5 6>3", "scxxxxy", "0-00000"},
    {"and what computes no excluded weight is W's", "ri*w", "0>1 0>2 2>3", "scww", "0-00"},
    {"x @ (w * w): two edges to one node", "ri.w", "0>1 0>2 0>2 2>3 2>3", "scww", "0-00"},
    {"a self loop", "r", "0>0", ".", "-"},
    {"self loops on the way to an input", "ri", "0>0 0>1 1>1", "cc", "--"},
    {"cycles end", "r..i..w", "0>1 1>2 2>0 2>3 1>4 4>5 5>4 5>6", "csccwww", "-0--000"},
    {"no inputs: the whole graph is W's", "r.w.w", "0>1 0>2 1>3 1>4", "rww.w", "000-0"},
    {"no weights", "r..i", "0>1 0>2 1>3", "cc.c", "----"},
    {"groups that nothing starts come last", "w.riw", "1>0 2>3 2>4", "wwscw", "110-0"},
};

static void draw(zbp_graph *graph, const char *marks, const char *edges)
{
    *graph = (zbp_graph){0};
    for (uint32_t i = 0; marks[i] != '\0'; i++) {
        REQUIRE(zbp_graph_add_node(graph, model_key(i), NULL) == ZBP_OK);
        graph->mark[i] |= MARK[(int)marks[i]];
    }
    for (int used = 0; *edges != '\0'; edges += used) {
        unsigned src, dst;

        REQUIRE(sscanf(edges, " %u>%u%n", &src, &dst, &used) == 2);
        REQUIRE(zbp_graph_add_edge(graph, src, graph->edge_count, dst) == ZBP_OK);
    }
}

static void small_graphs_by_hand(void)
{
    for (size_t k = 0; k < sizeof PLANS / sizeof *PLANS; k++) {
        const int failures = check_failures;
        char group = '0';
        zbp_graph g;
        zbp_plan p;

        draw(&g, PLANS[k].marks, PLANS[k].edges);
        REQUIRE(zbp_plan_build(&p, &g) == ZBP_OK);
        for (uint32_t i = 0; i < g.node_count; i++) {
            const char of = PLANS[k].groups[i];

            CHECK((p.flag[i] & ~ZBP_NODE_WEIGHT) == FLAG[(int)PLANS[k].flags[i]]);
            CHECK(p.group[i] == (of == '-' ? ZBP_NONE : (uint32_t)(of - '0')));
            group = of >= group ? (char)(of + 1) : group;
        }
        CHECK(p.group_count == (uint32_t)(group - '0'));
        CHECK(model_differs(&p, &g) == NULL);
        if (check_failures > failures)
            fprintf(stderr, "of %s\n", PLANS[k].name);
        zbp_plan_fini(&p);
        zbp_graph_fini(&g);
    }
}

/* The model says so of every number that is made another one, and of every flag. */
static void the_model_sees_each_fault(void)
{
    uint64_t random = 7;
    int seen[4] = {0};

    for (int i = 0; i < 300; i++) {
        zbp_graph g = {0};
        zbp_plan p;

        REQUIRE(model_random_graph(&g, &random, 12) == ZBP_OK);
        REQUIRE(zbp_plan_build(&p, &g) == ZBP_OK);
        seen[0] += p.group_count > 1;
        seen[1] += p.group_count > 0 && p.weight_begin[p.group_count] > p.group_count;
        seen[2] += p.group_count > 0 && p.split_begin[p.group_count] > p.group_count;
        seen[3] += p.group_count > 0 && p.outside_begin[p.group_count] > 0;
        for (size_t at = 0; at < counting_size(p.block); at++) {
            unsigned char *byte = (unsigned char *)p.block + at;

            *byte ^= 1;
            CHECK(model_differs(&p, &g) != NULL);
            *byte ^= 1;
        }
        CHECK(model_differs(&p, &g) == NULL);
        zbp_plan_fini(&p);
        zbp_graph_fini(&g);
    }
    for (size_t k = 0; k < sizeof seen / sizeof *seen; k++)
        CHECK(seen[k] > 5); /* the graphs are worth something */
}

/* A plan takes one block, and one more while it is built, whatever the graph's size. */
static void two_allocations(void)
{
    uint64_t random = 6;
    zbp_graph g = {0};
    zbp_plan p = {0};

    zbp_plan_fini(&p); /* a zeroed one is nobody's */
    REQUIRE(model_random_graph(&g, &random, 64) == ZBP_OK);
    counting_begin(-1);
    REQUIRE(zbp_plan_build(&p, &g) == ZBP_OK);
    CHECK(count.calls == 2 && count.live == 1);
    zbp_plan_fini(&p);
    zbp_plan_fini(&p);
    CHECK(count.live == 0);
    zbp_graph_fini(&g);
}

int main(void)
{
    check_sees_failure();
    RUN(small_graphs_by_hand);
    RUN(the_model_sees_each_fault);
    RUN(two_allocations);
    return check_end();
}
