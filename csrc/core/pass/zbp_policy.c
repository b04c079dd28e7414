#include "core/pass/zbp_policy.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

zbp_decision zbp_decision_none(void)
{
    return (zbp_decision){ZBP_DEFER_NOTHING, ZBP_CHECKPOINT_INPUT_PASS};
}

zbp_decision zbp_decision_join(zbp_decision a, zbp_decision b)
{
    return (zbp_decision){
        .defer = a.defer > b.defer ? a.defer : b.defer,
        .checkpoint = a.checkpoint < b.checkpoint ? a.checkpoint : b.checkpoint,
    };
}

zbp_decision zbp_decision_behind(const zbp_decision *of_weight, const zbp_decision *of_outside,
                                 int32_t weight, int32_t outside)
{
    return weight >= 0 ? of_weight[weight] : of_outside[outside];
}

/* A search from every node, deepest first: `pending` is the way to the node that is looked at, and the
 * next hop of each on it. */
typedef struct search {
    struct {
        uint32_t outside, hop;
    } *pending;
    bool *is_seen;
    uint32_t depth;
} search;

static void enter(search *s, const zbp_layout *layout, uint32_t outside)
{
    s->is_seen[outside] = true;
    s->pending[s->depth].outside = outside;
    s->pending[s->depth].hop = zbp_layout_first_hop(layout, outside);
    s->depth++;
}

static void decide_from(search *s, const zbp_layout *layout, const zbp_decision *of_weight,
                        zbp_decision *of_outside)
{
    while (s->depth > 0) {
        const uint32_t outside = s->pending[s->depth - 1].outside;
        uint32_t *next = &s->pending[s->depth - 1].hop;
        const zbp_hop *hop = &layout->hop[*next];

        if (*next == layout->hop_count || hop->outside != outside) {
            s->depth--;
        } else if (hop->to_weight < 0 && !s->is_seen[hop->to_outside]) {
            enter(s, layout,
                  (uint32_t)hop->to_outside); /* its decision first; this hop again then */
        } else {
            of_outside[outside] = zbp_decision_join(
                of_outside[outside],
                zbp_decision_behind(of_weight, of_outside, hop->to_weight, hop->to_outside));
            ++*next;
        }
    }
}

int zbp_policy_spread(const zbp_layout *layout, const zbp_decision *of_weight,
                      zbp_decision *of_outside_out)
{
    const zbp_alloc *alloc = &layout->alloc;
    const size_t count = layout->outside_count;
    search s = {0};

    for (size_t i = 0; i < count; i++)
        of_outside_out[i] = zbp_decision_none();
    if (count == 0)
        return ZBP_OK;
    s.pending = zbpi_resize(alloc, NULL, 0, count * sizeof *s.pending);
    s.is_seen = zbpi_resize(alloc, NULL, 0, count * sizeof *s.is_seen);
    if (s.pending != NULL && s.is_seen != NULL) {
        memset(s.is_seen, 0, count * sizeof *s.is_seen);
        for (uint32_t i = 0; i < count; i++) {
            if (!s.is_seen[i]) {
                enter(&s, layout, i);
                decide_from(&s, layout, of_weight, of_outside_out);
            }
        }
    }
    const int status = s.pending != NULL && s.is_seen != NULL ? ZBP_OK : ZBP_ENOMEM;
    zbpi_free(alloc, s.pending, count * sizeof *s.pending);
    zbpi_free(alloc, s.is_seen, count * sizeof *s.is_seen);
    return status;
}
