/* Large graphs: linear work, linear memory, no recursion.
 *
 * Work is counted, not timed: the core is compiled with -fsanitize-coverage=trace-pc, so that every
 * basic block calls the function below. Depth is tried on a thread with a stack of 128 KiB, on
 * which a recursion over the nodes cannot live; aarch64 allows none smaller. */
#include <pthread.h>

#include "check.h"
#include "counting.h"
#include "model.h"
#include "core/graph/zbp_plan.h"

void __sanitizer_cov_trace_pc(void);

static unsigned long long blocks;

void __sanitizer_cov_trace_pc(void)
{
    blocks++;
}

enum shape { LAYERS, CHAIN, CHAIN_BACKWARDS, FAN, RING, ONE_GROUP, RANDOM, SHAPES };

typedef struct cost {
    unsigned long long blocks;
    size_t bytes;
    double items; /* nodes + edges */
} cost;

static int add(zbp_graph *g, uint32_t i, uint8_t mark)
{
    /* Spaced as malloc would; never read. */
    int status = zbp_graph_add_node(g, (const void *)(uintptr_t)((i + 1) * UINT64_C(96)), NULL);

    if (status == ZBP_OK)
        g->mark[i] |= mark;
    return status;
}

static int join(zbp_graph *g, uint32_t src, uint32_t dst)
{
    return zbp_graph_add_edge(g, src, 0, dst);
}

static uint32_t third(uint32_t i, uint32_t n)
{
    return i % 3 == 2 ? n - 1 : i / 3 * 3 + 3 < n ? i / 3 * 3 + 3 : n - 1;
}

static int draw(zbp_graph *g, enum shape shape, uint32_t n)
{
    uint64_t random = 9;
    int status = ZBP_OK;

    for (uint32_t i = 0; status == ZBP_OK && i < n; i++) {
        uint8_t mark = i == 0 ? ZBP_ROLE_ROOT : i + 1 == n ? ZBP_ROLE_INPUT : 0;

        if (shape == LAYERS && i % 3 == 2 && i + 1 != n)
            mark = ZBP_ROLE_WEIGHT;
        else if (shape == FAN && i > 0 && i + 1 != n)
            mark = ZBP_ROLE_WEIGHT;
        else if (shape == RING && i == n / 2)
            mark = ZBP_ROLE_WEIGHT;
        else if (shape == ONE_GROUP)
            mark = i % 2 == 1 ? ZBP_ROLE_WEIGHT : i == 0 ? ZBP_ROLE_ROOT : 0;
        else if (shape == RANDOM && model_below(&random, 4) == 0)
            mark |= ZBP_ROLE_WEIGHT;
        status = add(g, i, mark);
    }
    for (uint32_t i = 0; status == ZBP_OK && i < n; i++) {
        uint32_t last = n - 1;

        switch (shape) {
        case LAYERS: /* per layer: a product with a weight (behind a transpose) */
            if (i % 3 == 0 && i + 3 < n) {
                status = join(g, i, third(i, n));
                if (status == ZBP_OK)
                    status = join(g, i, i + 1);
                if (status == ZBP_OK)
                    status = join(g, i + 1, i + 2);
            }
            break;
        case CHAIN:
            status = i < last ? join(g, i, i + 1) : ZBP_OK;
            break;
        case CHAIN_BACKWARDS: /* ids against the edges */
            status = i > 0 && i < last ? join(g, i, i - 1) : i == 0 ? join(g, 0, last) : ZBP_OK;
            break;
        case FAN:
            status = i > 0 ? join(g, 0, i) : ZBP_OK;
            break;
        case RING:
            status = join(g, i, i + 1 < n ? i + 1 : 0);
            break;
        case ONE_GROUP: /* no input: all hangs together through neighbours */
            status = i < last ? join(g, i, i + 1) : ZBP_OK;
            break;
        default:
            status = join(g, model_below(&random, n), model_below(&random, n));
            break;
        }
    }
    return status;
}

/* What the plan says of this many nodes, for the shapes whose plans are plain. */
static bool is_right(enum shape shape, uint32_t n, const zbp_plan *p)
{
    const uint32_t groups = p->group_count, layers = (n - 1) / 3;

    if (groups == 0 || shape == RANDOM || (shape == LAYERS && n % 3 != 1))
        return (groups == 0) == (shape == CHAIN || shape == CHAIN_BACKWARDS || shape == RING);
    for (uint32_t i = 0; shape == LAYERS && i < layers; i++)
        if (p->group[3 * i] != i || p->split[i] != 3 * i || p->weight[i] != 3 * i + 2)
            return false;
    return groups == (shape == LAYERS ? layers : 1) && p->out_begin[n] == p->edge_count &&
           p->split_begin[groups] == (shape == LAYERS ? layers : shape == FAN) &&
           p->weight_begin[groups] == (shape == LAYERS ? layers
                                       : shape == FAN  ? n - 2
                                                       : n / 2) &&
           p->outside_begin[groups] == (shape == LAYERS ? layers
                                        : shape == FAN  ? 0
                                                        : n / 2);
}

static cost measure(enum shape shape, uint32_t n)
{
    zbp_graph g = {0};
    zbp_plan p;
    cost c;

    blocks = 0;
    REQUIRE(draw(&g, shape, n) == ZBP_OK);
    REQUIRE(zbp_plan_build(&p, &g) == ZBP_OK);
    c = (cost){blocks, count.peak, (double)g.node_count + g.edge_count};
    CHECK(is_right(shape, n, &p));
    zbp_plan_fini(&p);
    zbp_graph_fini(&g);
    CHECK(count.live == 0);
    return c;
}

static void counter_sees_work(void)
{
    blocks = 0;
    CHECK(!zbp_map_find(&(zbp_map){0}, &blocks, NULL));
    CHECK(blocks > 0);
}

/* The yardstick sees a quadratic algorithm: a look-up per earlier node, for each node. */
static double quadratic_work(uint32_t n)
{
    zbp_graph g = {0};

    blocks = 0;
    for (uint32_t i = 0; i < n; i++) {
        REQUIRE(add(&g, i, 0) == ZBP_OK);
        for (uint32_t j = 0; j < i; j++)
            REQUIRE(zbp_map_find(&g.id_of, g.key[j], NULL));
    }
    zbp_graph_fini(&g);
    return (double)blocks / n;
}

static void counter_sees_a_quadratic_algorithm(void)
{
    CHECK(quadratic_work(2000) > quadratic_work(200) * 5);
}

/* A hundred times the nodes: at most 1.2 times the basic blocks a node or edge, and never more than
 * 80; at most 80 bytes a node or edge (arrays that double, held twice while they move). */
static void work_and_memory_are_linear(void)
{
    for (int shape = 0; shape < SHAPES; shape++) {
        cost small = measure((enum shape)shape, 10000);
        cost large = measure((enum shape)shape, 1000000);
        double before = (double)small.blocks / small.items;
        double after = (double)large.blocks / large.items;

        CHECK(after < 1.2 * before);
        CHECK(after < 80);
        CHECK((double)large.bytes / large.items < 80);
    }
}

static void *deep(void *unused)
{
    (void)unused;
    (void)measure(LAYERS, 300000); /* 100,000 layers deep */
    (void)measure(CHAIN, 100000);
    (void)measure(CHAIN_BACKWARDS, 100000);
    (void)measure(ONE_GROUP, 1000000);
    (void)measure(RING, 100000);
    return NULL;
}

static void depth_needs_no_stack(void)
{
    size_t size = 128 * 1024;
    pthread_attr_t attr;
    pthread_t thread;

    REQUIRE(pthread_attr_init(&attr) == 0);
    REQUIRE(pthread_attr_setstacksize(&attr, size) == 0);
    REQUIRE(pthread_create(&thread, &attr, deep, NULL) == 0);
    REQUIRE(pthread_join(thread, NULL) == 0);
    REQUIRE(pthread_attr_destroy(&attr) == 0);
}

int main(void)
{
    check_sees_failure();
    RUN(counter_sees_work);
    RUN(counter_sees_a_quadratic_algorithm);
    RUN(work_and_memory_are_linear);
    RUN(depth_needs_no_stack);
    return check_end();
}
