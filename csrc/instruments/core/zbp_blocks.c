#include "instruments/core/zbp_blocks.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"
#include "core/base/zbpi_hash.h"

enum { FIRST_CAPACITY = 256 };

static size_t home_of(const zbp_blocks *blocks, uint64_t address)
{
    return zbpi_hash(address) & (blocks->capacity - 1);
}

/* The slot of address, or the free one where it belongs. Ends because one slot is free. */
static size_t probe(const zbp_blocks *blocks, uint64_t address)
{
    size_t i = home_of(blocks, address);

    while (blocks->slot[i].address != 0 && blocks->slot[i].address != address)
        i = (i + 1) & (blocks->capacity - 1);
    return i;
}

static int grow(zbp_blocks *blocks)
{
    zbp_blocks grown = *blocks;

    grown.capacity = blocks->capacity == 0 ? FIRST_CAPACITY : blocks->capacity * 2;
    if (blocks->capacity > SIZE_MAX / sizeof *grown.slot / 2)
        return ZBP_ENOMEM;
    grown.slot = zbpi_zeroed(grown.capacity * sizeof *grown.slot);
    if (grown.slot == NULL)
        return ZBP_ENOMEM;
    for (size_t i = 0; i < blocks->capacity; i++)
        if (blocks->slot[i].address != 0)
            grown.slot[probe(&grown, blocks->slot[i].address)] = blocks->slot[i];
    zbpi_free(blocks->slot);
    *blocks = grown;
    return ZBP_OK;
}

/* Frees slot i and moves back what a look-up would miss behind the gap. */
static void close_gap(zbp_blocks *blocks, size_t i)
{
    size_t mask = blocks->capacity - 1;

    for (size_t j = (i + 1) & mask; blocks->slot[j].address != 0; j = (j + 1) & mask) {
        size_t home = home_of(blocks, blocks->slot[j].address);

        if (((j - home) & mask) >= ((j - i) & mask)) {
            blocks->slot[i] = blocks->slot[j];
            i = j;
        }
    }
    memset(&blocks->slot[i], 0, sizeof blocks->slot[i]);
}

void zbp_blocks_fini(zbp_blocks *blocks)
{
    zbpi_free(blocks->slot);
    memset(blocks, 0, sizeof *blocks);
}

int zbp_blocks_add(zbp_blocks *blocks, zbp_block block, zbp_block *old_out)
{
    zbp_block old = {0};
    size_t i = 0;

    if (blocks->capacity != 0) {
        i = probe(blocks, block.address);
        old = blocks->slot[i];
    }
    if (old.address == 0) {
        if (blocks->count >= blocks->capacity / 8 * 5) {
            int status = grow(blocks);

            if (status != ZBP_OK)
                return status;
            i = probe(blocks, block.address);
        }
        blocks->count++;
    }
    blocks->slot[i] = block;
    *old_out = old;
    return ZBP_OK;
}

bool zbp_blocks_take(zbp_blocks *blocks, uint64_t address, zbp_block *block_out)
{
    size_t i;

    if (address == 0 || blocks->capacity == 0)
        return false;
    i = probe(blocks, address);
    if (blocks->slot[i].address == 0)
        return false;
    *block_out = blocks->slot[i];
    blocks->count--;
    close_gap(blocks, i);
    return true;
}
