/* zbp_book.h - what of a parameter group has been added: the only place that knows what a weight
 * pass has still to do, and when one that failed may go on.
 *
 * A book belongs to one layout (zbp_layout.h), which it borrows in each call. W reports to it what
 * has arrived at a weight and what has been added; whoever is about to add anything asks it first.
 *
 * Note [The states of a weight] docs/architecture.md has the page. In short: a weight is *alone* in
 * a call of W if no hook sees it and, in every group of the call that has it, one face of a product
 * or of a whole node, on the weight's own stream, is all that it is owed. It is served first,
 * without the engine. All other weights get their gradients from a run of the engine, where a sum
 * *arrives*, its hooks run (*hooked*), and it is *added*. What is added is never added again; what
 * has arrived waits for a retry.
 *
 * Note [The order of sums] An ordinary backward adds up gradients wherever they meet, in the order
 * in which they come, and adds what has met at a weight to its gradient as one: (grad + a) + b
 * would round otherwise than grad + (a + b). So no sum is formed outside the engine, whose buffers
 * do it, and a path is not followed past a node where gradients meet.
 *
 * Threads: one pass at a time has a book; within it the sinks of different weights may report from
 * different threads, each of its own.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_c.h"
#include "core/pass/zbp_layout.h"

ZBP_BEGIN_C

/* How W is called. */
typedef struct zbp_how {
    bool retain;     /* the groups are to run again */
    bool fuse;       /* one kernel adds a product into the gradient, in the gradient's dtype */
    bool is_anomaly; /* autograd's anomaly mode: every node runs in the engine, which tells of it */
} zbp_how;

enum { ZBP_NO_FACE = UINT32_MAX };

/* What the shim sees on a weight before W runs; or-ed. */
enum {
    ZBP_WEIGHT_HOOKED = 1,   /* its accumulator has hooks */
    ZBP_WEIGHT_FROZEN = 2,   /* it takes no gradient any more */
    ZBP_WEIGHT_ELSEWHERE = 4 /* something is kept for it on another stream than its own */
};

/* What becomes of a group after W. */
typedef enum zbp_fate {
    ZBP_FATE_KEEP,    /* as it is, for a retry */
    ZBP_FATE_AGAIN,   /* it can run again as if it never had */
    ZBP_FATE_RELEASE, /* what the tasks hold goes, sums that wait at weights stay for a retry */
    ZBP_FATE_CLOSE    /* it is complete: all goes */
} zbp_fate;

typedef struct zbp_book_weight {
    uint32_t alone; /* the face that serves it without the engine, or ZBP_NO_FACE */
    uint8_t seen;   /* ZBP_WEIGHT_*; set before W runs */
    /* Set by W: */
    bool has_arrived; /* the sum of its gradients waits here: a hook raised, or adding failed */
    bool is_hooked;   /* and the hooks that see it before it is added are through */
    bool is_added;
} zbp_book_weight;

/* Held by the caller. Zeroed is a legal book of an empty layout. */
typedef struct zbp_book {
    zbp_book_weight *weight;
    uint32_t weight_count;
    uint32_t missing;    /* weights that a running W has still to add; written by several threads */
    uint8_t claimed;     /* a call has it; read and written atomically */
    bool is_spent;       /* nothing is left: W can neither run nor go on */
    bool has_failed;     /* a W that was not to retain it raised before the group was complete */
    bool goes_with_last; /* what the tasks hold goes with the last weight that is added */
} zbp_book;

/* A parameter group, as C sees it. The shim's own begins with it: tensors, nodes and accumulators
 * come behind. */
typedef struct zbp_group {
    zbp_layout layout; /* what leads where */
    zbp_book book;     /* what has been added */
} zbp_group;

/* Of a complete layout. ZBP_ENOMEM, the book zeroed. */
ZBP_MUST_USE int zbp_book_init(zbp_book *book, const zbp_layout *layout);

/* Finds the weights that are alone in this group; W may make one the engine's by weight[].alone =
 * ZBP_NO_FACE. */
void zbp_book_find_alone(zbp_book *book, const zbp_layout *layout, zbp_how how);

/* The engine runs what is not alone: the paths to those weights are given up, so that it runs each
 * step. */
void zbp_book_give_up_paths(const zbp_book *book, zbp_layout *layout);

/* Whether a sum for the weight is still to be computed. */
bool zbp_book_wants(const zbp_book *book, uint32_t weight);
/* leads[outside_count]: whether the outside node leads to a weight that is wanted. In a retry the
 * others do not run: they may have nothing left to run with, and their hooks have been called. */
void zbp_book_find_leading(const zbp_book *book, const zbp_layout *layout, bool *leads);

/* Whether every weight has been added, also of a spent group. */
bool zbp_book_is_complete(const zbp_book *book);

/* A run of the engine begins: from here on _added counts. */
void zbp_book_begin_run(zbp_book *book, bool retain);

/* From a weight's sink, which has set has_arrived and is_hooked before: it is added. True if it was
 * the last one of the group and what the tasks hold can go. */
bool zbp_book_added(zbp_book *book, uint32_t weight);

/* After W, failed or not: what becomes of the group. The book is made ready for that. A retry of a
 * W that was not to retain the group cannot be retained: some of what it held may be gone. */
zbp_fate zbp_book_settle(zbp_book *book, zbp_how how, bool failed);

/* After ZBP_FATE_CLOSE, or to drop the group: it is spent, and holds nothing. Any book is legal. */
void zbp_book_close(zbp_book *book);

/* Marks the book as in the hands of one call; false if another one has it. Any threads may call
 * these at once. */
bool zbp_book_claim(zbp_book *book);
void zbp_book_give_back(zbp_book *book);
bool zbp_book_is_claimed(const zbp_book *book);

/* The highest sequence number of a task that leaves something packed and whose gradients may still
 * be wanted; 0 if there is none. */
uint64_t zbp_book_unpacks_up_to(const zbp_book *book, const zbp_layout *layout);

ZBP_END_C
