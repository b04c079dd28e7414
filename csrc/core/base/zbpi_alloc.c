#include "core/base/zbpi_alloc.h"

#include <string.h>

#include "core/base/zbp_status.h"

void *zbpi_zeroed(size_t size)
{
    void *block = zbpi_resize(NULL, size);

    return block != NULL ? memset(block, 0, size) : NULL;
}

void *zbpi_grow(void *p, uint32_t *capacity, uint32_t first, size_t item_size)
{
    uint32_t old = *capacity;
    uint32_t wanted = old < first ? first : old > UINT32_MAX / 2 ? UINT32_MAX : old * 2;
    void *grown = wanted <= SIZE_MAX / item_size ? zbpi_resize(p, wanted * item_size) : NULL;

    if (grown != NULL)
        *capacity = wanted;
    return grown;
}

int zbpi_block_new(uint64_t words, uint32_t bytes, void **block_out)
{
    uint64_t size = words * sizeof(uint32_t) + bytes;
    void *block;

    if (size > SIZE_MAX)
        return ZBP_EOVERFLOW;
    block = zbpi_resize(NULL, (size_t)size);
    if (block == NULL)
        return ZBP_ENOMEM;
    *block_out = block;
    return ZBP_OK;
}

uint32_t *zbpi_block_take(uint32_t **rest, size_t count)
{
    uint32_t *array = *rest;

    *rest += count;
    return array;
}
