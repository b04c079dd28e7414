/* zbp_blocks.h - the blocks of memory that are in use, by address.
 *
 * Invariant: open addressing with linear probing, a power of two of slots, at most 5/8 of them
 * taken; a look-up meets no free slot before the block it looks for. Addresses are numbers here:
 * they are never read through.
 * Allocation: one block, replaced when it is full; it never shrinks. Threads: one at a time.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_c.h"

ZBP_BEGIN_C

typedef struct zbp_block {
    uint64_t address; /* 0: no block */
    uint64_t bytes;
    uint64_t serial; /* how many blocks were handed out before it */
    uint64_t trace;  /* where it comes from; a number of the caller's, 0 if unknown */
} zbp_block;

/* Held by the caller; all fields are for reading alone. Zeroed is a legal empty table. */
typedef struct zbp_blocks {
    size_t count;
    size_t capacity; /* slots: 0 or a power of two */
    zbp_block *slot;
} zbp_blocks;

/* Frees what the table holds and zeroes it. A zeroed table is legal. */
void zbp_blocks_fini(zbp_blocks *blocks);

/* Adds block, whose address is not 0. A block that is there at the same address is replaced and
 * given to *old_out, else *old_out has address 0. ZBP_ENOMEM, the table unchanged.
 * Amortised O(1). */
ZBP_MUST_USE int zbp_blocks_add(zbp_blocks *blocks, zbp_block block, zbp_block *old_out);

/* Takes the block at address out of the table and gives it to *block_out. False, and *block_out
 * left alone, if there is none. O(1) on average. */
bool zbp_blocks_take(zbp_blocks *blocks, uint64_t address, zbp_block *block_out);

ZBP_END_C
