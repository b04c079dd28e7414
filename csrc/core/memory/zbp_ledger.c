#include "core/memory/zbp_ledger.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/zbpi_alloc.h"

void zbp_ledger_init(zbp_ledger *ledger, const zbp_alloc *alloc)
{
    memset(ledger, 0, sizeof *ledger);
    ledger->alloc = zbpi_alloc_copy(alloc);
    zbp_blocks_init(&ledger->blocks, alloc);
}

void zbp_ledger_fini(zbp_ledger *ledger)
{
    zbp_blocks_fini(&ledger->blocks);
    zbpi_free(&ledger->alloc, ledger->record, ledger->record_capacity * sizeof(zbp_record *));
    memset(ledger, 0, sizeof *ledger);
}

int zbp_ledger_start(zbp_ledger *ledger, zbp_record *record, uint64_t time_ns, uint32_t thread,
                     uint64_t max_events)
{
    int status;

    memset(record, 0, sizeof *record);
    if (ledger->record_count == ledger->record_capacity) {
        void *grown = zbpi_grow(&ledger->alloc, ledger->record, &ledger->record_capacity,
                                sizeof(zbp_record *));

        if (grown == NULL)
            return ZBP_ENOMEM;
        ledger->record = grown;
    }
    status =
        zbp_record_init(record, time_ns, ledger->next_serial, thread, max_events, &ledger->alloc);
    if (status == ZBP_OK)
        ledger->record[ledger->record_count++] = record;
    return status;
}

void zbp_ledger_stop(zbp_ledger *ledger, zbp_record *record)
{
    uint32_t kept = 0;

    for (uint32_t r = 0; r < ledger->record_count; r++)
        if (ledger->record[r] != record)
            ledger->record[kept++] = ledger->record[r];
    ledger->record_count = kept;
}

int zbp_ledger_mark(const zbp_ledger *ledger, zbp_record *record, uint64_t time_ns, uint32_t thread,
                    uint32_t *index_out)
{
    return zbp_record_mark(record, time_ns, ledger->next_serial, thread, index_out);
}

static void tell_freed(zbp_ledger *ledger, uint64_t time_ns, uint32_t thread, zbp_block block)
{
    for (uint32_t r = 0; r < ledger->record_count; r++)
        zbp_record_free(ledger->record[r], time_ns, thread, block);
}

int zbp_ledger_alloc(zbp_ledger *ledger, uint64_t time_ns, uint32_t thread, uint64_t address,
                     uint64_t bytes)
{
    const zbp_block block = {address, bytes, ledger->next_serial};
    zbp_block old = {0};
    int status = zbp_blocks_add(&ledger->blocks, block, &old);

    if (status != ZBP_OK)
        return status;
    if (old.address != 0)
        tell_freed(ledger, time_ns, thread, old);
    ledger->next_serial++;
    for (uint32_t r = 0; r < ledger->record_count; r++)
        zbp_record_alloc(ledger->record[r], time_ns, thread, block);
    return ZBP_OK;
}

bool zbp_ledger_free(zbp_ledger *ledger, uint64_t time_ns, uint32_t thread, uint64_t address,
                     zbp_block *block_out)
{
    zbp_block block;

    if (!zbp_blocks_take(&ledger->blocks, address, &block))
        return false;
    tell_freed(ledger, time_ns, thread, block);
    if (block_out != NULL)
        *block_out = block;
    return true;
}

void zbp_ledger_untracked(zbp_ledger *ledger)
{
    for (uint32_t r = 0; r < ledger->record_count; r++)
        zbp_record_untracked(ledger->record[r]);
}

static int compare_serials(const void *a, const void *b)
{
    const zbp_block *x = a, *y = b;

    return (x->serial > y->serial) - (x->serial < y->serial);
}

size_t zbp_ledger_since(const zbp_ledger *ledger, uint64_t since, zbp_block *block_out)
{
    size_t count = 0;

    for (size_t i = 0; i < ledger->blocks.capacity; i++) {
        const zbp_block *block = &ledger->blocks.slot[i];

        if (block->address != 0 && block->serial >= since)
            block_out[count++] = *block;
    }
    if (count > 1)
        qsort(block_out, count, sizeof *block_out, compare_serials);
    return count;
}
