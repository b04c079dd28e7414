/* zbp_touch.h - what the weight pass asks of the shim: every look at a weight, every addition to a
 * gradient, every run of the engine. By which operation a product is added is the shim's choice; all else csrc/pass and
 * the core decide.
 *
 * Conventions. Functions return ZBP_OK or ZBP_ETORCH; after that *error has what was raised and the function has done
 * nothing, unless it says otherwise. ZBP_ENOMEM leaves *error as it was. No C++ exception leaves a function. They are
 * called without the GIL. Indices are those of the group's layout.
 */
#ifndef ZBP_TOUCH_H
#define ZBP_TOUCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_status.h"
#include "core/pass/zbp_book.h"
#include "shim/torch/zbp_error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a group holds: tensors, nodes, accumulators. The caller's. */
typedef struct zbp_held zbp_held;

/* A group on its way through W; all three borrowed. */
typedef struct zbp_turn {
    zbp_layout *layout;
    zbp_book *book;
    zbp_held *held;
} zbp_turn;

/* Tells the book of each weight's hooks, and gives up the paths on which a hook was put. */
ZBP_MUST_USE int zbp_look(zbp_held *held, zbp_error *error);

/* The same for the same weight, whichever group it is asked of; never NULL. */
const void *zbp_weight_key(zbp_held *held, uint32_t weight);

/* Streams: the tasks' wait for the caller's, and the caller's for the tasks'. */
ZBP_MUST_USE int zbp_follow_caller(zbp_held *held, zbp_error *error);
ZBP_MUST_USE int zbp_join_streams(zbp_held *held, zbp_error *error);

/* ---- without the engine */

/* Adds the face's gradient to its weight: a product in place to the gradient that is there, where that can take it,
 * anything else by the accumulator's rules. Unless how.retain, what I kept for the face goes. After an error nothing
 * was added. */
ZBP_MUST_USE int zbp_add_alone(zbp_held *held, uint32_t face, zbp_how how, zbp_error *error);

/* ---- with the engine */

/* One run of the engine for several groups; owned by the caller. Its sinks report to the books. */
typedef struct zbp_run zbp_run;

ZBP_MUST_USE int zbp_run_new(zbp_how how, zbp_run **run_out, zbp_error *error);
void zbp_run_free(zbp_run *run); /* NULL is legal */

/* The group's tasks run, for what the book still wants. Groups of one run share no weight. */
ZBP_MUST_USE int zbp_run_add(zbp_run *run, zbp_held *held, zbp_error *error);

/* Runs; without a group it does nothing. An error that a weight's hooks or addition raised is reported
 * when all else has run: see Note [Why a sink does not stop the engine] in weight_nodes.h. */
ZBP_MUST_USE int zbp_run_go(zbp_run *run, zbp_error *error);

/* ---- afterwards; none of them fails */

void zbp_held_release(zbp_held *held); /* what the tasks hold goes; the weights stay */
void zbp_held_close(zbp_held *held);   /* the weights too, and stage outputs lose their history */
void zbp_held_again(zbp_held *held);   /* what ran is to run again */

#ifdef __cplusplus
}
#endif

#endif
