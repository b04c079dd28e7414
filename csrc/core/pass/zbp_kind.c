#include "core/pass/zbp_kind.h"

static bool stays_in_i(const zbp_fact *fact, zbp_policy policy)
{
    return policy.checkpoint == ZBP_CHECKPOINT_INPUT_PASS && (fact->flag & ZBP_FACT_PACKED) != 0;
}

static uint8_t why_of(const zbp_fact *fact, zbp_sides sides, zbp_policy policy, bool is_excluded)
{
    if ((fact->flag & ZBP_FACT_POST_HOOK) != 0)
        return ZBP_WHY_POST_HOOK;
    if (policy.defer == ZBP_DEFER_NOTHING)
        return ZBP_WHY_POLICY;
    if (is_excluded)
        return ZBP_WHY_EXCLUDED;
    if (fact->type == ZBP_TYPE_FUNCTION)
        return ZBP_WHY_FUNCTION;
    if (fact->type == ZBP_TYPE_UNKNOWN)
        return ZBP_WHY_UNKNOWN;
    if (fact->type == ZBP_TYPE_DISAGREES)
        return ZBP_WHY_DISAGREES;
    if (stays_in_i(fact, policy))
        return ZBP_WHY_PACKED;
    if (policy.defer != ZBP_DEFER_ALL && !sides.has_matrix)
        return ZBP_WHY_LIGHT;
    return ZBP_WHY_SEPARABLE;
}

uint8_t zbp_kind_of(const zbp_fact *fact, zbp_sides sides, zbp_policy policy, bool is_excluded,
                    uint8_t *why_out)
{
    *why_out = why_of(fact, sides, policy, is_excluded);
    if (*why_out != ZBP_WHY_SEPARABLE)
        return ZBP_TASK_WHOLE;
    /* The gradients of both factors take two products. */
    return fact->type == ZBP_TYPE_PRODUCT && sides.left != sides.right ? ZBP_TASK_PRODUCT
                                                                       : ZBP_TASK_DEFERRED;
}

uint8_t zbp_takes_work(const zbp_fact *fact, zbp_policy policy, bool is_excluded)
{
    const bool may = fact->type == ZBP_TYPE_FUNCTION && (fact->flag & ZBP_FACT_POST_HOOK) == 0 &&
                     !is_excluded && !stays_in_i(fact, policy);

    return may ? policy.defer : ZBP_DEFER_NOTHING;
}
