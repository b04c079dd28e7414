#include "core/pass/zbp_facts.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

int zbp_facts_init(zbp_facts *facts, const zbp_graph *graph)
{
    const size_t nodes = graph->node_count, edges = graph->edge_count;

    memset(facts, 0, sizeof *facts);
    facts->fact = zbpi_zeroed(nodes * sizeof *facts->fact + edges * sizeof *facts->is_matrix);
    if (facts->fact == NULL)
        return ZBP_ENOMEM;
    facts->is_matrix = (bool *)(facts->fact + nodes);
    return ZBP_OK;
}

void zbp_facts_fini(zbp_facts *facts)
{
    zbpi_free(facts->fact);
    memset(facts, 0, sizeof *facts);
}
