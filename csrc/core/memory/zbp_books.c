#include "core/memory/zbp_books.h"

#include <stdlib.h>
#include <string.h>

#include "core/base/zbpi_alloc.h"

void zbp_books_init(zbp_books *books, const zbp_alloc *alloc)
{
    memset(books, 0, sizeof *books);
    books->alloc = zbpi_alloc_copy(alloc);
    zbp_blocks_init(&books->blocks, alloc);
}

void zbp_books_fini(zbp_books *books)
{
    zbp_blocks_fini(&books->blocks);
    zbpi_free(&books->alloc, books->record, books->record_capacity * sizeof(zbp_record *));
    memset(books, 0, sizeof *books);
}

int zbp_books_start(zbp_books *books, zbp_record *record, uint64_t time_ns, uint32_t thread,
                    uint64_t max_events)
{
    int status;

    memset(record, 0, sizeof *record);
    if (books->record_count == books->record_capacity) {
        void *grown =
            zbpi_grow(&books->alloc, books->record, &books->record_capacity, sizeof(zbp_record *));

        if (grown == NULL)
            return ZBP_ENOMEM;
        books->record = grown;
    }
    status =
        zbp_record_init(record, time_ns, books->next_serial, thread, max_events, &books->alloc);
    if (status == ZBP_OK)
        books->record[books->record_count++] = record;
    return status;
}

void zbp_books_stop(zbp_books *books, zbp_record *record)
{
    uint32_t kept = 0;

    for (uint32_t r = 0; r < books->record_count; r++)
        if (books->record[r] != record)
            books->record[kept++] = books->record[r];
    books->record_count = kept;
}

int zbp_books_mark(const zbp_books *books, zbp_record *record, uint64_t time_ns, uint32_t thread,
                   uint32_t *index_out)
{
    return zbp_record_mark(record, time_ns, books->next_serial, thread, index_out);
}

static void tell_freed(zbp_books *books, uint64_t time_ns, uint32_t thread, zbp_block block)
{
    for (uint32_t r = 0; r < books->record_count; r++)
        zbp_record_free(books->record[r], time_ns, thread, block);
}

int zbp_books_alloc(zbp_books *books, uint64_t time_ns, uint32_t thread, uint64_t address,
                    uint64_t bytes)
{
    const zbp_block block = {address, bytes, books->next_serial};
    zbp_block old = {0};
    int status = zbp_blocks_add(&books->blocks, block, &old);

    if (status != ZBP_OK)
        return status;
    if (old.address != 0)
        tell_freed(books, time_ns, thread, old);
    books->next_serial++;
    for (uint32_t r = 0; r < books->record_count; r++)
        zbp_record_alloc(books->record[r], time_ns, thread, block);
    return ZBP_OK;
}

bool zbp_books_free(zbp_books *books, uint64_t time_ns, uint32_t thread, uint64_t address,
                    zbp_block *block_out)
{
    zbp_block block;

    if (!zbp_blocks_take(&books->blocks, address, &block))
        return false;
    tell_freed(books, time_ns, thread, block);
    if (block_out != NULL)
        *block_out = block;
    return true;
}

void zbp_books_untracked(zbp_books *books)
{
    for (uint32_t r = 0; r < books->record_count; r++)
        zbp_record_untracked(books->record[r]);
}

static int compare_serials(const void *a, const void *b)
{
    const zbp_block *x = a, *y = b;

    return (x->serial > y->serial) - (x->serial < y->serial);
}

size_t zbp_books_since(const zbp_books *books, uint64_t since, zbp_block *block_out)
{
    size_t count = 0;

    for (size_t i = 0; i < books->blocks.capacity; i++) {
        const zbp_block *block = &books->blocks.slot[i];

        if (block->address != 0 && block->serial >= since)
            block_out[count++] = *block;
    }
    if (count > 1)
        qsort(block_out, count, sizeof *block_out, compare_serials);
    return count;
}

/* ---- the validator */

static const char *find_fault_of_serials(const zbp_books *books)
{
    const zbp_blocks *blocks = &books->blocks;

    for (size_t i = 0; i < blocks->capacity; i++) {
        if (blocks->slot[i].address == 0)
            continue;
        if (blocks->slot[i].serial >= books->next_serial)
            return "books: a block has a serial that is still to come";
        for (size_t j = 0; j < i; j++)
            if (blocks->slot[j].address != 0 && blocks->slot[j].serial == blocks->slot[i].serial)
                return "books: two blocks have the same serial";
    }
    return NULL;
}

static const char *find_fault_of_record(const zbp_books *books, uint32_t r)
{
    const zbp_record *record = books->record[r];
    const char *reason = NULL;
    uint64_t count = 0, live = 0;

    for (uint32_t other = 0; other < r; other++)
        if (books->record[other] == record)
            return "books: a record is fed twice";
    if (record->first_serial > books->next_serial)
        return "books: a record begins with a serial that is still to come";
    for (size_t i = 0; i < books->blocks.capacity; i++) {
        const zbp_block *block = &books->blocks.slot[i];

        if (block->address != 0 && block->serial >= record->first_serial) {
            count++;
            live += block->bytes;
        }
    }
    if (live != record->live || count != record->total.allocations - record->total.frees)
        return "books: what is live in a record is not what is in use since it began";
    return zbp_record_check(record, &reason) == ZBP_OK ? NULL : reason;
}

int zbp_books_check(const zbp_books *books, const char **reason_out)
{
    const char *reason = NULL;

    if (books->record_count > books->record_capacity)
        reason = "books: more records are fed than there is room for";
    else if (zbp_blocks_check(&books->blocks, &reason) == ZBP_OK)
        reason = find_fault_of_serials(books);
    for (uint32_t r = 0; reason == NULL && r < books->record_count; r++)
        reason = find_fault_of_record(books, r);
    if (reason_out != NULL)
        *reason_out = reason;
    return reason == NULL ? ZBP_OK : ZBP_EINVAL;
}
