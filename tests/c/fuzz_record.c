/* Any bytes are what an allocator does while recordings begin and end; these must say what a naive model says, also when an
 * allocation fails.
 *
 * The model keeps everything that happened, in order, and of each record where it began and ended; each number is
 * then counted again from the beginning.
 *
 * The bytes: [0] the allocation that fails, modulo 32 (0: none), then three each: what happens, and two that say to what.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "counting.h"
#include "fuzz.h"
#include "instruments/core/zbp_record.h"

const uint32_t fuzz_longest = 3001;

enum { MODEL_ADDRESSES = 1024, MODEL_RECORDS = 4, MODEL_STEPS = 4000 };

typedef struct model_event {
    uint32_t kind; /* ZBP_EVENT_*; 3: a block that could not be followed */
    uint64_t bytes, serial;
} model_event;

typedef struct model_record {
    zbp_record record;
    size_t first, last; /* events; until it has ended it goes on */
    uint64_t first_serial;
    bool is_fed;
} model_record;

typedef struct record_model {
    zbp_tally tally;
    model_event event[2 * MODEL_STEPS];
    size_t event_count;
    uint64_t bytes_at[MODEL_ADDRESSES], serial_at[MODEL_ADDRESSES];
    bool is_used[MODEL_ADDRESSES];
    uint64_t next_serial;
    model_record record[MODEL_RECORDS];
    const char *fault;
} record_model;

static uint64_t record_model_clock(void)
{
    static _Thread_local uint64_t ticks;

    return ++ticks;
}

static void record_model_expect(record_model *m, bool is_so, const char *what)
{
    if (!is_so && m->fault == NULL)
        m->fault = what;
}

/* An allocation may fail only where one was told to. */
static bool record_model_went_well(record_model *m, int status)
{
    record_model_expect(m, status == ZBP_OK || (status == ZBP_ENOMEM && count.fail_once >= 0),
                        "a status out of nowhere");
    return status == ZBP_OK;
}

static void record_model_note(record_model *m, uint32_t kind, uint64_t bytes, uint64_t serial)
{
    m->event[m->event_count++] = (model_event){kind, bytes, serial};
}

static void record_model_alloc(record_model *m, uint32_t place, uint64_t bytes)
{
    if (!record_model_went_well(m, zbp_tally_alloc(&m->tally, (place + 1) * 64u, bytes, bytes + 1)
                                       ? ZBP_OK
                                       : ZBP_ENOMEM)) {
        record_model_note(m, 3, bytes, 0);
        return;
    }
    if (m->is_used[place])
        record_model_note(m, ZBP_EVENT_FREE, m->bytes_at[place], m->serial_at[place]);
    m->is_used[place] = true;
    m->bytes_at[place] = bytes;
    m->serial_at[place] = m->next_serial++;
    record_model_note(m, ZBP_EVENT_ALLOC, bytes, m->serial_at[place]);
}

static void record_model_free(record_model *m, uint32_t place)
{
    zbp_tally_free(&m->tally, (place + 1) * 64u);
    if (m->is_used[place])
        record_model_note(m, ZBP_EVENT_FREE, m->bytes_at[place], m->serial_at[place]);
    m->is_used[place] = false;
}

/* The record's numbers against all that happened while it was fed. */
static void record_model_compare(record_model *m, model_record *mine)
{
    const size_t last = mine->is_fed ? m->event_count : mine->last;
    const zbp_record *got = &mine->record;
    zbp_record wanted = {0};
    zbp_mark sum = {0}, total = {0};
    uint64_t logged = 0, next;

    for (size_t i = mine->first; i < last; i++) {
        const model_event *event = &m->event[i];
        uint32_t kind = event->kind;

        if (kind == 3) {
            wanted.untracked++;
            continue;
        }
        if (kind == ZBP_EVENT_ALLOC) {
            sum.allocations++;
            sum.allocated += event->bytes;
            wanted.live += event->bytes;
        } else if (event->serial >= mine->first_serial) {
            sum.frees++;
            sum.freed += event->bytes;
            wanted.live -= event->bytes;
        } else {
            kind = ZBP_EVENT_FREE_OLDER;
        }
        if (wanted.live > sum.peak)
            sum.peak = wanted.live;
        if (logged < got->event_count) {
            record_model_expect(m, got->event[logged].block.serial == event->serial,
                                "a record's log");
            record_model_expect(m, got->event[logged].block.trace == event->bytes + 1,
                                "where a block comes from");
            record_model_expect(m, got->event[logged].kind == kind, "an event's kind");
            record_model_expect(m, got->event[logged].time_ns > got->mark[0].time_ns,
                                "time runs backwards");
        }
        logged++;
    }
    for (uint32_t i = 0; i < got->mark_count; i++) {
        total.allocations += got->mark[i].allocations;
        total.allocated += got->mark[i].allocated;
        total.frees += got->mark[i].frees;
        total.freed += got->mark[i].freed;
        total.peak = got->mark[i].peak > total.peak ? got->mark[i].peak : total.peak;
        next = i + 1 < got->mark_count ? got->mark[i + 1].live : got->live;
        record_model_expect(m,
                            got->mark[i].live + got->mark[i].allocated - got->mark[i].freed == next,
                            "a span's bytes do not lead to the next mark");
        record_model_expect(m, got->mark[i].peak >= got->mark[i].live && got->mark[i].peak >= next,
                            "a span's peak is lower than its ends");
    }
    record_model_expect(m, memcmp(&total, &sum, sizeof sum) == 0, "a record's spans");
    record_model_expect(m, got->first_serial == mine->first_serial, "a record's first serial");
    record_model_expect(m, got->live == wanted.live, "a record's live bytes");
    record_model_expect(m, got->untracked == wanted.untracked, "a record's untracked blocks");
    record_model_expect(m, got->event_count + got->dropped == logged,
                        "a record's number of events");
}

static void record_model_start_or_stop(record_model *m, model_record *mine)
{
    if (mine->is_fed) {
        (void)zbp_tally_stop(&m->tally, &mine->record);
        mine->is_fed = false;
        mine->last = m->event_count;
        return;
    }
    zbp_record_fini(&mine->record);
    *mine = (model_record){.first = m->event_count, .last = m->event_count};
    mine->is_fed = record_model_went_well(m, zbp_tally_start(&m->tally, &mine->record, UINT64_MAX));
    mine->first_serial = mine->is_fed ? m->next_serial : 0;
}

static void record_model_mark(record_model *m, model_record *mine)
{
    uint32_t index = 0;

    if (mine->is_fed && record_model_went_well(m, zbp_tally_mark(&m->tally, &mine->record, &index)))
        record_model_expect(m, index == mine->record.mark_count - 1, "a mark's number");
}

static void record_model_look(record_model *m)
{
    size_t used = 0;

    record_model_expect(m, zbp_tally_serial(&m->tally) == m->next_serial, "the next serial");
    for (uint32_t place = 0; place < MODEL_ADDRESSES; place++)
        used += m->is_used[place];
    record_model_expect(m, used == m->tally.blocks.count, "how many blocks are in use");
    for (uint32_t r = 0; r < MODEL_RECORDS; r++)
        if (m->record[r].record.mark_count != 0)
            record_model_compare(m, &m->record[r]);
}

static void record_model_step(record_model *m, uint8_t what, uint8_t high, uint8_t low)
{
    const uint32_t of = (uint32_t)high << 8 | low, place = of % MODEL_ADDRESSES;
    model_record *record = &m->record[of % MODEL_RECORDS];

    what %= 16;
    if (what == 0) {
        record_model_start_or_stop(m, record);
    } else if (what == 1) {
        record_model_mark(m, record);
    } else if (what == 2) {
        zbp_tally_untracked(&m->tally);
        record_model_note(m, 3, 0, 0);
    } else if (what < 9) {
        record_model_free(m, place);
    } else {
        record_model_alloc(m, place, of * 3u);
    }
}

/* NULL, or a static string: what differs. */
static const char *record_model_run(const uint8_t *data, size_t size)
{
    static _Thread_local record_model m;
    size_t i = 1;

    memset(&m, 0, sizeof m);
    counting_begin(size > 0 ? (long)(data[0] % 32) - 1 : -1);
    zbp_tally_init(&m.tally, record_model_clock);
    for (size_t steps = 0; m.fault == NULL && i + 3 <= size && steps < MODEL_STEPS;
         steps++, i += 3) {
        record_model_step(&m, data[i], data[i + 1], data[i + 2]);
        if (steps % 64 == 0)
            record_model_look(&m);
    }
    record_model_look(&m);
    zbp_tally_fini(&m.tally);
    for (uint32_t r = 0; r < MODEL_RECORDS; r++)
        zbp_record_fini(&m.record[r].record);
    record_model_expect(&m, count.live == 0, "what was allocated is not freed");
    return m.fault;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *fault = record_model_run(data, size);

    if (fault != NULL) {
        fprintf(stderr, "fuzz_record: %s\n", fault);
        abort();
    }
    return 0;
}
