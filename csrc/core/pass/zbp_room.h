/* zbp_room.h - how much may still wait for W under a budget: zbpipe.policy(held_at_most=...), counted over all groups
 * of the process that were made under one, each storage once.
 *
 * Note [Room that is kept free]
 * A gradient must be held by something until W. So what the tasks of a call of I that have not run yet will hold at
 * least is kept free for them; and what the calls to come will hold at least, as the process has learned it: the most
 * that has waited at the same time, each task in the way of the fewest bytes, whatever the budget (zbp_most). A step's
 * second run is within the budget if all that waits in it can be.
 *
 * Storages are named by their addresses: while one is counted, the caller sees to it that nobody else gets its address.
 * Allocation: a table that never shrinks. Threads: one at a time, for the room and all budgets and shares, but
 * for zbp_room_bytes().
 */
#ifndef ZBP_ROOM_H
#define ZBP_ROOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_status.h"
#include "core/memory/zbp_blocks.h"
#include "core/pass/zbp_budget.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of the process; all fields are for reading alone. Zeroed is a legal empty one. */
typedef struct zbp_room {
    zbp_blocks counted; /* by address; a block's serial says how often it is counted */
    uint64_t bytes;     /* of all that are counted, each once */
    uint64_t waiting;   /* the least that the shares which wait would hold, added up */
    zbp_most most;      /* of that */
} zbp_room;

/* Of one call of I, the caller's. */
typedef struct zbp_budget {
    uint64_t at_most;
    uint64_t least; /* what its tasks are expected to hold at least, all of them */
    uint64_t due;   /* and those that have not run yet */
} zbp_budget;

/* Of one group, the caller's. Zeroed: nothing has run. */
typedef struct zbp_share {
    uint64_t least; /* of the tasks that have run */
    bool waits;
} zbp_share;

/* A storage: its address, which is not 0, and how large it is. */
typedef struct zbp_place {
    uint64_t storage;
    uint64_t bytes;
} zbp_place;

/* alloc is copied; NULL is libc. */
void zbp_room_init(zbp_room *room, const zbp_alloc *alloc);
void zbp_room_fini(zbp_room *room);

/* Counts a storage, once more if it is counted already. ZBP_ENOMEM, nothing counted. */
ZBP_MUST_USE int zbp_room_count(zbp_room *room, zbp_place place);
/* Takes one count of it back; of what is not counted, nothing. */
void zbp_room_forget(zbp_room *room, uint64_t storage);

/* Of all that are counted, each once. From any thread, at any time. */
uint64_t zbp_room_bytes(const zbp_room *room);

/* The bytes of those that are not counted: *always_out those of the first `always` places, *all_out those of all,
 * each storage once. Sorts both parts. */
void zbp_room_weigh(const zbp_room *room, zbp_place *place, size_t always, size_t count,
                    uint64_t *always_out, uint64_t *all_out);

/* Before the run: a task will hold so much at least, which is its due. */
void zbp_budget_expect(zbp_budget *budget, uint64_t due);

/* The task has run, and its group holds so much more at least: its due, which becomes 0, is not kept free any more. */
void zbp_room_settle(zbp_budget *budget, zbp_share *share, uint64_t *due, uint64_t least);

/* A ZBP_HOLD_* for the task, which is settled by this. */
uint8_t zbp_room_choose(const zbp_room *room, zbp_budget *budget, zbp_share *share, uint64_t *due,
                        const zbp_demand *demand);

/* I has succeeded, and the group waits for W; it is gone. The second does nothing for one that does not wait. */
void zbp_room_wait(zbp_room *room, zbp_share *share);
void zbp_room_leave(zbp_room *room, zbp_share *share);

/* ZBP_OK, or ZBP_EINVAL with *reason_out (may be NULL) a static string: the table's invariant, and that the bytes are
 * the sum of the table's. O(slots). */
ZBP_MUST_USE int zbp_room_check(const zbp_room *room, const char **reason_out);

#ifdef __cplusplus
}
#endif

#endif
