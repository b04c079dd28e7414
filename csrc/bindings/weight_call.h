/* weight_call.h - a call of W from its groups to its end. */
#ifndef ZBP_WEIGHT_CALL_H
#define ZBP_WEIGHT_CALL_H

#include "bindings/parts.h"

/* main_grad: weights with an attribute main_grad
 * are accumulated there. Returns 0, or -1 with an error set: of what was refused, nothing is changed but, where a
 * weight has one, its flag grad_added_to_main_grad; after an error of the pass the same groups can be given again, and
 * what was added is not added twice. */
int zbp_run_weight_pass(zbp_group *const *groups, size_t count, zbp_how how, bool main_grad);

#endif
