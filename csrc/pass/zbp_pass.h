/* zbp_pass.h - the weight pass: which groups run how, in which order, and what becomes of them.
 *
 * Knows neither torch nor Python. What it decides stands in a layout and a book (core/pass), what it
 * touches it asks of the shim (shim/pass/zbp_touch.h), in whose place tests link one without torch.
 */
#ifndef ZBP_PASS_H
#define ZBP_PASS_H

#include <stddef.h>

#include "core/pass/zbp_book.h"
#include "core/pass/zbp_layout.h"
#include "shim/pass/zbp_touch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Runs W for groups that nobody else runs: each adds its gradients, once. Called without the GIL.
 *
 * ZBP_OK: every group is complete, and closed, or with how.retain ready to run again.
 * Another status: *error says what was raised. What had been added by then is noted in the books, and
 * the call can be repeated, with the same groups or some of them: nothing is added twice. Refused, before
 * anything is added to any group: a product that is half added and cannot be gone on with. */
ZBP_MUST_USE int zbp_pass_weights(zbp_turn *turn, size_t count, zbp_how how, zbp_error *error);

/* A group whose gradients nobody watches, without the engine. Part of zbp_pass_weights. */
ZBP_MUST_USE int zbp_pass_directly(zbp_turn *turn, zbp_how how, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
