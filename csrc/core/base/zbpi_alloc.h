/* zbpi_alloc.h - allocation helpers that the core's files share. Private: not for the shim. */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_alloc.h"

/* A copy of *alloc, or libc's allocator for NULL. */
zbp_alloc zbpi_alloc_copy(const zbp_alloc *alloc);

/* resize as zbp_alloc describes it, through *alloc. */
void *zbpi_resize(const zbp_alloc *alloc, void *p, size_t old_size, size_t new_size);

/* Frees p, which may be NULL. */
void zbpi_free(const zbp_alloc *alloc, void *p, size_t size);

/* Doubles an array of *capacity items of item_size bytes (at least 64 items). Returns the array,
 * perhaps elsewhere, and sets *capacity. Returns NULL if the allocator does or if the size does
 * not fit; then the array and *capacity are as before. */
void *zbpi_grow(const zbp_alloc *alloc, void *p, uint32_t *capacity, size_t item_size);

/* One block for many arrays: this many 32-bit numbers and, behind them, bytes. Its contents are not
 * set. ZBP_ENOMEM, ZBP_EOVERFLOW: the outputs are left alone. */
int zbpi_block_new(const zbp_alloc *alloc, uint64_t words, uint32_t bytes, void **block_out,
                   size_t *size_out);

/* The next array of a block of which *rest is left. */
uint32_t *zbpi_block_take(uint32_t **rest, size_t count);
