#include "core/pass/zbp_budget.h"

uint8_t zbp_hold_within(uint64_t room, const zbp_demand *demand)
{
    uint8_t least = ZBP_HOLD_KEPT;

    if (demand->bytes[demand->asked] <= room)
        return demand->asked;
    for (uint8_t way = ZBP_HOLD_PACKED; way < ZBP_HOLD_COUNT; way++) {
        if (demand->bytes[way] < demand->bytes[least])
            least = way;
    }
    return least;
}
