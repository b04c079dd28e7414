/* counting.h - what of the core's memory this thread counts, and which allocations fail. */
#pragma once

#include <stddef.h>
#include <string.h>

typedef struct counting {
    long calls;     /* that ask for memory */
    long fail_at;   /* this call (0, 1, ...) and all after it fail; -1: none does */
    long fail_once; /* this call alone fails; -1: none does */
    long live;      /* blocks */
    size_t bytes;   /* in them */
    size_t peak;
} counting;

extern _Thread_local counting count;

/* Of a block of the core's. */
size_t counting_size(const void *block);

/* Counts from 0 on, and lets call number `fail_once`, or none, fail. */
static inline void counting_begin(long fail_once)
{
    count = (counting){.fail_at = -1, .fail_once = fail_once};
}
