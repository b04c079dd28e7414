// The headers are C++ too: the shim includes them. Compiled and run by `make test-core`.
#include "core/graph/zbp_graph.h"
#include "core/base/zbp_map.h"
#include "core/graph/zbp_plan.h"
#include "core/base/zbp_c.h"

#include <cstdio>

int main()
{
    zbp_graph graph{};
    zbp_plan plan{};
    uint32_t node = 0, weight = 0;
    bool ok = zbp_graph_add_node(&graph, &graph, &node) == ZBP_OK &&
              zbp_graph_add_node(&graph, &plan, &weight) == ZBP_OK;
    graph.mark[node] |= ZBP_ROLE_ROOT;
    graph.mark[weight] |= ZBP_ROLE_WEIGHT;
    ok = ok && zbp_graph_add_edge(&graph, node, 0, weight) == ZBP_OK &&
              zbp_plan_build(&plan, &graph) == ZBP_OK && plan.group_count == 1;

    zbp_plan_fini(&plan);
    zbp_graph_fini(&graph);
    std::printf("%d passed, %d failed\n", ok ? 1 : 0, ok ? 0 : 1);
    return ok ? 0 : 1;
}
