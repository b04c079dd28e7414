/* zbp_alloc.h - where the core gets its memory.
 *
 * Every object of the core takes an allocator when it is made, keeps a copy of it, and asks nobody
 * else. Tests pass one that counts live blocks and fails the n-th call; everybody else passes NULL
 * and gets libc's realloc and free.
 */
#pragma once

#include <stddef.h>

#include "core/base/zbp_c.h"

ZBP_BEGIN_C

/* resize: gives a block of new_size bytes, aligned as malloc's.
 *   p == NULL       a new block, old_size is 0, its bytes are not set.
 *   new_size == 0   frees p, returns NULL; this cannot fail.
 *   otherwise       p with its first min(old_size, new_size) bytes kept, perhaps elsewhere.
 * Returns NULL on failure; then p is still valid and unchanged. old_size is always the size that
 * the block was given. ctx is borrowed and must outlive every object that holds the allocator.
 *
 * A zbp_alloc whose resize is NULL stands for libc, as does a NULL pointer to one: so a zeroed
 * object is a legal empty object. */
typedef struct zbp_alloc {
    void *(*resize)(void *ctx, void *p, size_t old_size, size_t new_size);
    void *ctx;
} zbp_alloc;

ZBP_END_C
