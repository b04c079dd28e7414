/* ledger_model.h - any bytes are what an allocator does while recordings begin and end; the ledger must say what a
 * naive model says, also when an allocation fails.
 *
 * The model keeps everything that happened, in order, and of each record where it began and ended; each number is
 * then counted again from the beginning.
 *
 * The bytes: [0] the allocation that fails (0: none), then three each: what happens, and two that say to what.
 */
#ifndef BOOKS_MODEL_H
#define BOOKS_MODEL_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "checks.h"
#include "counting.h"
#include "core/memory/zbp_ledger.h"

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

typedef struct ledger_model {
    zbp_ledger ledger;
    model_event event[2 * MODEL_STEPS];
    size_t event_count;
    uint64_t bytes_at[MODEL_ADDRESSES], serial_at[MODEL_ADDRESSES];
    bool is_used[MODEL_ADDRESSES];
    uint64_t next_serial, time_ns;
    model_record record[MODEL_RECORDS];
    counting count;
    const char *fault;
} ledger_model;

static inline void ledger_model_expect(ledger_model *m, bool is_so, const char *what)
{
    if (!is_so && m->fault == NULL)
        m->fault = what;
}

/* An allocation may fail only where one was told to. */
static inline bool ledger_model_went_well(ledger_model *m, int status)
{
    ledger_model_expect(m, status == ZBP_OK || (status == ZBP_ENOMEM && m->count.fail_once >= 0),
                        "a status out of nowhere");
    return status == ZBP_OK;
}

static inline void ledger_model_note(ledger_model *m, uint32_t kind, uint64_t bytes,
                                     uint64_t serial)
{
    m->event[m->event_count++] = (model_event){kind, bytes, serial};
}

static inline void ledger_model_alloc(ledger_model *m, uint32_t place, uint64_t bytes)
{
    if (!ledger_model_went_well(
            m, zbp_ledger_alloc(&m->ledger, m->time_ns, 1, (place + 1) * 64u, bytes))) {
        zbp_ledger_untracked(&m->ledger);
        ledger_model_note(m, 3, bytes, 0);
        return;
    }
    if (m->is_used[place])
        ledger_model_note(m, ZBP_EVENT_FREE, m->bytes_at[place], m->serial_at[place]);
    m->is_used[place] = true;
    m->bytes_at[place] = bytes;
    m->serial_at[place] = m->next_serial++;
    ledger_model_note(m, ZBP_EVENT_ALLOC, bytes, m->serial_at[place]);
}

static inline void ledger_model_free(ledger_model *m, uint32_t place)
{
    zbp_block block = {0};
    bool is_known = zbp_ledger_free(&m->ledger, m->time_ns, 1, (place + 1) * 64u, &block);

    ledger_model_expect(m, is_known == m->is_used[place], "which blocks are known");
    ledger_model_expect(
        m, !is_known || (block.serial == m->serial_at[place] && block.bytes == m->bytes_at[place]),
        "which block was freed");
    if (m->is_used[place])
        ledger_model_note(m, ZBP_EVENT_FREE, m->bytes_at[place], m->serial_at[place]);
    m->is_used[place] = false;
}

/* The record's numbers against all that happened while it was fed. */
static inline void ledger_model_compare(ledger_model *m, model_record *mine)
{
    const size_t last = mine->is_fed ? m->event_count : mine->last;
    zbp_record wanted = {0};
    uint64_t logged = 0;

    for (size_t i = mine->first; i < last; i++) {
        const model_event *event = &m->event[i];

        if (event->kind == 3) {
            wanted.untracked++;
            continue;
        }
        if (event->kind == ZBP_EVENT_ALLOC) {
            wanted.total.allocations++;
            wanted.total.allocated += event->bytes;
            wanted.live += event->bytes;
        } else if (event->serial >= mine->first_serial) {
            wanted.total.frees++;
            wanted.total.freed += event->bytes;
            wanted.live -= event->bytes;
        } else {
            wanted.older_frees++;
            wanted.older_freed += event->bytes;
        }
        if (wanted.live > wanted.total.peak)
            wanted.total.peak = wanted.live;
        if (logged < mine->record.event_count)
            ledger_model_expect(
                m, zbp_record_event(&mine->record, logged)->block.serial == event->serial,
                "a record's log");
        logged++;
    }
    ledger_model_expect(m, mine->record.first_serial == mine->first_serial,
                        "a record's first serial");
    ledger_model_expect(m, mine->record.live == wanted.live, "a record's live bytes");
    ledger_model_expect(m, memcmp(&mine->record.total, &wanted.total, sizeof wanted.total) == 0,
                        "a record's totals");
    ledger_model_expect(m,
                        mine->record.older_frees == wanted.older_frees &&
                            mine->record.older_freed == wanted.older_freed,
                        "a record's older blocks");
    ledger_model_expect(m, mine->record.untracked == wanted.untracked,
                        "a record's untracked blocks");
    ledger_model_expect(m, mine->record.event_count + mine->record.dropped == logged,
                        "a record's number of events");
}

static inline void ledger_model_start_or_stop(ledger_model *m, model_record *mine)
{
    if (mine->is_fed) {
        zbp_ledger_stop(&m->ledger, &mine->record);
        mine->is_fed = false;
        mine->last = m->event_count;
        return;
    }
    zbp_record_fini(&mine->record);
    *mine = (model_record){.first = m->event_count, .last = m->event_count};
    mine->is_fed = ledger_model_went_well(
        m, zbp_ledger_start(&m->ledger, &mine->record, m->time_ns, 1, UINT64_MAX));
    mine->first_serial = mine->is_fed ? m->next_serial : 0;
}

static inline void ledger_model_mark(ledger_model *m, model_record *mine)
{
    uint32_t index = 0;

    if (mine->is_fed && ledger_model_went_well(
                            m, zbp_ledger_mark(&m->ledger, &mine->record, m->time_ns, 1, &index)))
        ledger_model_expect(m,
                            index == mine->record.mark_count - 1 &&
                                mine->record.mark[index].serial == m->next_serial,
                            "a mark's number and serial");
}

/* A walk over all serials, each looked for everywhere, is in order by itself. */
static inline void ledger_model_since(ledger_model *m, uint64_t since)
{
    static _Thread_local zbp_block got[MODEL_ADDRESSES];
    size_t used = 0, count, i = 0;

    for (uint32_t place = 0; place < MODEL_ADDRESSES; place++)
        used += m->is_used[place];
    ledger_model_expect(m, used == m->ledger.blocks.count, "how many blocks are in use");
    if (used != m->ledger.blocks.count)
        return;
    count = zbp_ledger_since(&m->ledger, since, got);
    for (uint64_t serial = since; serial < m->next_serial; serial++)
        for (uint32_t place = 0; place < MODEL_ADDRESSES; place++)
            if (m->is_used[place] && m->serial_at[place] == serial) {
                ledger_model_expect(m,
                                    i < count && got[i].serial == serial &&
                                        got[i].address == (place + 1) * 64u &&
                                        got[i].bytes == m->bytes_at[place],
                                    "the blocks since a serial");
                i++;
            }
    ledger_model_expect(m, i == count, "the number of blocks since a serial");
}

static inline void ledger_model_look(ledger_model *m)
{
    const char *reason = NULL;

    if (zbp_ledger_check(&m->ledger, &reason) != ZBP_OK)
        ledger_model_expect(m, false, reason);
    ledger_model_expect(m, m->ledger.next_serial == m->next_serial, "the next serial");
    for (uint32_t r = 0; r < MODEL_RECORDS; r++)
        if (m->record[r].record.mark_count != 0)
            ledger_model_compare(m, &m->record[r]);
}

static inline void ledger_model_step(ledger_model *m, uint8_t what, uint8_t high, uint8_t low)
{
    const uint32_t of = (uint32_t)high << 8 | low, place = of % MODEL_ADDRESSES;
    model_record *record = &m->record[of % MODEL_RECORDS];

    m->time_ns++;
    switch (what % 16) {
    case 0:
        ledger_model_start_or_stop(m, record);
        break;
    case 1:
        ledger_model_mark(m, record);
        break;
    case 2:
        ledger_model_since(m, m->next_serial -
                                  (m->next_serial < of % 300 ? m->next_serial : of % 300));
        break;
    case 3:
        zbp_ledger_untracked(&m->ledger);
        ledger_model_note(m, 3, 0, 0);
        break;
    case 4:
    case 5:
    case 6:
    case 7:
    case 8:
        ledger_model_free(m, place);
        break;
    default:
        ledger_model_alloc(m, place, of * 3u);
        break;
    }
}

/* NULL, or a static string: what differs. */
static inline const char *ledger_model_run(const uint8_t *data, size_t size)
{
    static _Thread_local ledger_model m;
    zbp_alloc alloc;
    size_t i = 1;

    memset(&m, 0, sizeof m);
    alloc = counting_alloc(&m.count);
    m.count.fail_once = size > 0 ? (long)data[0] - 1 : -1;
    zbp_ledger_init(&m.ledger, &alloc);
    for (size_t steps = 0; m.fault == NULL && i + 3 <= size && steps < MODEL_STEPS;
         steps++, i += 3) {
        ledger_model_step(&m, data[i], data[i + 1], data[i + 2]);
        if (steps % 64 == 0)
            ledger_model_look(&m);
    }
    ledger_model_look(&m);
    zbp_ledger_fini(&m.ledger);
    for (uint32_t r = 0; r < MODEL_RECORDS; r++)
        zbp_record_fini(&m.record[r].record);
    ledger_model_expect(&m, m.count.live == 0, "what was allocated is not freed");
    return m.fault;
}

#endif
