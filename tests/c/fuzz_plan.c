/* Any bytes are a graph; its plan must be the model's, also when allocations fail.
 *
 * That the model sees each fault is test_plan.c's.
 * The bytes: [0] nodes, [1] the allocation that fails (0: none), then marks, one byte a node (most are none: few inputs and
 * weights leave something to plan), then edges, two bytes each. What is missing is 0.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "counting.h"
#include "fuzz.h"
#include "model.h"
#include "core/graph/zbp_plan.h"

enum { MOST_EDGES = 255 };

const uint32_t fuzz_longest = 512;

static void fail(const char *what, const char *detail)
{
    fprintf(stderr, "fuzz_plan: %s: %s\n", what, detail == NULL ? "?" : detail);
    abort();
}

static uint8_t next(const uint8_t **data, size_t *size)
{
    if (*size == 0)
        return 0;
    --*size;
    return *(*data)++;
}

static int decode(zbp_graph *g, uint32_t nodes, const uint8_t *data, size_t size)
{
    int status = ZBP_OK;

    for (uint32_t i = 0; status == ZBP_OK && i < nodes; i++) {
        const uint8_t mark = next(&data, &size);

        status = zbp_graph_add_node(g, model_key(i), NULL);
        if (status == ZBP_OK)
            g->mark[i] |= mark % 3 == 0 ? mark >> 4 : 0;
    }
    for (uint32_t e = 0; status == ZBP_OK && nodes > 0 && size >= 2 && e < MOST_EDGES; e++) {
        uint32_t src = next(&data, &size) % nodes, dst = next(&data, &size) % nodes;

        status = zbp_graph_add_edge(g, src, e, dst);
    }
    return status;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint32_t nodes = next(&data, &size) % (MODEL_NODES + 1);
    static const zbp_plan zeroed;
    long fail_once = (long)next(&data, &size) - 1;
    zbp_graph g = {0};
    zbp_plan p = {0};
    int status;

    counting_begin(fail_once < 32 ? fail_once : -1);
    status = decode(&g, nodes, data, size);
    if (status == ZBP_OK) {
        memset(&p, 0xA5, sizeof p);
        status = zbp_plan_build(&p, &g);
    }
    if (status != ZBP_OK) {
        if (status != ZBP_ENOMEM || count.fail_once < 0)
            fail("status", "no success");
        if (memcmp(&p, &zeroed, sizeof p) != 0)
            fail("plan", "not zeroed after an error");
    } else {
        count.fail_once = -1;
        if (model_differs(&p, &g) != NULL)
            fail("the model differs", model_differs(&p, &g));
    }
    zbp_plan_fini(&p);
    zbp_graph_fini(&g);
    if (memcmp(&p, &zeroed, sizeof p) != 0)
        fail("plan", "not zeroed in the end");
    if (count.live != 0)
        fail("allocator", "blocks are still live");
    return 0;
}
