#include "core/memory/zbp_record.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

static void span_alloc(zbp_span *span, uint64_t bytes, uint64_t live)
{
    span->allocations++;
    span->allocated += bytes;
    if (live > span->peak)
        span->peak = live;
}

static void span_free(zbp_span *span, uint64_t bytes)
{
    span->frees++;
    span->freed += bytes;
}

static zbp_span *open_span(zbp_record *record)
{
    return &record->mark[record->mark_count - 1].span;
}

/* The place of the next event, or NULL if there is no room. */
static zbp_event *place_of_next(zbp_record *record)
{
    uint64_t c = record->event_count / ZBP_EVENTS_PER_CHUNK;

    /* Once one event is missing the log is a prefix of what happened, and stays one. */
    if (record->dropped != 0 || record->event_count >= record->max_events || c >= UINT32_MAX)
        return NULL;
    if (record->event_count % ZBP_EVENTS_PER_CHUNK == 0) {
        if (c >= record->chunk_capacity) {
            void *grown = zbpi_grow(&record->alloc, record->chunk, &record->chunk_capacity,
                                    sizeof(zbp_event *));

            if (grown == NULL)
                return NULL;
            record->chunk = grown;
        }
        record->chunk[c] =
            zbpi_resize(&record->alloc, NULL, 0, ZBP_EVENTS_PER_CHUNK * sizeof(zbp_event));
        if (record->chunk[c] == NULL)
            return NULL;
    }
    return &record->chunk[c][record->event_count % ZBP_EVENTS_PER_CHUNK];
}

/* For an event of this kind that comes next. */
static uint32_t since_alloc_of_next(const zbp_record *record, uint32_t kind)
{
    const zbp_event *last;

    if (kind == ZBP_EVENT_ALLOC)
        return 0;
    if (record->event_count == 0)
        return 1;
    last = zbp_record_event(record, record->event_count - 1);
    return last->since_alloc < ZBP_SINCE_MOST ? last->since_alloc + 1u : ZBP_SINCE_MOST;
}

static void log_event(zbp_record *record, uint64_t time_ns, uint32_t thread, zbp_block block,
                      uint32_t kind)
{
    zbp_event *place = place_of_next(record);

    if (place == NULL) {
        record->dropped += record->max_events != 0;
        return;
    }
    *place = (zbp_event){.time_ns = time_ns,
                         .block = block,
                         .thread = thread,
                         .kind = kind & 3u,
                         .since_alloc = since_alloc_of_next(record, kind) & ZBP_SINCE_MOST};
    record->event_count++;
}

static int add_mark(zbp_record *record, uint64_t time_ns, uint64_t serial, uint32_t thread)
{
    if (record->mark_count == UINT32_MAX)
        return ZBP_EOVERFLOW;
    if (record->mark_count == record->mark_capacity) {
        void *grown =
            zbpi_grow(&record->alloc, record->mark, &record->mark_capacity, sizeof *record->mark);

        if (grown == NULL)
            return ZBP_ENOMEM;
        record->mark = grown;
    }
    record->mark[record->mark_count++] = (zbp_mark){.time_ns = time_ns,
                                                    .serial = serial,
                                                    .events = record->event_count,
                                                    .live = record->live,
                                                    .span.peak = record->live,
                                                    .thread = thread};
    return ZBP_OK;
}

int zbp_record_init(zbp_record *record, uint64_t time_ns, uint64_t serial, uint32_t thread,
                    uint64_t max_events, const zbp_alloc *alloc)
{
    int status;

    memset(record, 0, sizeof *record);
    record->alloc = zbpi_alloc_copy(alloc);
    record->first_serial = serial;
    record->max_events = max_events;
    status = add_mark(record, time_ns, serial, thread);
    if (status != ZBP_OK)
        memset(record, 0, sizeof *record);
    return status;
}

void zbp_record_fini(zbp_record *record)
{
    for (uint64_t c = 0; c * ZBP_EVENTS_PER_CHUNK < record->event_count; c++)
        zbpi_free(&record->alloc, record->chunk[c], ZBP_EVENTS_PER_CHUNK * sizeof(zbp_event));
    zbpi_free(&record->alloc, record->chunk, record->chunk_capacity * sizeof *record->chunk);
    zbpi_free(&record->alloc, record->mark, record->mark_capacity * sizeof *record->mark);
    memset(record, 0, sizeof *record);
}

void zbp_record_alloc(zbp_record *record, uint64_t time_ns, uint32_t thread, zbp_block block)
{
    record->live += block.bytes;
    span_alloc(&record->total, block.bytes, record->live);
    span_alloc(open_span(record), block.bytes, record->live);
    log_event(record, time_ns, thread, block, ZBP_EVENT_ALLOC);
}

void zbp_record_free(zbp_record *record, uint64_t time_ns, uint32_t thread, zbp_block block)
{
    if (block.serial < record->first_serial) {
        zbp_record_free_older(record, time_ns, thread, block);
        return;
    }
    record->live -= block.bytes;
    span_free(&record->total, block.bytes);
    span_free(open_span(record), block.bytes);
    log_event(record, time_ns, thread, block, ZBP_EVENT_FREE);
}

void zbp_record_free_older(zbp_record *record, uint64_t time_ns, uint32_t thread, zbp_block block)
{
    record->older_frees++;
    record->older_freed += block.bytes;
    log_event(record, time_ns, thread, block, ZBP_EVENT_FREE_OLDER);
}

void zbp_record_untracked(zbp_record *record)
{
    record->untracked++;
}

int zbp_record_mark(zbp_record *record, uint64_t time_ns, uint64_t serial, uint32_t thread,
                    uint32_t *index_out)
{
    int status = add_mark(record, time_ns, serial, thread);

    if (status == ZBP_OK)
        *index_out = record->mark_count - 1;
    return status;
}

const zbp_event *zbp_record_event(const zbp_record *record, uint64_t i)
{
    return &record->chunk[i / ZBP_EVENTS_PER_CHUNK][i % ZBP_EVENTS_PER_CHUNK];
}

/* Of events 0 to i, the number of the latest that handed out a block; event_count if none did. */
static uint64_t latest_alloc(const zbp_record *record, uint64_t i)
{
    uint64_t since;

    while ((since = zbp_record_event(record, i)->since_alloc) != 0) {
        if (since > i)
            return record->event_count;
        i -= since;
    }
    return i;
}

/* The number of the event that handed out the block with this serial; event_count if the log has none.
 * Those that hand out have ascending serials: looks for the first event that has it behind it. */
static uint64_t find_alloc(const zbp_record *record, uint64_t serial)
{
    uint64_t low = 0, high = record->event_count;

    while (low < high) {
        uint64_t middle = low + (high - low) / 2, latest = latest_alloc(record, middle);

        if (latest == record->event_count ||
            zbp_record_event(record, latest)->block.serial < serial)
            low = middle + 1;
        else
            high = latest;
    }
    return low < record->event_count && zbp_record_event(record, low)->kind == ZBP_EVENT_ALLOC &&
                   zbp_record_event(record, low)->block.serial == serial
               ? low
               : record->event_count;
}

static bool is_from(const zbp_record *record, uint64_t i, const zbp_range *range, size_t count)
{
    if (i == record->event_count)
        return false;
    for (size_t r = 0; r < count; r++) {
        const zbp_mark *begin = &record->mark[range[r].begin];

        if (begin->events <= i && i < record->mark[range[r].end].events &&
            begin->thread == zbp_record_event(record, i)->thread)
            return true;
    }
    return false;
}

static bool is_range(const zbp_record *record, zbp_range range)
{
    return range.begin <= range.end && range.end < record->mark_count;
}

int zbp_record_held(const zbp_record *record, uint32_t at, zbp_range range, const zbp_range *other,
                    size_t other_count, uint64_t *bytes_out)
{
    uint64_t bytes = 0;

    if (at > range.begin || !is_range(record, range))
        return ZBP_EINVAL;
    for (size_t r = 0; r < other_count; r++)
        if (!is_range(record, other[r]))
            return ZBP_EINVAL;
    for (uint64_t i = record->mark[range.begin].events; i < record->mark[range.end].events; i++) {
        const zbp_event *event = zbp_record_event(record, i);

        if (event->kind == ZBP_EVENT_FREE && event->block.serial < record->mark[at].serial &&
            (other_count == 0 ||
             !is_from(record, find_alloc(record, event->block.serial), other, other_count)))
            bytes += event->block.bytes;
    }
    *bytes_out = bytes;
    return ZBP_OK;
}
