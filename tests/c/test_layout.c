/* Layouts: what may be added, paths given up, failing allocations. */
#include "check.h"
#include "core/pass/zbp_layout.h"
#include "counting.h"

static const zbp_face TO_WEIGHT = {.weight = 0, .outside = -1};

static void adds_faces_to_the_last_task(void)
{
    zbp_layout layout = {0};

    layout = (zbp_layout){.weight_count = 2, .outside_count = 1};
    REQUIRE(zbp_layout_add_task(&layout, ZBP_TASK_PRODUCT, 7) == ZBP_OK);
    REQUIRE(zbp_layout_add_face(&layout, TO_WEIGHT) == ZBP_OK);
    REQUIRE(zbp_layout_add_task(&layout, ZBP_TASK_ROOT, 9) == ZBP_OK);
    REQUIRE(zbp_layout_add_face(&layout, (zbp_face){.weight = -1, .outside = 0}) == ZBP_OK);
    REQUIRE(zbp_layout_add_face(
                &layout, (zbp_face){.weight = 1, .outside = 0, .is_viewed = true}) == ZBP_OK);
    CHECK(layout.task[0].face_begin == 0 && layout.task[0].face_end == 1);
    CHECK(layout.task[1].face_begin == 1 && layout.task[1].face_end == 3);
    CHECK(layout.face[2].task == 1);
    zbp_layout_give_up_path(&layout, 2);
    CHECK(layout.face[2].weight == -1 && layout.face[2].outside == 0 &&
          !layout.face[2].is_transposed && !layout.face[2].is_viewed);
    zbp_layout_give_up_path(&layout, 0); /* it has none */
    CHECK(layout.face[0].weight == 0);
    zbp_layout_fini(&layout);
}

/* Indices are held as int32_t, too. */
static void arrays_end_before_their_indices_do(void)
{
    enum { MOST = INT32_MAX };
    zbp_layout layout = {.task_count = MOST,
                         .task_capacity = MOST,
                         .face_count = MOST,
                         .face_capacity = MOST,
                         .weight_count = 1};

    CHECK(zbp_layout_add_task(&layout, ZBP_TASK_WHOLE, 1) == ZBP_ENOMEM);
    CHECK(zbp_layout_add_face(&layout, TO_WEIGHT) == ZBP_ENOMEM);
    CHECK(layout.task_count == MOST && layout.task == NULL && layout.task_capacity == MOST);
    CHECK(layout.face_count == MOST && layout.face == NULL && layout.face_capacity == MOST);
}

static int build(zbp_layout *layout)
{
    int status = ZBP_OK;

    for (uint32_t i = 0; i < 9 && status == ZBP_OK; i++) {
        status = zbp_layout_add_task(layout, ZBP_TASK_PRODUCT, i);
        if (status == ZBP_OK)
            status = zbp_layout_add_face(layout, TO_WEIGHT);
        if (status == ZBP_OK)
            status = zbp_layout_add_hop(layout, (zbp_hop){.outside = 0, .to_outside = -1});
    }
    return status;
}

static void a_failed_allocation_leaves_it_as_it_was(void)
{
    int status = ZBP_ENOMEM;

    for (long n = 0; status != ZBP_OK; n++) {
        zbp_layout layout;

        counting_begin(-1);
        count.fail_at = n;
        layout = (zbp_layout){.weight_count = 1, .outside_count = 1};
        status = build(&layout);
        count.fail_at = -1;
        CHECK(status == ZBP_OK || status == ZBP_ENOMEM);
        zbp_layout_fini(&layout);
        CHECK(count.live == 0);
        REQUIRE(n < 100);
    }
}

int main(void)
{
    check_sees_failure();
    RUN(adds_faces_to_the_last_task);
    RUN(arrays_end_before_their_indices_do);
    RUN(a_failed_allocation_leaves_it_as_it_was);
    return check_end();
}
