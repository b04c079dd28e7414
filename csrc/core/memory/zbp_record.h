/* zbp_record.h - what one recording of an allocator has seen: counters, marks and a log.
 *
 * The counters are exact whatever happens. Marks cut the recording into spans and carry what each
 * span saw, so that the peak between any two marks needs no log. The log has an event per block that
 * was handed out or taken back; it is bounded, and what does not fit or finds no memory is counted
 * as dropped.
 *
 * A block is the recording's own if it was handed out since the recording began; "live" counts those
 * alone. Blocks that were there before and are taken back meanwhile are counted apart, as older.
 *
 * Invariant: live == allocated - freed; there is always a mark 0, made at the beginning; the last
 * mark's span is open. Allocation: an array of marks and chunks of the log, which never move.
 * Threads: one at a time; a tally has a lock (zbp_tally.h). Times are given by the caller, in ns.
 */
#ifndef ZBP_RECORD_H
#define ZBP_RECORD_H

#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_alloc.h"
#include "core/memory/zbp_blocks.h"
#include "core/base/zbp_status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ZBP_EVENT_ALLOC, ZBP_EVENT_FREE, ZBP_EVENT_FREE_OLDER };
enum { ZBP_EVENTS_PER_CHUNK = 1 << 14, ZBP_SINCE_MOST = (1 << 30) - 1 };

typedef struct zbp_event {
    uint64_t time_ns;
    zbp_block block;
    uint32_t thread;
    uint32_t kind : 2; /* ZBP_EVENT_* */
    /* How many events ago the latest block was handed out: 0 for one that does, more than there are if none
     * was; ZBP_SINCE_MOST also for more, and then the event that many ago says on. */
    uint32_t since_alloc : 30;
} zbp_event;

typedef struct zbp_span {
    uint64_t peak;             /* the most live bytes, those at its beginning included */
    uint64_t allocated, freed; /* bytes */
    uint64_t allocations, frees;
} zbp_span;

typedef struct zbp_mark {
    uint64_t time_ns;
    uint64_t serial; /* of the next block: those handed out before have smaller ones */
    uint64_t events; /* logged before it */
    uint64_t live;
    zbp_span span; /* from this mark to the next */
    uint32_t thread;
} zbp_mark;

/* All fields are for reading alone. Zeroed is legal for zbp_record_fini alone. */
typedef struct zbp_record {
    uint64_t first_serial;
    uint64_t live;
    zbp_span total;
    uint64_t older_frees, older_freed; /* blocks, bytes */
    uint64_t dropped;                  /* events that a log had no room for */
    uint64_t untracked;                /* blocks that could not be followed; not in any number */
    uint64_t event_count, max_events;
    zbp_event **chunk;
    uint32_t chunk_capacity;
    zbp_mark *mark;
    uint32_t mark_count, mark_capacity;
    zbp_alloc alloc;
} zbp_record;

/* Begins a recording at time_ns, when `serial` blocks have been handed out: makes mark 0. max_events
 * bounds the log; 0: no log. alloc is copied; NULL is libc.
 * Error: ZBP_ENOMEM; the record is then zeroed. */
ZBP_MUST_USE int zbp_record_init(zbp_record *record, uint64_t time_ns, uint64_t serial,
                                 uint32_t thread, uint64_t max_events, const zbp_alloc *alloc);

/* Frees all. A zeroed record is legal. */
void zbp_record_fini(zbp_record *record);

/* A block was handed out, taken back. Cannot fail: what the log has no room for is dropped.
 * free_older: one that is known to be older, whatever its serial says. */
void zbp_record_alloc(zbp_record *record, uint64_t time_ns, uint32_t thread, zbp_block block);
void zbp_record_free(zbp_record *record, uint64_t time_ns, uint32_t thread, zbp_block block);
void zbp_record_free_older(zbp_record *record, uint64_t time_ns, uint32_t thread, zbp_block block);

/* A block was handed out that could not be followed. */
void zbp_record_untracked(zbp_record *record);

/* Ends the last span and begins one; *index_out is the mark's number.
 * Errors, the record unchanged: ZBP_ENOMEM, ZBP_EOVERFLOW (2^32 marks). */
ZBP_MUST_USE int zbp_record_mark(zbp_record *record, uint64_t time_ns, uint64_t serial,
                                 uint32_t thread, uint32_t *index_out);

/* Event number i of the log. Borrowed until zbp_record_fini. Precondition: i < event_count. */
const zbp_event *zbp_record_event(const zbp_record *record, uint64_t i);

/* From mark `begin` to mark `end`, on the thread that made `begin`. */
typedef struct zbp_range {
    uint32_t begin, end;
} zbp_range;

/* *bytes_out: of the own blocks that were live at mark `at` and taken back from mark range.begin to
 * range.end, on whatever thread, as far as the log goes; but for those that were handed out within one
 * of the ranges other[0..other_count) (borrowed), on its thread.
 * Error: ZBP_EINVAL (no such marks, or not at <= range.begin, or a range that ends before it begins).
 * O(n) for n events in the range; with other_count > 0 O(n (log events + other_count)). */
ZBP_MUST_USE int zbp_record_held(const zbp_record *record, uint32_t at, zbp_range range,
                                 const zbp_range *other, size_t other_count, uint64_t *bytes_out);

#ifdef __cplusplus
}
#endif

#endif
