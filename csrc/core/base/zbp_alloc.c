#include "core/base/zbp_alloc.h"

#include <stdlib.h>

#include "core/base/zbp_status.h"
#include "core/base/zbpi_alloc.h"

static void *libc_resize(void *ctx, void *p, size_t old_size, size_t new_size)
{
    (void)ctx;
    (void)old_size;
    if (new_size == 0) {
        free(p);
        return NULL;
    }
    return realloc(p, new_size);
}

zbp_alloc zbpi_alloc_copy(const zbp_alloc *alloc)
{
    zbp_alloc libc = {libc_resize, NULL};

    return alloc != NULL && alloc->resize != NULL ? *alloc : libc;
}

void *zbpi_resize(const zbp_alloc *alloc, void *p, size_t old_size, size_t new_size)
{
    zbp_alloc from = zbpi_alloc_copy(alloc);

    return from.resize(from.ctx, p, old_size, new_size);
}

void zbpi_free(const zbp_alloc *alloc, void *p, size_t size)
{
    if (p != NULL)
        (void)zbpi_resize(alloc, p, size, 0);
}

void *zbpi_grow(const zbp_alloc *alloc, void *p, uint32_t *capacity, size_t item_size)
{
    uint32_t old = *capacity;
    uint32_t wanted = old < 64 ? 64 : old > UINT32_MAX / 2 ? UINT32_MAX : old * 2;
    void *grown;

    if (wanted > SIZE_MAX / item_size)
        return NULL;
    grown = zbpi_resize(alloc, p, old * item_size, wanted * item_size);
    if (grown != NULL)
        *capacity = wanted;
    return grown;
}

int zbpi_block_new(const zbp_alloc *alloc, uint64_t words, uint32_t bytes, void **block_out,
                   size_t *size_out)
{
    uint64_t size = words * sizeof(uint32_t) + bytes;
    void *block;

    if (size > SIZE_MAX)
        return ZBP_EOVERFLOW;
    block = zbpi_resize(alloc, NULL, 0, (size_t)size);
    if (block == NULL)
        return ZBP_ENOMEM;
    *block_out = block;
    *size_out = (size_t)size;
    return ZBP_OK;
}

uint32_t *zbpi_block_take(uint32_t **rest, size_t count)
{
    uint32_t *array = *rest;

    *rest += count;
    return array;
}
