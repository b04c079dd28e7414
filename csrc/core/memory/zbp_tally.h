/* zbp_tally.h - a ledger that any thread feeds: what an allocator's tap (zbp_tap.h) sees, and what the runs of a
 * collector on a thread have freed.
 *
 * Allocation: the ledger's, and the lists that are handed out. Threads: any, at once, but for init and fini; the lock
 * is a leaf: nothing is called under it that takes another. The clock is read under it, so that no log runs
 * backwards, and threads get small numbers, from 1.
 */
#ifndef ZBP_TALLY_H
#define ZBP_TALLY_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/memory/zbp_ledger.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Held by the caller; fields are no one's to touch. */
typedef struct zbp_tally {
    pthread_mutex_t lock;
    zbp_ledger ledger;
    uint64_t (*clock)(void);
    /* To be read without the lock: */
    size_t block_count; /* in use */
    uint64_t watchers;  /* changes when nobody wants to know any more what collections free */
    bool is_fed;        /* some record is */
} zbp_tally;

/* Blocks, the caller's: zbp_block_list_fini(), or free(block) where the allocator is libc's. Zeroed is empty. */
typedef struct zbp_block_list {
    zbp_block *block;
    size_t count, capacity;
    zbp_alloc alloc;
} zbp_block_list;

void zbp_block_list_fini(zbp_block_list *list);

/* clock: the time in nanoseconds, which never goes back; takes no lock. alloc is copied; NULL is libc. */
void zbp_tally_init(zbp_tally *tally, uint64_t (*clock)(void), const zbp_alloc *alloc);
void zbp_tally_fini(zbp_tally *tally); /* nobody uses it any more */

/* Begins a record, as zbp_ledger_start(). */
ZBP_MUST_USE int zbp_tally_start(zbp_tally *tally, zbp_record *record, uint64_t max_events);
/* Feeds it no more. True if now none is fed. */
bool zbp_tally_stop(zbp_tally *tally, zbp_record *record);
/* Whether some record is fed: whoever sees that sees what was done before it was started. */
bool zbp_tally_is_fed(const zbp_tally *tally);
/* As zbp_ledger_mark(). */
ZBP_MUST_USE int zbp_tally_mark(zbp_tally *tally, zbp_record *record, uint32_t *index_out);

/* A block was handed out. False, and it is counted as untracked, if there is no memory to follow it: nobody will know
 * it when it is taken back. */
bool zbp_tally_alloc(zbp_tally *tally, uint64_t address, uint64_t bytes);
/* One was handed out that cannot be followed. */
void zbp_tally_untracked(zbp_tally *tally);
/* A block is taken back: to be called before another thread may be given its address. Of one that was not followed
 * nothing is told. */
void zbp_tally_free(zbp_tally *tally, uint64_t address);

/* The number of the next block: those that are handed out from now on have it or a larger one. */
uint64_t zbp_tally_serial(zbp_tally *tally);
/* The blocks in use with serials from `since` on, in that order. ZBP_ENOMEM, the list zeroed. O(n log n). */
ZBP_MUST_USE int zbp_tally_blocks(zbp_tally *tally, uint64_t since, zbp_block_list *list_out);

/* From begins to ends the blocks that the calling thread takes back are listed: those that a run of a collector frees,
 * and no other thread's. ends: empty also without a begins on this thread; ZBP_ENOMEM, the list zeroed, if some could
 * not be listed. forget: of runs that have begun, on any thread, nobody wants to know; they list no more. */
void zbp_tally_collection_begins(zbp_tally *tally);
ZBP_MUST_USE int zbp_tally_collection_ends(zbp_block_list *list_out);
void zbp_tally_forget_collections(zbp_tally *tally);

/* While held, no record is fed: for reading one, and for the time of a fork. */
void zbp_tally_lock(zbp_tally *tally);
void zbp_tally_unlock(zbp_tally *tally);

#ifdef __cplusplus
}
#endif

#endif
