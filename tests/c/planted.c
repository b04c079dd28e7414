/* One fault on purpose, named by the argument. The runner wants each detector to see it: a tool
 * that stays silent here is not switched on, and its silence elsewhere means nothing. */
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/graph/zbp_graph.h"

static void *add_nodes(void *graph)
{
    for (int i = 0; i < 100; i++)
        if (zbp_graph_add_node(graph, &graph, NULL) != ZBP_OK)
            return NULL;
    return NULL;
}

int main(int argc, char **argv)
{
    const char *fault = argc > 1 ? argv[1] : "";
    zbp_graph graph = {0};

    if (zbp_graph_add_node(&graph, fault, NULL) != ZBP_OK)
        return 0;
    if (strcmp(fault, "leak") == 0) {
        memset(&graph, 0, sizeof graph);
        return 0;
    }
    if (strcmp(fault, "overrun") == 0) {
        volatile const uint8_t *past = graph.mark + graph.mark_capacity;

        printf("%d\n", *past);
    }
    if (strcmp(fault, "overflow") == 0) {
        volatile int large = INT_MAX;

        printf("%d\n", large + argc);
    }
    if (strcmp(fault, "race") == 0) {
        pthread_t thread;

        if (pthread_create(&thread, NULL, add_nodes, &graph) != 0)
            return 0;
        printf("%u\n", graph.node_count);
        pthread_join(thread, NULL);
    }
    zbp_graph_fini(&graph);
    return 0;
}
