/* counting.h - an allocator that counts, and that fails when it is told to.
 *
 * It also holds its callers to zbp_alloc's contract: a wrong old_size aborts. Blocks always move,
 * so that a pointer kept over a resize is found by the sanitizers.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/zbp_alloc.h"

typedef struct counting {
    long calls;     /* that ask for memory */
    long fail_at;   /* this call (0, 1, ...) and all after it fail; -1: none does */
    long fail_once; /* this call alone fails; -1: none does */
    long live;      /* blocks */
    size_t bytes;   /* in them */
    size_t peak;
} counting;

enum { COUNTING_HEAD = 16 }; /* keeps malloc's alignment; holds the size */

static inline void *counting_resize(void *ctx, void *p, size_t old_size, size_t new_size)
{
    counting *c = ctx;
    char *old = p == NULL ? NULL : (char *)p - COUNTING_HEAD;
    char *new = NULL;
    size_t size = 0;

    if (old != NULL)
        memcpy(&size, old, sizeof size);
    if (size != old_size) {
        fprintf(stderr, "resize: old_size is %zu, the block has %zu\n", old_size, size);
        abort();
    }
    if (new_size > 0) {
        long call = c->calls++;

        if ((c->fail_at >= 0 && call >= c->fail_at) || call == c->fail_once)
            return NULL;
        new = malloc(new_size + COUNTING_HEAD);
        if (new == NULL)
            return NULL;
        memset(new + COUNTING_HEAD, 0xA5, new_size);
        memcpy(new, &new_size, sizeof new_size);
        if (old != NULL)
            memcpy(new + COUNTING_HEAD, p, old_size < new_size ? old_size : new_size);
        c->live++;
        c->bytes += new_size;
        if (c->bytes > c->peak)
            c->peak = c->bytes;
    }
    if (old != NULL) {
        c->live--;
        c->bytes -= old_size;
        free(old);
    }
    return new == NULL ? NULL : new + COUNTING_HEAD;
}

static inline zbp_alloc counting_alloc(counting *c)
{
    zbp_alloc alloc = {counting_resize, c};

    *c = (counting){.fail_at = -1, .fail_once = -1};
    return alloc;
}
