/* zbpi_alloc.h - where the core gets its memory: libc. Private: not for the shim.
 *
 * Tests link their own in the place of the first two: they count blocks, and fail when told to.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* As realloc and free; 0 bytes are taken for one, so that NULL means that there is no memory. */
void *zbpi_resize(void *p, size_t size);
void zbpi_free(void *p);

/* A new block of zeros; NULL if there is no memory. */
void *zbpi_zeroed(size_t size);

/* For zbpi_room, which asks for it where there is no room. */
void *zbpi_grow(void *p, uint32_t count, uint32_t *capacity, size_t item_size);

/* Makes room for one more than `count` in an array of *capacity items of item_size bytes. Returns
 * the array, perhaps elsewhere. Returns NULL if there is no memory, or no int32_t for the index;
 * then the array and *capacity are as before. */
static inline void *zbpi_room(void *p, uint32_t count, uint32_t *capacity, size_t item_size)
{
    return count < *capacity ? p : zbpi_grow(p, count, capacity, item_size);
}
