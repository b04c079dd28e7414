#include "core/pass/zbp_verdict.h"

#include "core/pass/zbp_policy.h"

/* The task's face that is this edge of its node, counted from its first; -1 if none is. */
static int32_t face_at(const zbp_layout *layout, const zbp_task *task, int32_t slot)
{
    uint32_t begin = task->face_begin, end = task->face_end;

    while (slot >= 0 && begin < end) { /* they are in the order of their slots */
        const uint32_t middle = begin + (end - begin) / 2;

        if (layout->face[middle].slot < (uint32_t)slot) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return slot >= 0 && begin < task->face_end && layout->face[begin].slot == (uint32_t)slot
               ? (int32_t)(begin - task->face_begin)
               : -1;
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
