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

/* Doubles an array of *capacity items of item_size bytes; it begins with `first` of them. Returns
 * the array, perhaps elsewhere, and sets *capacity. Returns NULL if there is no memory or the size
 * does not fit; then the array and *capacity are as before. */
void *zbpi_grow(void *p, uint32_t *capacity, uint32_t first, size_t item_size);
