/* What a task may hold: every small demand against the words of zbp_budget.h. */
#include "check.h"
#include "core/pass/zbp_budget.h"

static const uint64_t BYTES[] = {0, 1, 2, 3, ZBP_NO_WAY};
enum { BYTES_COUNT = sizeof BYTES / sizeof *BYTES };

static void what_is_asked_for_is_had_if_it_fits(void)
{
    const zbp_demand demand = {{5, 4, 3}, ZBP_HOLD_KEPT};

    CHECK(zbp_hold_within(5, &demand) == ZBP_HOLD_KEPT);
    CHECK(zbp_hold_within(UINT64_MAX, &demand) == ZBP_HOLD_KEPT);
    CHECK(zbp_hold_within(4, &demand) == ZBP_HOLD_COMPUTED);
    CHECK(zbp_hold_within(0, &demand) == ZBP_HOLD_COMPUTED);
}

static void else_no_way_has_fewer_bytes_and_none_before_it_as_few(void)
{
    for (uint32_t i = 0; i < BYTES_COUNT * BYTES_COUNT * BYTES_COUNT * ZBP_HOLD_COUNT * 4; i++) {
        const uint64_t room = i % 4;
        const uint32_t n = i / 4 / ZBP_HOLD_COUNT;
        const zbp_demand demand = {{BYTES[n % BYTES_COUNT], BYTES[n / BYTES_COUNT % BYTES_COUNT],
                                    BYTES[n / BYTES_COUNT / BYTES_COUNT]},
                                   (uint8_t)(i / 4 % ZBP_HOLD_COUNT)};
        const uint8_t way = zbp_hold_within(room, &demand);

        REQUIRE(way < ZBP_HOLD_COUNT);
        if (demand.bytes[demand.asked] <= room) {
            CHECK(way == demand.asked);
            continue;
        }
        for (uint8_t other = 0; other < ZBP_HOLD_COUNT; other++)
            CHECK(other < way ? demand.bytes[other] > demand.bytes[way]
                              : demand.bytes[other] >= demand.bytes[way]);
    }
}

static void without_any_other_way_it_is_kept(void)
{
    const zbp_demand demand = {{ZBP_NO_WAY, ZBP_NO_WAY, ZBP_NO_WAY}, ZBP_HOLD_PACKED};

    CHECK(zbp_hold_within(0, &demand) == ZBP_HOLD_KEPT);
}

/* Every value that falls at the n-th of the falls to 0 is known for the next ZBP_MOST_PERIODS, and not for ever. */
static void the_most_is_known_for_a_while_and_forgotten(void)
{
    for (uint32_t at = 0; at < 2 * ZBP_MOST_PERIODS; at++) {
        zbp_most most = {0};
        uint32_t known = 0;

        CHECK(zbp_most_of(&most) == 0);
        for (uint32_t i = 0; i < at; i++)
            zbp_most_see(&most, 0);
        zbp_most_see(&most, 7);
        CHECK(zbp_most_of(&most) == 7);
        zbp_most_see(&most, 9);
        for (uint32_t i = 0; i < 3 * ZBP_MOST_PERIODS; i++) {
            zbp_most_see(&most, 3);
            known += zbp_most_of(&most) == 9;
            CHECK(zbp_most_of(&most) == (known == i + 1 ? 9 : 3));
            zbp_most_see(&most, 0);
        }
        CHECK(known >= ZBP_MOST_PERIODS && known <= 2 * ZBP_MOST_PERIODS);
    }
}

int main(void)
{
    check_sees_failure();
    RUN(what_is_asked_for_is_had_if_it_fits);
    RUN(else_no_way_has_fewer_bytes_and_none_before_it_as_few);
    RUN(without_any_other_way_it_is_kept);
    RUN(the_most_is_known_for_a_while_and_forgotten);
    return check_end();
}
