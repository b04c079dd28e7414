/* zbp_book.h - what of a parameter group has been delivered: the only place that knows what a
 * weight pass has still to do, and when one that failed may go on.
 *
 * A book belongs to one layout (zbp_layout.h), which it borrows in each call. W reports to it what
 * has arrived at a weight and what has been added; whoever is about to add anything asks it first.
 *
 * Note [The order of sums]
 * An ordinary backward adds up gradients wherever they meet, in the order in which they come: first
 * from where it starts, then from the last node of the forward to the first; and what has met at a
 * weight is added to its gradient as one: (grad + a) + b would round otherwise than grad + (a + b).
 * So tasks run in that order, a face's path is not followed past a node where gradients meet, and
 * where several faces end at a weight their sum is formed first, unless the caller fuses.
 *
 * Threads: one pass at a time has a book; within it the sinks of different weights may report from
 * different threads (zbp_book_arrived, _hooked, _delivered, _added).
 */
#ifndef ZBP_BOOK_H
#define ZBP_BOOK_H

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_alloc.h"
#include "core/base/zbp_status.h"
#include "core/pass/zbp_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How W is called. */
typedef struct zbp_how {
    bool retain; /* the groups are to run again */
    bool fuse;   /* products are added to gradients one by one, each in one operation */
    bool wide;   /* likewise, and into a gradient of a wider type without being rounded before */
    bool is_anomaly; /* autograd's anomaly mode: every node runs in the engine, which tells of it */
} zbp_how;

/* How far the group is. */
enum {
    ZBP_BOOK_OPEN,       /* W can run, or go on */
    ZBP_BOOK_UNREPORTED, /* complete since a W that raised later on: a retry passes over it */
    ZBP_BOOK_SPENT       /* nothing is left */
};

enum { ZBP_NO_FACE = UINT32_MAX };

/* What the shim sees on a weight before W runs; or-ed. */
enum {
    ZBP_WEIGHT_HOOKED = 1,  /* its accumulator has hooks */
    ZBP_WEIGHT_SPECIAL = 2, /* no plain tensor: its gradients are summed by rules of their own */
    ZBP_WEIGHT_FROZEN = 4   /* it takes no gradient any more */
};

/* What W does with a group. */
typedef enum zbp_way {
    ZBP_WAY_DONE,   /* nothing: it is complete */
    ZBP_WAY_DIRECT, /* adds its gradients without the engine: nobody could tell the difference */
    ZBP_WAY_ENGINE, /* runs it in the engine, with the hooks */
    ZBP_WAY_REFUSED /* nothing: a product is half added and cannot be gone on with */
} zbp_way;

/* What becomes of a group after W. */
typedef enum zbp_fate {
    ZBP_FATE_KEEP,    /* as it is, for a retry */
    ZBP_FATE_AGAIN,   /* it can run again as if it never had */
    ZBP_FATE_RELEASE, /* only sums that wait at weights are left: what the tasks hold goes */
    ZBP_FATE_CLOSE    /* it is complete: all goes */
} zbp_fate;

/* A product of which a W that raised has added some panels: how many, and to what. */
typedef struct zbp_half {
    int64_t panels;
    uint64_t
        sum; /* the identity of the memory; the shim sees to it that no other has it meanwhile */
} zbp_half;

typedef struct zbp_book_face {
    zbp_half half;
    uint64_t sum_now;  /* of the weight's gradient before this W; looked at where half.panels > 0 */
    uint32_t next;     /* of the faces that meet at the weight, ZBP_NO_FACE after the last */
    bool is_delivered; /* this edge's gradient has been added */
    bool path_is_hooked; /* a hook on its way is owed its gradient */
} zbp_book_face;

typedef struct zbp_book_weight {
    uint32_t first;   /* of the faces that meet here, ZBP_NO_FACE for none */
    uint32_t meeting; /* how many of them are still to come */
    uint8_t seen;     /* ZBP_WEIGHT_* */
    bool has_arrived; /* the sum of its gradients waits here: a hook raised, or adding failed */
    bool is_hooked;   /* and the hooks that see it before it is added are through */
    bool is_added;
} zbp_book_weight;

/* Held by the caller. Zeroed is a legal book of an empty layout. */
typedef struct zbp_book {
    zbp_book_weight *weight;
    zbp_book_face *face;
    uint32_t weight_count, face_count;
    uint32_t missing;    /* weights that a running W has still to add; written by several threads */
    uint8_t state;       /* ZBP_BOOK_* */
    uint8_t claimed;     /* a call has it; read and written atomically */
    bool has_failed;     /* a W that was not to retain it raised before the group was complete */
    bool goes_with_last; /* what the tasks hold goes with the last weight that is added */
    zbp_alloc alloc;
} zbp_book;

/* Of a complete layout. alloc is copied; NULL is libc. ZBP_ENOMEM, the book zeroed. */
ZBP_MUST_USE int zbp_book_init(zbp_book *book, const zbp_layout *layout, const zbp_alloc *alloc);
void zbp_book_fini(zbp_book *book);

/* Before each way: what the shim sees. */
void zbp_book_see_weight(zbp_book *book, uint32_t weight, uint8_t seen);
void zbp_book_see_path(zbp_book *book, uint32_t face, bool is_hooked);
void zbp_book_see_sum(zbp_book *book, uint32_t face,
                      uint64_t sum); /* of its weight, as it is now */

/* Whether a W that raised has added a part of a product: only then can a way be ZBP_WAY_REFUSED. */
bool zbp_book_has_half(const zbp_book *book);

/* How the group's gradients are to be added. A path that is hooked by now is given up in the layout.
 * *face_out: of ZBP_WAY_REFUSED, the product that is half added; else unset. */
zbp_way zbp_book_way(zbp_book *book, zbp_layout *layout, zbp_how how, uint32_t *face_out);

/* What is still to be added to each weight, of a group whose way is ZBP_WAY_DIRECT: _count_owed looks, until the next
 * way or _begin_direct.
 *   _is_owed       something is.
 *   _sole_product  the face of a product that is all there is, is computed on the CPU, and goes to a plain tensor;
 *                  else ZBP_NO_FACE. */
void zbp_book_count_owed(zbp_book *book, const zbp_layout *layout);
bool zbp_book_is_owed(const zbp_book *book, uint32_t weight);
uint32_t zbp_book_sole_product(const zbp_book *book, const zbp_layout *layout, uint32_t weight);

/* Adding without the engine, face by face in the layout's order. _begin_direct notes which faces meet at a
 * weight; those of half added products, which are gone on with by themselves, are left out.
 *   _owes    the face's gradient is still to be added.
 *   _meets   it is summed with those of other faces first: see the Note.
 *   _came    it is in the sum; true if that was the last one, and the sum is to be added.
 *   _met     the weight's sum is added: all faces that met are delivered. */
void zbp_book_begin_direct(zbp_book *book, const zbp_layout *layout);
bool zbp_book_owes(const zbp_book *book, const zbp_layout *layout, uint32_t face);
bool zbp_book_meets(const zbp_book *book, const zbp_layout *layout, zbp_how how, uint32_t face);
bool zbp_book_came(zbp_book *book, const zbp_layout *layout, uint32_t face);
void zbp_book_met(zbp_book *book, uint32_t weight);

/* Whether a sum for the weight is still to be computed; whether the face's gradient is, for its
 * weight or for what lies behind it. */
bool zbp_book_wants(const zbp_book *book, uint32_t weight);
bool zbp_book_wants_face(const zbp_book *book, const zbp_layout *layout, uint32_t face);

/* A run of the engine begins: from here on _added counts. */
void zbp_book_begin_run(zbp_book *book, bool retain);

/* From a weight's sink, in this order: its gradients' sum is there; its hooks are through; the edges
 * that served it; it is added. True if it was the last one of the group and what the tasks hold
 * can go. */
void zbp_book_arrived(zbp_book *book, uint32_t weight);
void zbp_book_hooked(zbp_book *book, uint32_t weight);
void zbp_book_delivered(zbp_book *book, uint32_t face);
bool zbp_book_added(zbp_book *book, uint32_t weight);

/* All of the group was added without the engine. */
void zbp_book_added_all(zbp_book *book);

/* After W, failed or not: what becomes of the group. The book is made ready for that. A retry of a W that was
 * not to retain the group cannot: some of what it held may be gone. */
zbp_fate zbp_book_settle(zbp_book *book, zbp_how how, bool failed);

/* After ZBP_FATE_RELEASE: the layout was cleared, and the book forgets its faces. */
void zbp_book_forget_faces(zbp_book *book);
/* After ZBP_FATE_CLOSE, or to drop the group: no more than the state is left, which is SPENT unless it is
 * UNREPORTED. */
void zbp_book_close(zbp_book *book);

/* After _settle and what it asked for: the call, which has completed the group, raises all the same. It can be
 * repeated, and passes over the group, to be retained or not. */
void zbp_book_report_again(zbp_book *book);

/* Marks the book as in the hands of one call; false if another one has it. Any threads may call these at once. */
bool zbp_book_claim(zbp_book *book);
void zbp_book_give_back(zbp_book *book);
bool zbp_book_is_claimed(const zbp_book *book);

/* The highest sequence number of a task that leaves something packed and whose gradients are still to
 * be computed; 0 if there is none. */
uint64_t zbp_book_unpacks_up_to(const zbp_book *book, const zbp_layout *layout);

/* ZBP_OK, or ZBP_EINVAL with *reason_out (may be NULL) a static string. Between two calls of W. */
ZBP_MUST_USE int zbp_book_check(const zbp_book *book, const zbp_layout *layout,
                                const char **reason_out);

#ifdef __cplusplus
}
#endif

#endif
