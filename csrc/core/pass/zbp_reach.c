#include "core/pass/zbp_reach.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/zbpi_alloc.h"

/* The block: weights found, nodes to visit, then per weight and per node the last question that met it. */
static size_t block_size(const zbp_reach *reach)
{
    return 2 * ((size_t)reach->weights + reach->nodes) * sizeof *reach->block;
}

int zbp_reach_init(zbp_reach *reach, const zbp_layout *layout, const zbp_alloc *alloc)
{
    *reach = (zbp_reach){.weights = layout->weight_count,
                         .nodes = layout->outside_count,
                         .alloc = zbpi_alloc_copy(alloc)};
    if (block_size(reach) == 0)
        return ZBP_OK;
    reach->block = zbpi_resize(&reach->alloc, NULL, 0, block_size(reach));
    if (reach->block == NULL) {
        memset(reach, 0, sizeof *reach);
        return ZBP_ENOMEM;
    }
    memset(reach->block, 0, block_size(reach));
    reach->weight = reach->block;
    return ZBP_OK;
}

void zbp_reach_fini(zbp_reach *reach)
{
    zbpi_free(&reach->alloc, reach->block, block_size(reach));
    memset(reach, 0, sizeof *reach);
}

void zbp_reach_begin(zbp_reach *reach)
{
    reach->weight_count = 0;
    if (++reach->question == 0) { /* after 2^32 of them: old marks would look new */
        memset(reach->block, 0, block_size(reach));
        reach->question = 1;
    }
}

static bool is_new(zbp_reach *reach, uint32_t *met)
{
    const bool is = *met != reach->question;

    *met = reach->question;
    return is;
}

static void meet(zbp_reach *reach, int32_t weight, int32_t outside, uint32_t *pending)
{
    uint32_t *const to_visit = reach->block + reach->weights;
    uint32_t *const weight_met = to_visit + reach->nodes;
    uint32_t *const node_met = weight_met + reach->weights;

    if (weight >= 0) {
        if (is_new(reach, &weight_met[weight]))
            reach->block[reach->weight_count++] = (uint32_t)weight;
    } else if (is_new(reach, &node_met[outside])) {
        to_visit[(*pending)++] = (uint32_t)outside;
    }
}

static void add(zbp_reach *reach, const zbp_layout *layout, int32_t weight, int32_t outside)
{
    uint32_t pending = 0;

    meet(reach, weight, outside, &pending);
    while (pending > 0) {
        const uint32_t node = reach->block[reach->weights + --pending];
        const uint32_t end = zbp_layout_first_hop(layout, node + 1);

        for (uint32_t h = zbp_layout_first_hop(layout, node); h < end; h++)
            meet(reach, layout->hop[h].to_weight, layout->hop[h].to_outside, &pending);
    }
}

void zbp_reach_add(zbp_reach *reach, const zbp_layout *layout, uint32_t face)
{
    add(reach, layout, layout->face[face].weight, layout->face[face].outside);
}

void zbp_reach_add_outside(zbp_reach *reach, const zbp_layout *layout, uint32_t outside)
{
    add(reach, layout, -1, (int32_t)outside);
}

static int compare(const void *a, const void *b)
{
    const uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;

    return (left > right) - (left < right);
}

void zbp_reach_weights(zbp_reach *reach)
{
    if (reach->weight_count > 1)
        qsort(reach->block, reach->weight_count, sizeof *reach->block, compare);
}
