#include "core/base/zbpi_alloc.h"

#include <string.h>

void *zbpi_zeroed(size_t size)
{
    void *block = zbpi_resize(NULL, size);

    return block != NULL ? memset(block, 0, size) : NULL;
}

void *zbpi_grow(void *p, uint32_t count, uint32_t *capacity, size_t item_size)
{
    const uint32_t wanted = *capacity > 0 ? *capacity * 2 : 4;
    void *grown;

    if (count >= INT32_MAX || wanted > SIZE_MAX / item_size)
        return NULL;
    grown = zbpi_resize(p, wanted * item_size);
    if (grown != NULL)
        *capacity = wanted;
    return grown;
}
