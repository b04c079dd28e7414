#include "core/graph/zbp_graph.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

static const uint32_t MOST = UINT32_MAX - 1;

void zbp_graph_fini(zbp_graph *graph)
{
    zbpi_free(graph->key);
    zbpi_free(graph->mark);
    zbpi_free(graph->edge);
    zbp_map_fini(&graph->id_of);
    memset(graph, 0, sizeof *graph);
}

/* Room for one more node; the map sees to itself. */
static int make_room(zbp_graph *graph)
{
    if (graph->node_count >= MOST)
        return ZBP_EOVERFLOW;
    if (graph->node_count == graph->key_capacity) {
        const void **key = zbpi_grow(graph->key, &graph->key_capacity, 64, sizeof *key);

        if (key == NULL)
            return ZBP_ENOMEM;
        graph->key = key;
    }
    if (graph->node_count == graph->mark_capacity) {
        uint8_t *mark = zbpi_grow(graph->mark, &graph->mark_capacity, 64, sizeof *mark);

        if (mark == NULL)
            return ZBP_ENOMEM;
        graph->mark = mark;
    }
    return ZBP_OK;
}

int zbp_graph_add_node(zbp_graph *graph, const void *key, uint32_t *id_out)
{
    uint32_t id = graph->node_count;

    if (!zbp_map_find(&graph->id_of, key, &id)) {
        int status = make_room(graph);

        if (status == ZBP_OK)
            status = zbp_map_add(&graph->id_of, key, id);
        if (status != ZBP_OK)
            return status;
        graph->key[id] = key;
        graph->mark[id] = 0;
        graph->node_count++;
    }
    if (id_out != NULL)
        *id_out = id;
    return ZBP_OK;
}

int zbp_graph_add_edge(zbp_graph *graph, uint32_t src, uint32_t slot, uint32_t dst)
{
    if (graph->edge_count >= MOST)
        return ZBP_EOVERFLOW;
    if (graph->edge_count == graph->edge_capacity) {
        zbp_edge *edge = zbpi_grow(graph->edge, &graph->edge_capacity, 64, sizeof *edge);

        if (edge == NULL)
            return ZBP_ENOMEM;
        graph->edge = edge;
    }
    graph->edge[graph->edge_count++] = (zbp_edge){src, slot, dst};
    return ZBP_OK;
}
