/* The inputs of a fuzz target, on several threads at once: what one thread's graph, plan, book or search does is no other's
 * to see. For `make tsan`, which links it with each target; `threads_X [inputs [seed]]`, that many inputs on each thread. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "model.h"

enum { THREADS = 4, LONGEST = 600 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct share {
    unsigned long inputs;
    uint64_t random;
} share;

static void *run(void *argument)
{
    share mine = *(share *)argument;
    uint8_t bytes[LONGEST];

    for (unsigned long n = 0; n < mine.inputs; n++) {
        const size_t size = model_below(&mine.random, LONGEST + 1);

        for (size_t i = 0; i < size; i++)
            bytes[i] = (uint8_t)model_random(&mine.random);
        (void)LLVMFuzzerTestOneInput(bytes, size);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    const unsigned long inputs = argc > 1 ? strtoul(argv[1], NULL, 10) : 100;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    share of[THREADS];
    pthread_t thread[THREADS];

    for (unsigned i = 0; i < THREADS; i++) {
        of[i] = (share){.inputs = inputs, .random = seed * THREADS + i + 1};
        if (pthread_create(&thread[i], NULL, run, &of[i]) != 0)
            return 1;
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(thread[i], NULL);
    printf("%d passed, 0 failed\n", THREADS);
    return 0;
}
