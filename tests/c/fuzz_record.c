/* Any bytes are what an allocator does while recordings begin and end: record_model.h says how, and looks. */
#include <stdio.h>
#include <stdlib.h>

#include "fuzz.h"
#include "record_model.h"

const uint32_t fuzz_longest = 3001;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *fault = record_model_run(data, size);

    if (fault != NULL) {
        fprintf(stderr, "fuzz_record: %s\n", fault);
        abort();
    }
    return 0;
}
