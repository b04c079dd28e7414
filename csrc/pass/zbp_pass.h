/* zbp_pass.h - the weight pass: what is added in which order, and what becomes of it on an error.
 *
 * Knows neither torch nor Python. What is decided stands in a split, layouts and books (core/pass);
 * what is touched it asks of the shim (zbp_weight.h), in whose place tests link one without torch.
 */
#pragma once

#include <stddef.h>

#include "core/base/zbp_c.h"
#include "shim/weight/zbp_weight.h"

ZBP_BEGIN_C

/* Runs W for groups that nobody else runs: each adds its gradients, once. Called without the GIL.
 *
 * ZBP_OK: every group is complete, and closed, or with how.retain ready to run again. Another
 * status: *error says what was raised. What had been added by then is noted in the books, and the
 * call can be repeated with the same groups, or with some of them unless they are retained: nothing
 * is added twice. */
ZBP_MUST_USE int zbp_pass_weights(zbp_group *const *group, size_t count, zbp_how how,
                                  zbp_error *error);

ZBP_END_C
