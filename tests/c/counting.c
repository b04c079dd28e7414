/* Linked into every program, in the place of the core's two doors to libc (csrc/core/base/zbpi_libc.c). Blocks always
 * move, so that a pointer kept over a resize is found by the sanitizers. */
#include "counting.h"

#include <stdint.h>
#include <stdlib.h>

enum { HEAD = 16 }; /* keeps malloc's alignment; holds the size */

_Thread_local counting count = {.fail_at = -1, .fail_once = -1};

void *__wrap_zbpi_resize(void *p, size_t size); /* the linker's names */
void __wrap_zbpi_free(void *p);

size_t counting_size(const void *block)
{
    size_t size = 0;

    memcpy(&size, (const char *)block - HEAD, sizeof size);
    return size;
}

void __wrap_zbpi_free(void *p)
{
    char *block = p == NULL ? NULL : (char *)p - HEAD;

    if (block == NULL)
        return;
    count.live--;
    count.bytes -= counting_size(p);
    free(block);
}

void *__wrap_zbpi_resize(void *p, size_t size)
{
    const long call = count.calls++;
    char *block;

    if ((count.fail_at >= 0 && call >= count.fail_at) || call == count.fail_once)
        return NULL;
    block = malloc(size + HEAD);
    if (block == NULL)
        return NULL;
    memcpy(block, &size, sizeof size);
    memset(block + HEAD, 0xA5, size);
    if (p != NULL)
        memcpy(block + HEAD, p, counting_size(p) < size ? counting_size(p) : size);
    count.live++;
    count.bytes += size;
    count.peak = count.bytes > count.peak ? count.bytes : count.peak;
    __wrap_zbpi_free(p);
    return block + HEAD;
}
