#include "core/pass/zbp_verdict.h"

#include "core/pass/zbp_policy.h"

static bool takes(const zbp_task *task, bool has_matrix)
{
    return task->takes_work == ZBP_DEFER_ALL ||
           (task->takes_work == ZBP_DEFER_MATRICES && has_matrix);
}

zbp_verdict zbp_verdict_of(const zbp_layout *layout, uint32_t number, const zbp_offer *offer,
                           int32_t *face_out)
{
    const zbp_task *task = &layout->task[number];
    bool leads_to_weights = false, leads_to_inputs = false, has_matrix = false;

    for (size_t i = 0; i < offer->slot_count; ++i) {
        face_out[i] =
            offer->slot[i] < 0 ? -1 : zbp_layout_face_at(layout, number, (uint32_t)offer->slot[i]);
        if (face_out[i] >= 0) {
            leads_to_weights = true;
            has_matrix = has_matrix || offer->is_matrix[face_out[i]];
        } else if (offer->slot[i] >= 0 && offer->leads[i]) {
            leads_to_inputs = true;
        }
    }
    if (!leads_to_weights && !leads_to_inputs)
        return ZBP_VERDICT_SKIP;
    if (leads_to_inputs || offer->is_watched || !takes(task, has_matrix))
        return ZBP_VERDICT_AT_ONCE;
    return ZBP_VERDICT_HAND_OVER;
}
