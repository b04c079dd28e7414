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

void zbp_most_see(zbp_most *most, uint64_t value)
{
    if (value > most->now)
        most->now = value;
    if (value == 0 && ++most->periods == ZBP_MOST_PERIODS)
        *most = (zbp_most){.before = most->now};
}

uint64_t zbp_most_of(const zbp_most *most)
{
    return most->now > most->before ? most->now : most->before;
}
