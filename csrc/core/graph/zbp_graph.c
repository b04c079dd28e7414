#include "core/graph/zbp_graph.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

void zbp_graph_fini(zbp_graph *graph)
{
    zbpi_free(graph->key);
    zbpi_free(graph->mark);
    zbpi_free(graph->edge);
    zbp_map_fini(&graph->id_of);
    memset(graph, 0, sizeof *graph);
}

int zbp_graph_add_node(zbp_graph *graph, const void *key, uint32_t *id_out)
{
    uint32_t id = graph->node_count;
    const void **keys = zbpi_room(graph->key, id, &graph->key_capacity, sizeof *keys);
    uint8_t *marks = zbpi_room(graph->mark, id, &graph->mark_capacity, sizeof *marks);

    graph->key = keys != NULL ? keys : graph->key;
    graph->mark = marks != NULL ? marks : graph->mark;
    if (keys == NULL || marks == NULL || zbp_map_add(&graph->id_of, key, &id) != ZBP_OK)
        return ZBP_ENOMEM;
    if (id == graph->node_count) {
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
    zbp_edge *edge = zbpi_room(graph->edge, graph->edge_count, &graph->edge_capacity, sizeof *edge);

    if (edge == NULL)
        return ZBP_ENOMEM;
    graph->edge = edge;
    graph->edge[graph->edge_count++] = (zbp_edge){src, slot, dst};
    return ZBP_OK;
}
