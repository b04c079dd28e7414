/* One fault on purpose, named by the argument. The runner wants each detector to see it: a tool
 * that stays silent here is not switched on, and its silence elsewhere means nothing. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/graph/zbp_graph.h"

int main(int argc, char **argv)
{
    const char *fault = argc > 1 ? argv[1] : "";
    zbp_graph graph = {0};

    if (zbp_graph_add_node(&graph, fault, NULL, NULL) != ZBP_OK)
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
    zbp_graph_fini(&graph);
    return 0;
}
