#include "core/pass/zbp_verdict.h"

#include "core/pass/zbp_policy.h"

/* The task's face that is this edge of its node, counted from its first; -1 if none is. */
static int32_t face_at(const zbp_layout *layout, const zbp_task *task, int32_t slot)
{
    for (uint32_t f = task->face_begin; slot >= 0 && f < task->face_end; ++f) {
        if (layout->face[f].slot == (uint32_t)slot) {
            return (int32_t)(f - task->face_begin);
        }
    }
    return -1;
}

static bool takes(const zbp_task *task, bool has_matrix)
{
    return task->takes_work == ZBP_DEFER_ALL ||
           (task->takes_work == ZBP_DEFER_MATRICES && has_matrix);
}

zbp_verdict zbp_verdict_of(const zbp_layout *layout, uint32_t number, const zbp_offer *offer,
                           int32_t *face_out)
{
    const zbp_task *task = &layout->task[number];
    bool is_wanted = false, is_needed_now = false, has_matrix = false;

    for (size_t i = 0; i < offer->slot_count; ++i) {
        face_out[i] = face_at(layout, task, offer->slot[i]);
        if (face_out[i] >= 0) {
            is_wanted = true;
            has_matrix = has_matrix || offer->is_matrix[face_out[i]];
        } else if (offer->slot[i] >= 0 && offer->leads[i]) {
            is_needed_now = true; /* towards the inputs: I's */
        }
    }
    if (!is_wanted && !is_needed_now) {
        return ZBP_VERDICT_SKIP;
    }
    return !is_needed_now && !offer->is_watched && takes(task, has_matrix) ? ZBP_VERDICT_HAND_OVER
                                                                           : ZBP_VERDICT_AT_ONCE;
}
