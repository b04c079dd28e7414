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

/* Tells the book what it must know before it is asked for the way: each weight's hooks and kind, the
 * paths that are hooked, the gradients that have a part of a product. */
ZBP_MUST_USE int zbp_look(zbp_held *held, zbp_book *book, zbp_error *error);

/* The same for the same weight, whichever group it is asked of; never NULL. */
const void *zbp_weight_key(zbp_held *held, uint32_t weight);

/* Streams: the tasks' wait for the caller's, and the caller's for the tasks'. */
ZBP_MUST_USE int zbp_follow_caller(zbp_held *held, zbp_error *error);
ZBP_MUST_USE int zbp_join_streams(zbp_held *held, zbp_error *error);

/* ---- without the engine */

/* A group while its gradients are added; owned by the caller. */
typedef struct zbp_adding zbp_adding;

ZBP_MUST_USE int zbp_adding_new(zbp_held *held, zbp_how how, zbp_adding **adding_out,
                                zbp_error *error);
void zbp_adding_free(zbp_adding *adding); /* with the sums that were not added; NULL is legal */

/* The next functions are about this task's faces, on its stream. A deferred node runs here. */
ZBP_MUST_USE int zbp_adding_begin(zbp_adding *adding, uint32_t task, zbp_error *error);

/* A face whose gradient is a product. */
typedef struct zbp_product {
    const zbp_turn *turn; /* borrowed */
    uint32_t face;
} zbp_product;

/* Adds products for one weight in place to the gradient that it has: panel by panel, and each panel's in this
 * order, so that an element gets its additions in the order that it would have had one product after the other.
 * At least one; several run on the CPU and are one each of different groups. *added_out: how many of the first
 * are added, also after an error. The next one is none, or cannot be added so or not together with those: the
 * weight has no gradient, or one that forbids it. Nothing was done for it, nor for those behind it. In the
 * books, face.half: how many panels are in there already; after an error, how many are by now, and in what. */
ZBP_MUST_USE int zbp_add_products(const zbp_product *product, uint32_t count, zbp_how how,
                                  uint32_t *added_out, zbp_error *error);

/* Computes the face's gradient and adds it to its weight, by the accumulator's rules. */
ZBP_MUST_USE int zbp_add_gradient(zbp_adding *adding, uint32_t face, zbp_error *error);

/* The gradient that I kept for the face, if it did, is not needed any more. */
void zbp_let_go(zbp_adding *adding, uint32_t face);

/* Adds the face's gradient to the sum for its weight, which the first one begins. After an error the
 * sum is not to be used. */
ZBP_MUST_USE int zbp_sum_gradient(zbp_adding *adding, uint32_t face, zbp_error *error);

/* Adds the weight's sum to the weight. */
ZBP_MUST_USE int zbp_add_sum(zbp_adding *adding, uint32_t weight, zbp_error *error);

/* ---- with the engine */

/* One run of the engine for several groups; owned by the caller. Its sinks report to the books. */
typedef struct zbp_run zbp_run;

ZBP_MUST_USE int zbp_run_new(zbp_how how, zbp_run **run_out, zbp_error *error);
void zbp_run_free(zbp_run *run); /* NULL is legal */

/* The group's tasks run, for what the book still wants. */
ZBP_MUST_USE int zbp_run_add(zbp_run *run, zbp_held *held, zbp_error *error);

/* Runs; without a group it does nothing. An error that a weight's hooks or addition raised is reported
 * when all else has run: see Note [Why a sink does not stop the engine] in weight_nodes.h. */
ZBP_MUST_USE int zbp_run_go(zbp_run *run, zbp_error *error);

/* ---- afterwards; none of them fails */

void zbp_held_release(zbp_held *held); /* what the tasks hold goes; the weights stay */
void zbp_held_close(zbp_held *held);   /* the weights too, and stage outputs lose their history */
void zbp_held_again(zbp_held *held);   /* what ran is to run again */

/* ---- errors */

/* The product of this face is half added: sets *error. Always ZBP_ETORCH. */
ZBP_MUST_USE int zbp_error_half_added(zbp_held *held, uint32_t face, zbp_error *error);

/* A retry has failed because what it needs went with the first W: says which weights of the groups lack
 * their gradients for good. Other errors are left as they are. */
void zbp_error_name_lost(zbp_error *error, const zbp_turn *turn, size_t count);

#ifdef __cplusplus
}
#endif

#endif
