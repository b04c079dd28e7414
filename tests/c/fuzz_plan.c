/* Any bytes are a graph; its plan must be the model's, also when allocations fail.
 *
 * For libFuzzer (clang): `make fuzz`. With -DZBP_FUZZ_STANDALONE it has a main of its own, which
 * any compiler takes: `fuzz_plan [inputs [seed]]` tries that many inputs, the first half random,
 * the others mutated from ones before; `fuzz_plan -- FILE...` replays files, as after a crash.
 *
 * The bytes: [0] nodes, [1] the allocation that fails (0: none), then marks, one byte a node, then
 * edges, two bytes each. What is missing is 0.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "counting.h"
#include "model.h"
#include "core/graph/zbp_plan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_EDGES = 1024 };

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
        status = zbp_graph_add_node(g, model_key(i), NULL);
        if (status == ZBP_OK)
            zbp_graph_mark(g, i, next(&data, &size) & 15);
    }
    for (uint32_t e = 0; status == ZBP_OK && nodes > 0 && size >= 2 && e < MOST_EDGES; e++) {
        uint32_t src = next(&data, &size) % nodes, dst = next(&data, &size) % nodes;

        status = zbp_graph_add_edge(g, src, e, dst);
    }
    return status;
}

/* It must see a number that is made wrong: else its silence means nothing. */
static void model_sees_a_fault(zbp_plan *p, const zbp_graph *g, uint32_t at)
{
    at %= p->node_count;
    p->flag[at] ^= ZBP_NODE_CLOSURE;
    if (model_differs(p, g) == NULL)
        fail("a planted fault", "was not seen");
    p->flag[at] ^= ZBP_NODE_CLOSURE;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    counting count;
    zbp_alloc alloc = counting_alloc(&count);
    uint32_t nodes = next(&data, &size) % (MODEL_NODES + 1);
    long fail_once = (long)next(&data, &size) - 1;
    zbp_graph g;
    zbp_plan p = {0};
    int status;

    count.fail_once = fail_once < 32 ? fail_once : -1;
    zbp_graph_init(&g, &alloc);
    status = decode(&g, nodes, data, size);
    if (status == ZBP_OK)
        status = zbp_plan_build(&p, &g, &alloc);
    if (status != ZBP_OK) {
        if (status != ZBP_ENOMEM || count.fail_once < 0)
            fail("status", "no success");
        if (p.block != NULL)
            fail("plan", "not zeroed after an error");
    } else {
        count.fail_once = -1;
        if (model_differs(&p, &g) != NULL)
            fail("the model differs", model_differs(&p, &g));
        if (nodes > 0)
            model_sees_a_fault(&p, &g, (uint32_t)size);
    }
    zbp_plan_fini(&p);
    zbp_graph_fini(&g);
    if (count.live != 0)
        fail("allocator", "blocks are still live");
    return 0;
}

#ifdef ZBP_FUZZ_STANDALONE

enum { LONGEST = 512, KEPT = 64 };

typedef struct input {
    uint8_t bytes[LONGEST];
    size_t size;
} input;

static void make_up(input *in, uint64_t *random)
{
    uint32_t nodes = model_below(random, 2) != 0 ? MODEL_NODES : 12;

    in->size = model_below(random, LONGEST + 1);
    for (size_t i = 0; i < in->size; i++)
        in->bytes[i] = (uint8_t)model_below(random, model_below(random, 8) != 0 ? nodes : 256);
    if (in->size > 1 && model_below(random, 2) != 0)
        in->bytes[1] = 0;
    /* Few inputs and weights: graphs in which most nodes are both leave nothing to plan. */
    for (size_t i = 2; i < in->size && i < 2 + (size_t)nodes; i++)
        if (model_below(random, 3) != 0)
            in->bytes[i] = 0;
}

static void mutate(input *in, const input *other, uint64_t *random)
{
    for (uint32_t n = 1 + model_below(random, 4); n > 0 && in->size > 0; n--) {
        size_t at = model_below(random, (uint32_t)in->size);

        switch (model_below(random, 5)) {
        case 0:
            in->bytes[at] ^= (uint8_t)(1u << model_below(random, 8));
            break;
        case 1:
            in->bytes[at] = (uint8_t)model_below(random, 256);
            break;
        case 2:
            in->size = at;
            break;
        case 3:
            memmove(in->bytes + at, in->bytes + at + 1, in->size - at - 1);
            in->size--;
            break;
        default: /* the other's tail */
            if (at < other->size) {
                memcpy(in->bytes + at, other->bytes + at, other->size - at);
                in->size = other->size;
            }
            break;
        }
    }
}

static int replay(const char *path)
{
    static uint8_t bytes[1 << 16];
    FILE *file = fopen(path, "rb");
    size_t size;

    if (file == NULL) {
        perror(path);
        return 1;
    }
    size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    return LLVMFuzzerTestOneInput(bytes, size);
}

int main(int argc, char **argv)
{
    static input kept[KEPT];
    unsigned long inputs = 10000;
    uint64_t random = 1;
    int status = 0;

    if (argc > 1 && strcmp(argv[1], "--") == 0) {
        for (int i = 2; i < argc; i++)
            status |= replay(argv[i]);
        return status;
    }
    if (argc > 1)
        inputs = strtoul(argv[1], NULL, 10);
    if (argc > 2)
        random = strtoull(argv[2], NULL, 10);
    for (unsigned long i = 0; i < inputs; i++) {
        input *in = &kept[model_below(&random, KEPT)];

        if (i < KEPT || i < inputs / 2)
            make_up(in, &random);
        else
            mutate(in, &kept[model_below(&random, KEPT)], &random);
        if (in->size == 0)
            make_up(in, &random);
        (void)LLVMFuzzerTestOneInput(in->bytes, in->size);
    }
    printf("1 passed, 0 failed\n");
    return 0;
}

#endif
