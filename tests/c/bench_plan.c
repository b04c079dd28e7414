/* How long the graph and the plan of a stage take: `bench_plan [nodes]`, best of many runs.
 * A layer is five nodes: a residual sum with a bias, a product behind it, a transpose, the weight.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "core/graph/zbp_plan.h"

static double now(void)
{
    struct timespec t;

    timespec_get(&t, TIME_UTC);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static const void *key(uint32_t i)
{
    /* 192 bytes apart, in an order that is not ascending, as nodes of a live heap are. */
    return (const void *)(uintptr_t)(((uint64_t)(i ^ 0x55) + 4096) * 192);
}

static int step(zbp_graph *g, uint32_t src, uint32_t slot, uint32_t dst, uint32_t *id_out)
{
    int status = zbp_graph_add_node(g, key(dst), id_out, NULL);

    return status == ZBP_OK ? zbp_graph_add_edge(g, src, slot, *id_out) : status;
}

static int one(uint32_t nodes, double *graph_s, double *plan_s, uint32_t *edges, uint32_t *groups)
{
    zbp_graph g;
    zbp_plan p = {0};
    uint32_t at = 0;
    double start = now();
    int status = zbp_graph_init(&g, NULL);

    if (status == ZBP_OK)
        status = zbp_graph_add_node(&g, key(0), &at, NULL);
    if (status == ZBP_OK)
        status = zbp_graph_mark(&g, at, ZBP_ROLE_ROOT);
    for (uint32_t i = 0; status == ZBP_OK && i + 5 < nodes; i += 5) {
        uint32_t product = 0, transpose = 0, weight = 0, bias = 0, below = 0;

        /* As the walk does: the source's id is known, every edge looks its target up. */
        status |= step(&g, at, 0, i + 1, &product);
        status |= step(&g, at, 1, i + 5, &below);
        status |= step(&g, at, 2, i + 2, &bias);
        status |= step(&g, product, 0, i + 5, &below);
        status |= step(&g, product, 1, i + 3, &transpose);
        status |= step(&g, transpose, 0, i + 4, &weight);
        if (status == ZBP_OK)
            status = zbp_graph_mark(&g, weight, ZBP_ROLE_WEIGHT);
        if (status == ZBP_OK)
            status = zbp_graph_mark(&g, bias, ZBP_ROLE_WEIGHT);
        at = below;
    }
    if (status == ZBP_OK)
        status = zbp_graph_mark(&g, at, ZBP_ROLE_INPUT);
    *graph_s = now() - start;
    if (status == ZBP_OK)
        status = zbp_plan_build(&p, &g, NULL);
    *plan_s = now() - start - *graph_s;
    *edges = g.edge_count;
    *groups = p.group_count;
    zbp_plan_fini(&p);
    zbp_graph_fini(&g);
    return status;
}

int main(int argc, char **argv)
{
    uint32_t nodes = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 3000;
    uint32_t runs = 20000000 / (nodes + 1000) / 4 + 3, edges = 0, groups = 0;
    double graph_s = 1e9, plan_s = 1e9;

    for (uint32_t r = 0; r < runs; r++) {
        double a, b;

        if (one(nodes, &a, &b, &edges, &groups) != ZBP_OK)
            return 1;
        graph_s = a < graph_s ? a : graph_s;
        plan_s = b < plan_s ? b : plan_s;
    }
    printf("%u nodes, %u edges, %u groups: graph %.1f us, plan %.1f us\n", nodes, edges, groups,
           graph_s * 1e6, plan_s * 1e6);
    return 0;
}
