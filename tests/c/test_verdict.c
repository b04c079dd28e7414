/* What becomes of offered work: every offer to a small task, against the rules one by one. */
#include "check.h"
#include "core/pass/zbp_policy.h"
#include "core/pass/zbp_verdict.h"

enum { EDGES = 3, SUBSETS = 1 << EDGES };

/* A first task that is in nobody's way, and one with a face for each edge in `faces`. */
static void build(zbp_layout *layout, uint32_t faces, uint8_t takes_work)
{
    *layout = (zbp_layout){.weight_count = 1, .outside_count = 0};
    REQUIRE(zbp_layout_add_task(layout, ZBP_TASK_WHOLE, 2) == ZBP_OK);
    REQUIRE(zbp_layout_add_face(layout, (zbp_face){.slot = 7, .outside = -1}) == ZBP_OK);
    REQUIRE(zbp_layout_add_task(layout, ZBP_TASK_WHOLE, 1) == ZBP_OK);
    for (uint32_t slot = 0; slot < EDGES; slot++) {
        if (faces >> slot & 1)
            REQUIRE(zbp_layout_add_face(layout, (zbp_face){.slot = slot, .outside = -1}) == ZBP_OK);
    }
    layout->task[1].takes_work = takes_work;
}

/* How many of the lower edges are faces: the place of this one's among them. */
static int32_t place_of(uint32_t faces, uint32_t slot)
{
    int32_t place = 0;

    for (uint32_t s = 0; s < slot; s++)
        place += (faces >> s & 1) != 0;
    return place;
}

static bool has_a_matrix(uint32_t of_faces, uint32_t matrices)
{
    return (of_faces & matrices) != 0;
}

static zbp_verdict expected(uint32_t faces, uint32_t offered, uint32_t leading, uint32_t matrices,
                            uint8_t takes_work, bool is_watched)
{
    const uint32_t wanted = offered & faces, needed_now = offered & ~faces & leading;

    if (wanted == 0 && needed_now == 0)
        return ZBP_VERDICT_SKIP;
    if (needed_now != 0 || is_watched || takes_work == ZBP_DEFER_NOTHING)
        return ZBP_VERDICT_AT_ONCE;
    return takes_work == ZBP_DEFER_ALL || has_a_matrix(wanted, matrices) ? ZBP_VERDICT_HAND_OVER
                                                                         : ZBP_VERDICT_AT_ONCE;
}

static void offer_it(const zbp_layout *layout, uint32_t faces, uint32_t offered, uint32_t leading,
                     uint32_t matrices, uint8_t takes_work, bool is_watched)
{
    int32_t slot[EDGES + 1] = {-1}, face[EDGES + 1];
    bool leads[EDGES + 1] = {true}, is_matrix[EDGES] = {false};
    zbp_offer offer = {.is_watched = is_watched,
                       .slot = slot,
                       .leads = leads,
                       .slot_count = 1, /* a weight that takes no gradient */
                       .is_matrix = is_matrix};

    for (uint32_t s = 0; s < EDGES; s++) {
        if (faces >> s & 1)
            is_matrix[place_of(faces, s)] = matrices >> s & 1;
        if (offered >> s & 1) {
            slot[offer.slot_count] = (int32_t)s;
            leads[offer.slot_count++] = leading >> s & 1;
        }
    }
    CHECK(zbp_verdict_of(layout, 1, &offer, face) ==
          expected(faces, offered, leading, matrices, takes_work, is_watched));
    CHECK(face[0] == -1);
    for (size_t i = 1; i < offer.slot_count; i++) {
        const uint32_t s = (uint32_t)slot[i];

        CHECK(face[i] == (faces >> s & 1 ? place_of(faces, s) : -1));
    }
}

static void every_offer(void)
{
    for (uint8_t takes_work = 0; takes_work <= ZBP_DEFER_ALL; takes_work++) {
        for (uint32_t faces = 0; faces < SUBSETS; faces++) {
            zbp_layout layout;

            build(&layout, faces, takes_work);
            for (uint32_t i = 0; i < SUBSETS * SUBSETS * SUBSETS * 2; i++)
                offer_it(&layout, faces, i % SUBSETS, i / SUBSETS % SUBSETS,
                         i / SUBSETS / SUBSETS % SUBSETS, takes_work,
                         i / SUBSETS / SUBSETS / SUBSETS != 0);
            zbp_layout_fini(&layout);
        }
    }
}

int main(void)
{
    check_sees_failure();
    RUN(every_offer);
    return check_end();
}
