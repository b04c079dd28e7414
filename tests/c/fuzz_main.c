/* A fuzz target's main where libFuzzer is not: `fuzz_X [inputs [seed [threads]]]` gives it that many random inputs, on each
 * of the threads (1) others, at once: what one does is no other's to see. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "fuzz.h"
#include "model.h"

enum { MOST_THREADS = 8, LONGEST = 4096 };

typedef struct share {
    unsigned long inputs;
    uint64_t random;
} share;

static void *run(void *argument)
{
    share mine = *(share *)argument;
    uint8_t bytes[LONGEST];

    for (unsigned long n = 0; n < mine.inputs; n++) {
        const size_t size = model_below(&mine.random, fuzz_longest + 1);

        for (size_t i = 0; i < size; i++)
            bytes[i] = (uint8_t)model_random(&mine.random);
        (void)LLVMFuzzerTestOneInput(bytes, size);
    }
    return NULL;
}

static unsigned long number(int argc, char **argv, int n, unsigned long otherwise)
{
    return argc > n ? strtoul(argv[n], NULL, 10) : otherwise;
}

int main(int argc, char **argv)
{
    const unsigned long seed = number(argc, argv, 2, 1), threads = number(argc, argv, 3, 1);
    share of[MOST_THREADS];
    pthread_t thread[MOST_THREADS];

    if (threads > MOST_THREADS)
        return 1;
    for (unsigned long i = 0; i < threads; i++) {
        of[i] = (share){number(argc, argv, 1, 1000), seed * MOST_THREADS + i + 1};
        if (pthread_create(&thread[i], NULL, run, &of[i]) != 0)
            return 1;
    }
    for (unsigned long i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    printf("%lu passed, 0 failed\n", threads);
    return 0;
}
