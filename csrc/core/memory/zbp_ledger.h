/* zbp_ledger.h - many recordings of one allocator, fed from one table of the blocks that are in use.
 *
 * Every block that is handed out gets a serial, one more than the one before, and goes into the table; so
 * that when it is taken back each recording can tell whether it is its own. The table outlives the
 * recordings: a block may be taken back when others are fed, or none.
 *
 * Invariant: addresses and serials in the table are unique, serials are below next_serial; of each record
 * that is being fed, the live blocks are those in the table with serials from its first on.
 * Allocation: the table, an array of pointers, and what the records hold. Threads: one at a time; zbp_tally.h
 * has a lock. Times and threads are the caller's to know, and go into the logs as they are given.
 */
#ifndef ZBP_LEDGER_H
#define ZBP_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_alloc.h"
#include "core/base/zbp_status.h"
#include "core/memory/zbp_blocks.h"
#include "core/memory/zbp_record.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Held by the caller; all fields are for reading alone. Zeroed is legal: an empty ledger. */
typedef struct zbp_ledger {
    zbp_blocks blocks; /* in use */
    uint64_t next_serial;
    zbp_record **record; /* being fed; borrowed */
    uint32_t record_count, record_capacity;
    zbp_alloc alloc;
} zbp_ledger;

/* Makes an empty ledger; allocates nothing. alloc is copied; NULL is libc. */
void zbp_ledger_init(zbp_ledger *ledger, const zbp_alloc *alloc);

/* Frees what the ledger holds and zeroes it; records are left as they are, and fed no more. A zeroed ledger is
 * legal. */
void zbp_ledger_fini(zbp_ledger *ledger);

/* Begins `record` (uninitialised; borrowed until zbp_ledger_stop, the caller's to finish after that) and feeds
 * it from now on. max_events: as zbp_record_init's.
 * Error, the ledger unchanged and the record zeroed: ZBP_ENOMEM. */
ZBP_MUST_USE int zbp_ledger_start(zbp_ledger *ledger, zbp_record *record, uint64_t time_ns,
                                  uint32_t thread, uint64_t max_events);

/* Feeds the record no more. Nothing happens if it was not fed. O(records). */
void zbp_ledger_stop(zbp_ledger *ledger, zbp_record *record);

/* Marks a record that is being fed. Errors as zbp_record_mark's. */
ZBP_MUST_USE int zbp_ledger_mark(const zbp_ledger *ledger, zbp_record *record, uint64_t time_ns,
                                 uint32_t thread, uint32_t *index_out);

/* A block was handed out. One that the table has at its address was taken back unseen: that is told first.
 * Errors, the ledger unchanged and no serial used up: ZBP_EINVAL (address 0), ZBP_ENOMEM, ZBP_EOVERFLOW; the
 * caller then says so by zbp_ledger_untracked, or not. O(records), amortised. */
ZBP_MUST_USE int zbp_ledger_alloc(zbp_ledger *ledger, uint64_t time_ns, uint32_t thread,
                                  uint64_t address, uint64_t bytes);

/* The block at this address was taken back: *block_out (may be NULL). False, nothing told and *block_out as it was, if
 * the table has none. O(records) on average. */
bool zbp_ledger_free(zbp_ledger *ledger, uint64_t time_ns, uint32_t thread, uint64_t address,
                     zbp_block *block_out);

/* A block was handed out that could not be followed: in each record that is being fed it is counted, no more. */
void zbp_ledger_untracked(zbp_ledger *ledger);

/* The blocks in use with serials from `since` on, in that order, to block_out[], which the caller has made for
 * ledger->blocks.count of them. Returns how many there are. O(slots + n log n) for n of them. */
size_t zbp_ledger_since(const zbp_ledger *ledger, uint64_t since, zbp_block *block_out);

#ifdef __cplusplus
}
#endif

#endif
