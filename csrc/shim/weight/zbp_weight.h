/* zbp_weight.h - the weight pass (W): one call of it, and every touch of a weight, a gradient, the
 * engine.
 *
 * The bindings claim the groups' books and make a call. Within it zbp_pass_weights decides what is
 * added in which order, without torch or Python: it asks for the steps. Conventions: zbp_input.h.
 * ZBP_ENOMEM puts nothing into *error. After an error a function has done nothing, unless it says
 * otherwise. Indices are those of the group's layout, and in range.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_c.h"
#include "core/pass/zbp_book.h"
#include "shim/torch/zbp_error.h"

ZBP_BEGIN_C

/* Refuses what has changed since I so that W would add wrong gradients, and a call that is in
 * another capture of a graph of the device's than its I was; then W runs, without the GIL.
 * The streams of tasks and weights follow the caller's before, and are joined to these after: see
 * Note [Streams] (kept.h).
 *
 * how: whether autograd's anomaly mode is on is found here.
 * main_grad: a weight with an attribute main_grad that is a tensor is accumulated there until the
 * call ends, and its attribute grad_added_to_main_grad, if it has one, becomes True. Until all have
 * been looked at nothing is changed.
 * A warning of libtorch's that is an error in Python is printed: it comes when all is added. */
ZBP_MUST_USE int zbp_weight_call(zbp_group *const *group, size_t count, zbp_how how, bool main_grad,
                                 zbp_error *error);

/* The only function here that is C's (csrc/pass). Runs W for groups that nobody else runs: each
 * adds its gradients, once.
 *
 * ZBP_OK: every group is complete, and closed, or with how.retain ready to run again. Another
 * status: *error says what was raised. What had been added by then is noted in the books, and the
 * call can be repeated with the same groups, or with some of them unless they are retained: nothing
 * is added twice. */
ZBP_MUST_USE int zbp_pass_weights(zbp_group *const *group, size_t count, zbp_how how,
                                  zbp_error *error);

/* ---- the steps, without the GIL and on one thread */

/* Tells the book what it sees on each weight, and gives up the paths on which a hook was put. */
ZBP_MUST_USE int zbp_group_see_hooks(zbp_group *group, zbp_error *error);

/* The same for the same weight, whichever group it is asked of; never NULL. */
const void *zbp_weight_key(const zbp_group *group, uint32_t weight);

/* Without the engine: adds the face's gradient to its weight: a product in place to the gradient
 * that is there, where that can take it, anything else by the accumulator's rules. Unless
 * how.retain, what I kept for the face goes. After an error nothing was added. */
ZBP_MUST_USE int zbp_add_alone(zbp_group *group, uint32_t face, zbp_how how, zbp_error *error);

/* One run of the engine for those of the groups that are not complete; they share no weight. Runs
 * what the books still want, and its sinks report to them. An error that a weight's hooks or
 * addition raised is reported when all else has run: see Note [Why a sink does not stop the engine]
 * in run.cpp. */
ZBP_MUST_USE int zbp_run_engine(zbp_group *const *group, size_t count, zbp_how how,
                                zbp_error *error);

/* ---- afterwards; none of them fails */

void zbp_group_release(zbp_group *group); /* what the tasks hold goes; the weights stay */
void zbp_group_close(zbp_group *group); /* the weights too, and stage outputs lose their history */
void zbp_group_again(zbp_group *group); /* what ran is to run again */

ZBP_END_C
