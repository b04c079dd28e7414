#include "core/memory/zbp_tally.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

/* What a collection that runs on this thread has freed. */
typedef struct collection {
    const zbp_tally *of; /* NULL: none runs */
    uint64_t watchers;   /* those that it began for */
    zbp_block_list freed;
    bool is_short; /* there was no memory for a block */
} collection;

static _Thread_local collection running;

/* Not read where nobody will be told. */
static uint64_t now(const zbp_tally *tally)
{
    return tally->ledger.record_count != 0 ? tally->clock() : 0;
}

static uint32_t this_thread(void)
{
    static uint32_t last;
    static _Thread_local uint32_t number;

    if (number == 0)
        number = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return number;
}

void zbp_block_list_fini(zbp_block_list *list)
{
    zbpi_free(&list->alloc, list->block, list->capacity * sizeof *list->block);
    *list = (zbp_block_list){0};
}

void zbp_tally_init(zbp_tally *tally, uint64_t (*clock)(void), const zbp_alloc *alloc)
{
    memset(tally, 0, sizeof *tally);
    tally->clock = clock;
    pthread_mutex_init(&tally->lock, NULL);
    zbp_ledger_init(&tally->ledger, alloc);
}

void zbp_tally_fini(zbp_tally *tally)
{
    zbp_ledger_fini(&tally->ledger);
    pthread_mutex_destroy(&tally->lock);
}

void zbp_tally_lock(zbp_tally *tally)
{
    pthread_mutex_lock(&tally->lock);
}

void zbp_tally_unlock(zbp_tally *tally)
{
    pthread_mutex_unlock(&tally->lock);
}

int zbp_tally_start(zbp_tally *tally, zbp_record *record, uint64_t max_events)
{
    int status;

    zbp_tally_lock(tally);
    status = zbp_ledger_start(&tally->ledger, record, tally->clock(), this_thread(), max_events);
    if (status == ZBP_OK)
        __atomic_store_n(&tally->is_fed, true, __ATOMIC_RELEASE);
    zbp_tally_unlock(tally);
    return status;
}

bool zbp_tally_stop(zbp_tally *tally, zbp_record *record)
{
    bool is_fed;

    zbp_tally_lock(tally);
    zbp_ledger_stop(&tally->ledger, record);
    is_fed = tally->ledger.record_count != 0;
    __atomic_store_n(&tally->is_fed, is_fed, __ATOMIC_RELEASE);
    zbp_tally_unlock(tally);
    return !is_fed;
}

bool zbp_tally_is_fed(const zbp_tally *tally)
{
    return __atomic_load_n(&tally->is_fed, __ATOMIC_ACQUIRE);
}

int zbp_tally_mark(zbp_tally *tally, zbp_record *record, uint32_t *index_out)
{
    int status;

    zbp_tally_lock(tally);
    status = zbp_ledger_mark(&tally->ledger, record, tally->clock(), this_thread(), index_out);
    zbp_tally_unlock(tally);
    return status;
}

static void count_blocks(zbp_tally *tally)
{
    __atomic_store_n(&tally->block_count, tally->ledger.blocks.count, __ATOMIC_RELAXED);
}

bool zbp_tally_alloc(zbp_tally *tally, uint64_t address, uint64_t bytes)
{
    int status;

    zbp_tally_lock(tally);
    status = zbp_ledger_alloc(&tally->ledger, now(tally), this_thread(), address, bytes);
    if (status != ZBP_OK)
        zbp_ledger_untracked(&tally->ledger);
    count_blocks(tally);
    zbp_tally_unlock(tally);
    return status == ZBP_OK;
}

void zbp_tally_untracked(zbp_tally *tally)
{
    zbp_tally_lock(tally);
    zbp_ledger_untracked(&tally->ledger);
    zbp_tally_unlock(tally);
}

/* Called under the lock, which watchers change without. */
static void note_collected(const zbp_tally *tally, zbp_block block)
{
    zbp_block_list *freed = &running.freed;

    if (running.of != tally ||
        running.watchers != __atomic_load_n(&tally->watchers, __ATOMIC_RELAXED))
        return;
    if (freed->count == freed->capacity) {
        uint32_t capacity = (uint32_t)freed->capacity;
        zbp_block *grown = zbpi_grow(&freed->alloc, freed->block, &capacity, sizeof *freed->block);

        if (grown == NULL) {
            running.is_short = true;
            return;
        }
        freed->block = grown;
        freed->capacity = capacity;
    }
    freed->block[freed->count++] = block;
}

void zbp_tally_free(zbp_tally *tally, uint64_t address)
{
    zbp_block block;

    if (__atomic_load_n(&tally->block_count, __ATOMIC_RELAXED) == 0)
        return;
    zbp_tally_lock(tally);
    if (zbp_ledger_free(&tally->ledger, now(tally), this_thread(), address, &block)) {
        count_blocks(tally);
        note_collected(tally, block);
    }
    zbp_tally_unlock(tally);
}

uint64_t zbp_tally_serial(zbp_tally *tally)
{
    uint64_t serial;

    zbp_tally_lock(tally);
    serial = tally->ledger.next_serial;
    zbp_tally_unlock(tally);
    return serial;
}

int zbp_tally_blocks(zbp_tally *tally, uint64_t since, zbp_block_list *list_out)
{
    zbp_block_list list = {0};
    int status = ZBP_OK;

    zbp_tally_lock(tally);
    list.alloc = tally->ledger.alloc;
    list.capacity = tally->ledger.blocks.count;
    if (list.capacity != 0) {
        list.block = zbpi_resize(&list.alloc, NULL, 0, list.capacity * sizeof *list.block);
        if (list.block == NULL)
            status = ZBP_ENOMEM;
        else
            list.count = zbp_ledger_since(&tally->ledger, since, list.block);
    }
    zbp_tally_unlock(tally);
    *list_out = status == ZBP_OK ? list : (zbp_block_list){0};
    return status;
}

void zbp_tally_collection_begins(zbp_tally *tally)
{
    zbp_block_list_fini(&running.freed);
    running = (collection){.of = tally,
                           .watchers = __atomic_load_n(&tally->watchers, __ATOMIC_RELAXED),
                           .freed = {.alloc = tally->ledger.alloc}};
}

int zbp_tally_collection_ends(zbp_block_list *list_out)
{
    const bool is_short = running.is_short;

    if (is_short || running.freed.count == 0)
        zbp_block_list_fini(&running.freed);
    *list_out = running.freed;
    running = (collection){0};
    return is_short ? ZBP_ENOMEM : ZBP_OK;
}

void zbp_tally_forget_collections(zbp_tally *tally)
{
    __atomic_add_fetch(&tally->watchers, 1, __ATOMIC_RELAXED);
}
