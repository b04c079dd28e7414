#include "instruments/core/zbp_record.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

static uint32_t this_thread(void)
{
    static uint32_t last;
    static _Thread_local uint32_t number;

    if (number == 0)
        number = __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
    return number;
}

/* Records ------------------------------------------------------------------------------------- */

static void log_event(zbp_record *record, uint64_t time_ns, zbp_block block, uint32_t kind)
{
    if (record->max_events == 0)
        return;
    if (record->dropped == 0 && record->event_count < record->max_events) {
        zbp_event *room =
            zbpi_room(record->event, record->event_count, &record->event_capacity, sizeof *room);

        if (room != NULL)
            record->event = room;
    }
    /* Once one event is missing, all that come later are. */
    if (record->dropped != 0 || record->event_count == record->event_capacity ||
        record->event_count >= record->max_events)
        record->dropped++;
    else
        record->event[record->event_count++] = (zbp_event){time_ns, block, this_thread(), kind};
}

static void tell_alloc(zbp_record *record, uint64_t time_ns, zbp_block block)
{
    zbp_mark *mark = &record->mark[record->mark_count - 1];

    record->live += block.bytes;
    mark->allocations++;
    mark->allocated += block.bytes;
    if (record->live > mark->peak)
        mark->peak = record->live;
    log_event(record, time_ns, block, ZBP_EVENT_ALLOC);
}

static void tell_free(zbp_record *record, uint64_t time_ns, zbp_block block)
{
    zbp_mark *mark = &record->mark[record->mark_count - 1];

    if (block.serial < record->first_serial) {
        log_event(record, time_ns, block, ZBP_EVENT_FREE_OLDER);
        return;
    }
    record->live -= block.bytes;
    mark->frees++;
    mark->freed += block.bytes;
    log_event(record, time_ns, block, ZBP_EVENT_FREE);
}

static int add_mark(zbp_record *record, uint64_t time_ns)
{
    zbp_mark *room =
        zbpi_room(record->mark, record->mark_count, &record->mark_capacity, sizeof *room);

    if (room == NULL)
        return ZBP_ENOMEM;
    record->mark = room;
    record->mark[record->mark_count++] = (zbp_mark){.time_ns = time_ns,
                                                    .events = record->event_count,
                                                    .live = record->live,
                                                    .peak = record->live,
                                                    .thread = this_thread()};
    return ZBP_OK;
}

void zbp_record_fini(zbp_record *record)
{
    zbpi_free(record->event);
    zbpi_free(record->mark);
    memset(record, 0, sizeof *record);
}

/* The tally ----------------------------------------------------------------------------------- */

void zbp_tally_init(zbp_tally *tally, uint64_t (*clock)(void))
{
    memset(tally, 0, sizeof *tally);
    tally->clock = clock;
    pthread_mutex_init(&tally->lock, NULL);
}

void zbp_tally_fini(zbp_tally *tally)
{
    zbp_blocks_fini(&tally->blocks);
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

    memset(record, 0, sizeof *record);
    record->max_events = max_events;
    zbp_tally_lock(tally);
    record->first_serial = tally->next_serial;
    status = add_mark(record, tally->clock());
    if (status == ZBP_OK) {
        record->next = tally->fed;
        __atomic_store_n(&tally->fed, record, __ATOMIC_RELEASE);
    }
    zbp_tally_unlock(tally);
    if (status != ZBP_OK)
        memset(record, 0, sizeof *record);
    return status;
}

bool zbp_tally_stop(zbp_tally *tally, zbp_record *record)
{
    zbp_record **place = &tally->fed;

    zbp_tally_lock(tally);
    while (*place != NULL && *place != record)
        place = &(*place)->next;
    if (*place != NULL)
        __atomic_store_n(place, record->next, __ATOMIC_RELEASE);
    record->next = NULL;
    const bool is_fed = tally->fed != NULL;
    zbp_tally_unlock(tally);
    return !is_fed;
}

bool zbp_tally_is_fed(const zbp_tally *tally)
{
    return __atomic_load_n(&tally->fed, __ATOMIC_ACQUIRE) != NULL;
}

int zbp_tally_mark(zbp_tally *tally, zbp_record *record, uint32_t *index_out)
{
    int status;

    zbp_tally_lock(tally);
    status = add_mark(record, tally->clock());
    if (status == ZBP_OK)
        *index_out = record->mark_count - 1;
    zbp_tally_unlock(tally);
    return status;
}

/* Not read where nobody will be told. */
static uint64_t now(const zbp_tally *tally)
{
    return tally->fed != NULL ? tally->clock() : 0;
}

static void tell_all_freed(zbp_tally *tally, uint64_t time_ns, zbp_block block)
{
    for (zbp_record *record = tally->fed; record != NULL; record = record->next)
        tell_free(record, time_ns, block);
}

bool zbp_tally_alloc(zbp_tally *tally, uint64_t address, uint64_t bytes, uint64_t trace)
{
    zbp_block block = {address, bytes, 0, trace}, old = {0};

    zbp_tally_lock(tally);
    const uint64_t time_ns = now(tally);
    block.serial = tally->next_serial;
    const bool is_followed = zbp_blocks_add(&tally->blocks, block, &old) == ZBP_OK;
    if (old.address != 0)
        tell_all_freed(tally, time_ns, old);
    tally->next_serial += is_followed;
    for (zbp_record *record = tally->fed; record != NULL; record = record->next) {
        if (is_followed)
            tell_alloc(record, time_ns, block);
        record->untracked += !is_followed;
    }
    __atomic_store_n(&tally->block_count, tally->blocks.count, __ATOMIC_RELAXED);
    zbp_tally_unlock(tally);
    return is_followed;
}

void zbp_tally_untracked(zbp_tally *tally)
{
    zbp_tally_lock(tally);
    for (zbp_record *record = tally->fed; record != NULL; record = record->next)
        record->untracked++;
    zbp_tally_unlock(tally);
}

void zbp_tally_free(zbp_tally *tally, uint64_t address)
{
    zbp_block block;

    if (__atomic_load_n(&tally->block_count, __ATOMIC_RELAXED) == 0)
        return;
    zbp_tally_lock(tally);
    if (zbp_blocks_take(&tally->blocks, address, &block))
        tell_all_freed(tally, now(tally), block);
    __atomic_store_n(&tally->block_count, tally->blocks.count, __ATOMIC_RELAXED);
    zbp_tally_unlock(tally);
}

uint64_t zbp_tally_serial(zbp_tally *tally)
{
    zbp_tally_lock(tally);
    const uint64_t serial = tally->next_serial;
    zbp_tally_unlock(tally);
    return serial;
}
