/* Any bytes are a heap; its vertices and ways must be the model's, also when allocations fail.
 *
 * For libFuzzer (clang): `make fuzz FUZZ_TARGET=fuzz_ways`. With -DZBP_FUZZ_STANDALONE it has a main of its own, which
 * any compiler takes: `fuzz_ways [inputs [seed]]` tries that many random inputs.
 *
 * The bytes: [0] the allocation that fails (0: none), then a drawing's (ways_model.h).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "counting.h"
#include "checks.h"
#include "model.h"
#include "ways_model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fail(const char *what, const char *detail)
{
    fprintf(stderr, "fuzz_ways: %s: %s\n", what, detail == NULL ? "?" : detail);
    abort();
}

/* Both must see a number that is made wrong: else neither's silence means anything. */
static void detectors_see_a_fault(const drawing *drawn, const zbp_heap *heap, zbp_ways *ways,
                                  uint32_t v)
{
    const uint8_t rank = ways->way[v].rank;

    ways->way[v].rank = v < ways->reached ? ZBP_RANK_HIDDEN : ZBP_RANK_ROOT;
    if (drawing_differs(drawn, heap, ways) == NULL ||
        zbp_ways_check(ways, heap, NULL) != ZBP_EINVAL)
        fail("a planted fault", "was not seen");
    ways->way[v].rank = rank;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    counting count;
    zbp_alloc alloc = counting_alloc(&count);
    uint8_t blame[DRAWN_MOST];
    const char *reason = NULL;
    drawing drawn;
    zbp_heap heap;
    zbp_ways ways = {0};
    int status;

    count.fail_once = size > 0 && data[0] < 8 ? (long)data[0] - 1 : -1;
    drawing_read(&drawn, size > 0 ? data + 1 : data, size > 0 ? size - 1 : 0);
    zbp_heap_init(&heap, &alloc);
    status = drawing_explore(&drawn, &heap);
    if (zbp_heap_check(&heap, &reason) != ZBP_OK)
        fail("heap", reason);
    if (status == ZBP_OK) {
        drawing_blame(&drawn, &heap, blame);
        status = zbp_ways_build(&ways, &heap, blame, &alloc);
    }
    if (status != ZBP_OK) {
        if (status != ZBP_ENOMEM || count.fail_once < 0)
            fail("status", zbp_status_name(status));
        if (ways.block != NULL)
            fail("ways", "not zeroed after an error");
    } else {
        if (drawing_differs(&drawn, &heap, &ways) != NULL)
            fail("the model differs", drawing_differs(&drawn, &heap, &ways));
        if (zbp_ways_check(&ways, &heap, &reason) != ZBP_OK)
            fail("ways", reason);
        if (heap.count > 0)
            detectors_see_a_fault(&drawn, &heap, &ways, (uint32_t)size % heap.count);
    }
    zbp_ways_fini(&ways);
    zbp_heap_fini(&heap);
    if (count.live != 0)
        fail("allocator", "blocks are still live");
    return 0;
}

#ifdef ZBP_FUZZ_STANDALONE
int main(int argc, char **argv)
{
    const uint64_t inputs = argc > 1 ? strtoull(argv[1], NULL, 10) : 10000;
    uint64_t random = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    uint8_t bytes[256];

    for (uint64_t i = 0; i < inputs; i++) {
        const uint32_t size = model_below(&random, sizeof bytes);

        for (uint32_t k = 0; k < size; k++)
            bytes[k] = (uint8_t)model_below(&random, 256);
        bytes[2] = (uint8_t)model_below(&random, 4); /* few roots: they reach most */
        bytes[3] = model_below(&random, 4) == 0 ? bytes[3] : 0;
        LLVMFuzzerTestOneInput(bytes, size);
    }
    printf("1 passed, 0 failed\n");
    return 0;
}
#endif
