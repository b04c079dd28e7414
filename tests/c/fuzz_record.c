/* Any bytes are what an allocator does while recordings begin and end: record_model.h says how, and looks.
 *
 * For libFuzzer (clang): `make fuzz FUZZ_TARGET=fuzz_record`. With -DZBP_FUZZ_STANDALONE it has a main of its own,
 * which any compiler takes: `fuzz_record [inputs [seed]]`.
 */
#include <stdio.h>
#include <stdlib.h>

#include "record_model.h"
#include "model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *fault = record_model_run(data, size);

    if (fault != NULL) {
        fprintf(stderr, "fuzz_record: %s\n", fault);
        abort();
    }
    return 0;
}

#ifdef ZBP_FUZZ_STANDALONE

enum { LONGEST = 3001 };

int main(int argc, char **argv)
{
    const unsigned long inputs = argc > 1 ? strtoul(argv[1], NULL, 10) : 1000;
    uint64_t random = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    static uint8_t bytes[LONGEST];

    for (unsigned long n = 0; n < inputs; n++) {
        const size_t size = model_below(&random, LONGEST + 1);

        for (size_t i = 0; i < size; i++)
            bytes[i] = (uint8_t)model_random(&random);
        if (model_below(&random, 2) != 0)
            bytes[0] = (uint8_t)model_below(&random, 16);
        (void)LLVMFuzzerTestOneInput(bytes, size);
    }
    printf("1 passed, 0 failed\n");
    return 0;
}

#endif
