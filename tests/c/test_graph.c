#include "check.h"
#include "counting.h"
#include "model.h"
#include "core/graph/zbp_graph.h"

static void empty(void)
{
    zbp_graph zeroed = {0}, graph;

    CHECK(zbp_graph_add_node(&zeroed, model_key(0), NULL) == ZBP_OK);
    zbp_graph_fini(&zeroed);
    zbp_graph_fini(&zeroed);
    graph = (zbp_graph){0};
    CHECK(!zbp_map_find(&graph.id_of, model_key(0), NULL));
    zbp_graph_fini(&graph);
}

static void ids_are_dense_in_order_of_discovery(void)
{
    zbp_graph graph = {0};
    uint64_t random = 2;
    uint32_t next = 0;

    for (int i = 0; i < 20000; i++) {
        const void *key = model_key(model_below(&random, 5000));
        uint32_t id = ZBP_NONE, found = ZBP_NONE;
        bool there = zbp_map_find(&graph.id_of, key, &found);

        REQUIRE(zbp_graph_add_node(&graph, key, &id) == ZBP_OK);
        REQUIRE(id == (there ? found : next) && graph.key[id] == key && graph.mark[id] == 0);
        next += !there;
    }
    CHECK(graph.node_count == next);
    zbp_graph_fini(&graph);
    CHECK(count.live == 0);
}

static void edges_keep_their_order(void)
{
    zbp_graph graph = {0};

    for (uint32_t i = 0; i < 100; i++)
        CHECK(zbp_graph_add_node(&graph, model_key(i), NULL) == ZBP_OK);
    for (uint32_t e = 0; e < 1000; e++)
        CHECK(zbp_graph_add_edge(&graph, e % 100, e, e / 10) == ZBP_OK);
    CHECK(graph.edge_count == 1000);
    for (uint32_t e = 0; e < 1000; e++)
        CHECK(graph.edge[e].src == e % 100 && graph.edge[e].slot == e &&
              graph.edge[e].dst == e / 10);
    zbp_graph_fini(&graph);
}

static void overflow(void)
{
    zbp_graph graph = {0};
    uint32_t id = 7;

    CHECK(zbp_graph_add_node(&graph, model_key(0), NULL) == ZBP_OK);
    graph.node_count = UINT32_MAX - 1;
    CHECK(zbp_graph_add_node(&graph, model_key(1), &id) == ZBP_ENOMEM && id == 7);
    CHECK(zbp_graph_add_node(&graph, model_key(0), &id) == ZBP_ENOMEM && id == 7);
    graph.node_count = 1;
    CHECK(zbp_graph_add_node(&graph, model_key(0), &id) == ZBP_OK && id == 0);
    graph.edge_count = UINT32_MAX - 1;
    CHECK(zbp_graph_add_edge(&graph, 0, 0, 0) == ZBP_ENOMEM);
    graph.edge_count = 0;
    zbp_graph_fini(&graph);
}

static int build(zbp_graph *graph)
{
    int status = ZBP_OK;

    *graph = (zbp_graph){0};
    for (uint32_t i = 0; status == ZBP_OK && i < 700; i++) {
        status = zbp_graph_add_node(graph, model_key(i), NULL);
        for (uint32_t k = 0; status == ZBP_OK && k < 2; k++)
            status = zbp_graph_add_edge(graph, i, k, i / 2);
    }
    return status;
}

/* Every allocation of a build fails once: the graph is valid, and goes on where it stopped. */
static void failed_allocations_keep_the_data(void)
{
    long calls = 0;

    for (int n = 0; n == 0 || n < calls; n++) {
        zbp_graph graph;
        uint32_t nodes, edges;
        int status;

        counting_begin(-1);
        count.fail_at = n == 0 ? -1 : n - 1;
        status = build(&graph);
        calls = n == 0 ? count.calls + 1 : calls;
        CHECK(status == (n == 0 ? ZBP_OK : ZBP_ENOMEM));
        nodes = graph.node_count;
        edges = graph.edge_count;
        CHECK(nodes <= 700 && edges <= 1400 && edges + 2 >= nodes * 2);
        for (uint32_t i = 0; i < nodes; i++)
            CHECK(graph.key[i] == model_key(i));
        count.fail_at = -1;
        CHECK(zbp_graph_add_node(&graph, model_key(1000), NULL) == ZBP_OK);
        CHECK(zbp_graph_add_edge(&graph, nodes, 0, nodes) == ZBP_OK);
        zbp_graph_fini(&graph);
        CHECK(count.live == 0);
    }
    CHECK(calls > 8);
}

int main(void)
{
    check_sees_failure();
    RUN(empty);
    RUN(ids_are_dense_in_order_of_discovery);
    RUN(edges_keep_their_order);
    RUN(overflow);
    RUN(failed_allocations_keep_the_data);
    return check_end();
}
