/* zbp_record.h - what recordings of one allocator have seen: counters, marks and a log each, fed by
 * any thread from one table of the blocks in use.
 *
 * Every block that is handed out gets a serial, one more than the one before, and goes into the
 * table (zbp_tally). The table outlives the recordings: a block may be taken back when others are
 * fed, or none. A block is a recording's own if it was handed out since the recording began; "live"
 * counts those alone, and only the log tells of older ones that are taken back.
 *
 * Marks cut a recording into spans and carry what each span saw. Counters and marks are exact
 * whatever happens. The log is bounded: what does not fit or finds no memory is counted as dropped,
 * and the log stays a prefix.
 *
 * Allocation: the table, marks, the log. Threads: any, at once, but for init and fini. The lock is
 * a leaf: nothing is called under it that takes another. The clock is read under it, so that no log
 * runs backwards; threads get small numbers, from 1.
 */
#pragma once

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_c.h"
#include "instruments/core/zbp_blocks.h"

ZBP_BEGIN_C

enum { ZBP_EVENT_ALLOC, ZBP_EVENT_FREE, ZBP_EVENT_FREE_OLDER };

/* As Python gets it: struct "QQQQQII". */
typedef struct zbp_event {
    uint64_t time_ns;
    zbp_block block;
    uint32_t thread, kind;
} zbp_event;

/* A moment; from `peak` on, what was seen from it to the next one. */
typedef struct zbp_mark {
    uint64_t time_ns;
    uint64_t events;           /* logged before it */
    uint64_t live;             /* bytes */
    uint64_t peak;             /* the most live bytes, those at its beginning included */
    uint64_t allocated, freed; /* bytes */
    uint64_t allocations, frees;
    uint32_t thread;
} zbp_mark;

/* Held by the caller; all fields are for reading alone, under the lock while it is fed. Zeroed is
 * legal for zbp_record_fini alone. Invariant: mark 0 is the beginning; the last mark's span is
 * open. */
typedef struct zbp_record {
    uint64_t first_serial;
    uint64_t live;
    uint64_t dropped;    /* events that a log had no room for */
    uint64_t untracked;  /* blocks that could not be followed; in no other number */
    uint64_t max_events; /* 0: no log */
    zbp_event *event;
    zbp_mark *mark;
    uint32_t event_count, event_capacity, mark_count, mark_capacity;
    struct zbp_record *next; /* that is fed, too */
} zbp_record;

/* Held by the caller; fields are for reading alone, under the lock. */
typedef struct zbp_tally {
    pthread_mutex_t lock;
    zbp_blocks blocks; /* in use; all serials are below next_serial */
    uint64_t next_serial;
    zbp_record *fed; /* the first of them; borrowed */
    uint64_t (*clock)(void);
    size_t
        block_count; /* of blocks: to be read without the lock, as is whether any record is fed */
} zbp_tally;

/* clock: nanoseconds, which never go back; takes no lock. */
void zbp_tally_init(zbp_tally *tally, uint64_t (*clock)(void));
void zbp_tally_fini(zbp_tally *tally); /* nobody uses it any more; records are left as they are */

/* Begins a record (uninitialised; borrowed until zbp_tally_stop) and feeds it from now on.
 * Error, the record zeroed: ZBP_ENOMEM. */
ZBP_MUST_USE int zbp_tally_start(zbp_tally *tally, zbp_record *record, uint64_t max_events);
/* Feeds it no more; nothing happens if it was not fed. True if now none is fed. */
bool zbp_tally_stop(zbp_tally *tally, zbp_record *record);
/* Whether some record is fed: whoever sees that sees what was done before it was started. */
bool zbp_tally_is_fed(const zbp_tally *tally);
/* Ends the last span of a record that is fed and begins one; *index_out is the mark's number.
 * ZBP_ENOMEM, the record unchanged. */
ZBP_MUST_USE int zbp_tally_mark(zbp_tally *tally, zbp_record *record, uint32_t *index_out);

/* A block was handed out. One that the table has at its address was taken back unseen: that is
 * told first. False, and it is counted as untracked, if it has no address or there is no memory to
 * follow it. */
bool zbp_tally_alloc(zbp_tally *tally, uint64_t address, uint64_t bytes, uint64_t trace);
/* One was handed out that cannot be followed. */
void zbp_tally_untracked(zbp_tally *tally);
/* A block is taken back: to be called before another thread may be given its address. Of one that
 * was not followed nothing is told. */
void zbp_tally_free(zbp_tally *tally, uint64_t address);

/* The number of the next block: those that are handed out from now on have it or a larger one. */
uint64_t zbp_tally_serial(zbp_tally *tally);

/* While held, no record is fed: for reading one, or the blocks in use, and for a fork. */
void zbp_tally_lock(zbp_tally *tally);
void zbp_tally_unlock(zbp_tally *tally);

/* Frees all that a record holds which is not fed. A zeroed record is legal. */
void zbp_record_fini(zbp_record *record);

ZBP_END_C
