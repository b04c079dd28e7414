#include "core/pass/zbp_facts.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

static size_t block_size(const zbp_facts *facts)
{
    return (size_t)facts->node_count * sizeof(zbp_fact) + (size_t)facts->edge_count * sizeof(bool);
}

int zbp_facts_init(zbp_facts *facts, const zbp_graph *graph, const zbp_alloc *alloc)
{
    *facts = (zbp_facts){.node_count = graph->node_count,
                         .edge_count = graph->edge_count,
                         .alloc = zbpi_alloc_copy(alloc)};
    if (block_size(facts) == 0)
        return ZBP_OK;
    facts->block = zbpi_resize(&facts->alloc, NULL, 0, block_size(facts));
    if (facts->block == NULL) {
        memset(facts, 0, sizeof *facts);
        return ZBP_ENOMEM;
    }
    memset(facts->block, 0, block_size(facts));
    facts->of_node = facts->block;
    facts->is_matrix = (bool *)(facts->of_node + facts->node_count);
    return ZBP_OK;
}

void zbp_facts_fini(zbp_facts *facts)
{
    zbpi_free(&facts->alloc, facts->block, block_size(facts));
    memset(facts, 0, sizeof *facts);
}
