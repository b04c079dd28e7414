#include "core/base/zbpi_alloc.h"

#include <string.h>

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
