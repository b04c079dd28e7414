/* The weight pass against the fake shim: the same groups with each touch failing once, retries, what is refused before
 * anything is added, no memory. What happens at random is fuzz_weight_pass.c's. */
#include "check.h"
#include "draw.h"
#include "fake_shim.h"

enum { MOST_GROUPS = 4 };

static const zbp_how PLAIN = {0}, RETAIN = {.retain = true};
static zbp_held held[MOST_GROUPS];
static size_t count;
static bool is_reversed; /* W is given the last group first */

/* Linked with --wrap=malloc and --wrap=realloc. Of the code under test the pass and the core call it. */
static long mallocs_left = -1;    /* until one is refused; -1: none is */
void *__real_malloc(size_t size); /* the linker's names */
void *__wrap_malloc(size_t size);
void *__real_realloc(void *p, size_t size);
void *__wrap_realloc(void *p, size_t size);

void *__wrap_malloc(size_t size)
{
    return mallocs_left >= 0 && mallocs_left-- == 0 ? NULL : __real_malloc(size);
}

void *__wrap_realloc(void *p, size_t size)
{
    return mallocs_left >= 0 && mallocs_left-- == 0 ? NULL : __real_realloc(p, size);
}

/* ---- groups */

typedef struct group {
    const char *tasks;
    uint8_t seen[2];       /* of its two weights */
    bool has_no_gradients; /* its weights */
    bool shares;           /* its weights are those of the group before */
    bool node_saves; /* its two outside nodes, a, which leads to b and weight 0, and b, to 1 */
} group;

static void make_group(zbp_held *h, const group *g)
{
    const zbp_hop hops[] = {{.outside = 0, .slot = 0, .to_outside = 1, .to_weight = -1},
                            {.outside = 0, .slot = 1, .to_outside = -1, .to_weight = 0},
                            {.outside = 1, .slot = 0, .to_outside = -1, .to_weight = 1}};

    *h = (zbp_held){0};
    draw(&h->layout, 2, 2, g->tasks);
    for (size_t i = 0; i < sizeof hops / sizeof *hops; i++)
        REQUIRE(zbp_layout_add_hop(&h->layout, hops[i]) == ZBP_OK);
    REQUIRE(h->layout.task_count <= MOST_TASKS && h->layout.face_count <= MOST_FACES);
    for (uint32_t f = 0; f < h->layout.face_count; f++) {
        const uint8_t kind = h->layout.task[h->layout.face[f].task].kind;

        h->face[f].kind = kind == ZBP_TASK_PRODUCT ? FAKE_PRODUCT
                          : kind == ZBP_TASK_WHOLE ? FAKE_KEPT
                                                   : FAKE_COMPUTED;
    }
    for (int w = 0; w < 2; w++) {
        h->weight[w] =
            (fake_weight){.has_grad = !g->has_no_gradients, .sum = ++fake.sums, .seen = g->seen[w]};
        h->outside[w].saves = g->node_saves;
    }
    fake_count_owed(h);
    REQUIRE(zbp_book_init(&h->book, &h->layout, NULL) == ZBP_OK);
}

static void make(const group *groups)
{
    fake = (fake_world){.random = 1, .fail_at = -1};
    for (count = 0; count < MOST_GROUPS && groups[count].tasks != NULL; count++) {
        make_group(&held[count], &groups[count]);
        for (int w = 0; w < 2 && groups[count].shares; w++)
            fake_share(&held[count - 1].weight[w], &held[count].weight[w]);
    }
}

static void drop(void)
{
    const char *reason = NULL;

    for (size_t g = 0; g < count; g++) {
        CHECK_VALID(zbp_layout_check(&held[g].layout, &reason));
        CHECK_VALID(zbp_book_check(&held[g].book, &held[g].layout, &reason));
        zbp_layout_fini(&held[g].layout);
        zbp_book_fini(&held[g].book);
    }
}

static int run(zbp_how how, long fail_at, const char **raised_out)
{
    zbp_turn turn[MOST_GROUPS];
    zbp_error error = {0};
    int status;

    fake.touches = 0;
    fake.joins = 0;
    fake.order_count = 0;
    fake.fail_at = fail_at;
    for (size_t g = 0; g < count; g++) {
        zbp_held *h = &held[is_reversed ? count - 1 - g : g];

        turn[g] = (zbp_turn){&h->layout, &h->book, h};
    }
    status = zbp_pass_weights(turn, count, how, &error);
    *raised_out = error.raised;
    return status;
}

/* So often each weight has got all that it is owed, and nothing else. */
static bool has_got(int times)
{
    for (size_t g = 0; g < count; g++) {
        for (int w = 0; w < MOST_WEIGHTS; w++) {
            fake_gradient due = {0};

            for (int i = 0; i < times; i++)
                fake_add(&due, &held[g].owed[w]);
            if (memcmp(&due, &held[g].weight[w].total, sizeof due) != 0)
                return false;
        }
    }
    return true;
}

static bool all_are(uint8_t state)
{
    for (size_t g = 0; g < count; g++) {
        if (held[g].book.state != state)
            return false;
    }
    return true;
}

static void begin_round(int round)
{
    for (size_t g = 0; g < count; g++)
        held[g].rounds = round;
}

/* ---- each touch fails once */

static const group CASES[][MOST_GROUPS + 1] = {
    {{.tasks = "P0 P1"}},
    {{.tasks = "P0 P0 P1 P0"}},
    {{.tasks = "W0 D1"}},
    {{.tasks = "P0 W1", .has_no_gradients = true}},
    {{.tasks = "Pb:1 W1", .seen = {0, ZBP_WEIGHT_HOOKED}}},
    {{.tasks = "P0 W0 Da Wb"}},
    {{.tasks = "P0 P1", .seen = {ZBP_WEIGHT_HOOKED, ZBP_WEIGHT_HOOKED}}},
    {{.tasks = "P0 W1"}, {.tasks = "Wa D0"}, {.tasks = "D1 P0"}},
    {{.tasks = "P0 W0"}, {.tasks = "P0 P0"}, {.tasks = "Rb Pb:1"}},
    {{.tasks = "R01 P0"}, {.tasks = "P1"}},
    {{.tasks = "P0 W1"}, {.tasks = "P0 W1", .shares = true}, {.tasks = "P0 W1", .shares = true}},
    {{.tasks = "P0 Pb:1", .has_no_gradients = true},
     {.tasks = "P0 Pb:1", .shares = true},
     {.tasks = "P0 Pb:1", .shares = true}},
    {{.tasks = "P0"}, {.tasks = "P0 P0 P1", .shares = true}, {.tasks = "P0 P1", .shares = true}},
    {{.tasks = "P0"}, {.tasks = "Wa P0", .shares = true}, {.tasks = "P0", .shares = true}},
};
enum { CASE_COUNT = sizeof CASES / sizeof *CASES };

static void what_failed_goes_on_where_it_stopped(void)
{
    for (size_t i = 0; i < CASE_COUNT; i++) {
        for (int bits = 0; bits < 8; bits++) {
            const zbp_how how = {
                .retain = (bits & 1) != 0, .fuse = (bits & 2) != 0, .is_anomaly = (bits & 4) != 0};
            const char *raised = FAKE_FAILED;

            for (long n = 0; raised != NULL; n++) {
                int status;

                make(CASES[i]);
                status = run(how, n, &raised);
                CHECK((status == ZBP_OK) == (raised == NULL));
                if (raised != NULL) {
                    CHECK(status == ZBP_ETORCH && raised == FAKE_FAILED && fake.touches > n);
                    CHECK(fake.joins >=
                          (long)count); /* what has been added comes before what follows */
                    CHECK(run(how, -1, &raised) == ZBP_OK && raised == NULL);
                    raised = FAKE_FAILED;
                }
                CHECK(has_got(1));
                CHECK(all_are(how.retain ? ZBP_BOOK_OPEN : ZBP_BOOK_SPENT));
                if (how.retain) {
                    const char *second = NULL;

                    begin_round(1);
                    CHECK(run(PLAIN, -1, &second) == ZBP_OK && has_got(2));
                    CHECK(all_are(ZBP_BOOK_SPENT));
                }
                drop();
                REQUIRE(n < 200);
            }
        }
    }
}

/* Two failures, anywhere: the second one within the retry. */
static void a_retry_may_fail_too(void)
{
    for (size_t i = 0; i < CASE_COUNT; i++) {
        bool is_through = false;

        for (long n = 0; !is_through; n++) {
            bool retry_is_through = false;

            for (long m = 0; !is_through && !retry_is_through; m++) {
                const char *raised = NULL;

                make(CASES[i]);
                is_through = run(PLAIN, n, &raised) == ZBP_OK;
                CHECK(is_through || raised == FAKE_FAILED);
                if (!is_through) {
                    retry_is_through = run(PLAIN, m, &raised) == ZBP_OK;
                    CHECK(retry_is_through || raised == FAKE_FAILED);
                }
                if (!is_through && !retry_is_through)
                    CHECK(run(PLAIN, -1, &raised) == ZBP_OK);
                CHECK(has_got(1) && all_are(ZBP_BOOK_SPENT));
                drop();
                REQUIRE(n < 200 && m < 200);
            }
        }
    }
}

/* ---- what is refused */

static const group HALF[] = {{.tasks = "P1"}, {.tasks = "P0 P1"}, {.tasks = "W1"}, {.tasks = NULL}};

/* Group 1 has one panel of its face 0; 0 is complete, 2 has not begun. */
static void half_add(void)
{
    const char *raised = NULL;
    long n = 0;

    for (;; n++) {
        make(HALF);
        CHECK(run(PLAIN, n, &raised) == ZBP_ETORCH);
        if (held[1].book.face[0].half.panels == 1)
            return;
        drop();
        REQUIRE(n < 50);
    }
}

static void a_half_added_product_is_refused_before_anything_is_added(void)
{
    static zbp_held before[MOST_GROUPS];
    const char *raised = NULL;
    uint64_t sum;

    half_add();
    memcpy(before, held, sizeof before);
    sum = held[1].weight[0].sum;
    is_reversed = true; /* so that group 2 would come first */
    for (int i = 0; i < 4; i++) {
        held[1].weight[0].sum = i == 0 ? ++fake.sums : sum;                 /* another gradient */
        held[1].weight[1].seen = (uint8_t)(i == 1 ? ZBP_WEIGHT_HOOKED : 0); /* a hook appears */
        held[1].weight[0].has_grad = i != 2;
        CHECK(run((zbp_how){.is_anomaly = i == 3}, -1, &raised) == ZBP_ETORCH);
        CHECK(raised == FAKE_HALF && fake.touches == 1);
        held[1].weight[0].sum = sum;
        held[1].weight[1].seen = 0;
        held[1].weight[0].has_grad = true;
        CHECK(memcmp(before, held, sizeof before) == 0); /* as if nobody had called */
        CHECK(held[1].book.face[0].half.panels == 1 && held[1].book.state == ZBP_BOOK_OPEN);
    }
    CHECK(run(PLAIN, 0, &raised) == ZBP_ETORCH && raised == FAKE_FAILED); /* the look itself */
    CHECK(memcmp(before, held, sizeof before) == 0);
    CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1));
    is_reversed = false;
    drop();
}

/* Only the addition itself finds out that the gradient takes no product any more. */
static void a_gradient_may_forbid_the_rest_of_a_product(void)
{
    const char *raised = NULL;

    half_add();
    held[1].weight[0].forbids_products = true;
    CHECK(run(PLAIN, -1, &raised) == ZBP_ETORCH && raised == FAKE_HALF);
    CHECK(held[1].book.face[0].half.panels == 1 && !has_got(1));
    held[1].weight[0].forbids_products = false;
    CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1));
    drop();
}

/* A node between a task and its weight that cannot run twice: a hook behind it failed half-way through the group. */
static void a_retry_says_what_is_lost(void)
{
    static const group groups[] = {{.tasks = "Wa", .node_saves = true}, {.tasks = NULL}};
    const char *raised = NULL;
    bool was_lost = false;

    for (long n = 0; !was_lost; n++) {
        make(groups);
        if (run(PLAIN, n, &raised) != ZBP_OK && run(PLAIN, -1, &raised) != ZBP_OK) {
            was_lost = raised == FAKE_LOST;
            CHECK(raised == FAKE_LOST);
        }
        drop();
        REQUIRE(n < 50);
    }
}

/* ---- several microbatches */

static bool was_next(uint32_t *at, int number, int64_t panel)
{
    const uint32_t i = (*at)++;

    return i < fake.order_count && fake.order[i].held == &held[number] &&
           fake.order[i].panel == panel;
}

static const group THREE[] = {{.tasks = "P0 W1"},
                              {.tasks = "P0 W1", .shares = true},
                              {.tasks = "P0 W1", .shares = true},
                              {.tasks = NULL}};

static void a_sweep_adds_panel_by_panel_in_the_order_of_the_groups(void)
{
    const char *raised = NULL;
    uint32_t at = 0;

    make(THREE);
    CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1));
    for (int64_t panel = 0; panel < PANELS; panel++) {
        for (int g = 0; g < 3; g++)
            CHECK(was_next(&at, g, panel));
    }
    CHECK(at == fake.order_count);
    drop();
}

static void a_sweep_that_failed_goes_on_in_the_same_order(void)
{
    const char *raised = FAKE_FAILED;

    for (long n = 0; raised != NULL; n++) {
        uint32_t before, at;

        make(THREE);
        (void)!run(PLAIN, n, &raised);
        before = fake.order_count;
        if (raised != NULL) {
            const char *second = NULL;

            CHECK(run(PLAIN, -1, &second) == ZBP_OK && has_got(1));
            at = 0;
            for (uint32_t i = before; i < PANELS * 3; i++)
                CHECK(was_next(&at, (int)(i % 3), (int64_t)i / 3));
            CHECK(at == fake.order_count);
        }
        drop();
        REQUIRE(n < 100);
    }
}

/* Of a sweep that failed one group alone is called again, then the others. */
static void a_group_may_leave_a_sweep_that_failed(void)
{
    bool was_half = false;

    for (long n = 0; n < 40; n++) {
        const char *raised = NULL;
        zbp_turn alone;
        zbp_error error = {0};

        make(THREE);
        if (run(PLAIN, n, &raised) == ZBP_OK) {
            drop();
            break;
        }
        was_half = was_half || zbp_book_has_half(&held[1].book);
        alone = (zbp_turn){&held[1].layout, &held[1].book, &held[1]};
        fake.fail_at = -1;
        CHECK(zbp_pass_weights(&alone, 1, PLAIN, &error) == ZBP_OK && error.raised == NULL);
        CHECK(held[1].book.state == ZBP_BOOK_SPENT);
        CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1));
        drop();
    }
    CHECK(was_half);
}

static void a_sweep_begins_behind_the_product_that_becomes_the_gradient(void)
{
    static const group groups[] = {{.tasks = "P0", .has_no_gradients = true},
                                   {.tasks = "P0", .shares = true},
                                   {.tasks = "P0", .shares = true},
                                   {.tasks = NULL}};
    const char *raised = NULL;
    uint32_t at = 0;

    make(groups);
    CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1));
    for (int64_t panel = 0; panel < PANELS; panel++)
        CHECK(was_next(&at, 1, panel) && was_next(&at, 2, panel));
    CHECK(at == fake.order_count);
    drop();
}

/* What is no lone product for the weight comes between those before and behind it. */
static void a_sweep_ends_at_a_group_that_owes_more(void)
{
    static const char *const others[] = {"P0 P0", "W0", "D0"};

    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const group groups[] = {{.tasks = "P0"},
                                {.tasks = others[i], .shares = true},
                                {.tasks = "P0", .shares = true},
                                {.tasks = NULL}};
        const char *raised = NULL;
        uint32_t at = 0;

        make(groups);
        CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1));
        for (int64_t panel = 0; panel < PANELS; panel++)
            CHECK(was_next(&at, 0, panel));
        for (int64_t panel = 0; panel < PANELS; panel++)
            CHECK(was_next(&at, 2, panel));
        drop();
    }
}

static void a_weight_that_is_watched_is_not_swept(void)
{
    const char *raised = NULL;

    make(THREE);
    fake_mark(&held[0].weight[0], ZBP_WEIGHT_HOOKED);
    CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1) && fake.order_count == 0);
    for (int g = 0; g < 3; g++)
        CHECK(held[g].weight[0].hooks_called == 1);
    drop();
}

/* The paths of one microbatch may have hooks, and those of others not. */
static void what_the_engine_adds_is_left_out_of_a_sweep(void)
{
    static const group groups[] = {{.tasks = "Pb:1"},
                                   {.tasks = "Pb:1", .shares = true},
                                   {.tasks = "Pb:1", .shares = true},
                                   {.tasks = NULL}};
    const char *raised = NULL;
    uint32_t at = 0;

    make(groups);
    held[1].face[0].is_hooked = true;
    CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1));
    for (int64_t panel = 0; panel < PANELS; panel++)
        CHECK(was_next(&at, 0, panel) && was_next(&at, 2, panel));
    CHECK(at == fake.order_count);
    drop();
}

static void a_gradient_that_takes_no_product_is_not_swept(void)
{
    static const group groups[] = {{.tasks = "P0"},
                                   {.tasks = "P0", .shares = true},
                                   {.tasks = "P0", .shares = true},
                                   {.tasks = "P0", .shares = true},
                                   {.tasks = NULL}};
    const char *raised = NULL;

    make(groups);
    for (size_t g = 0; g < count; g++)
        held[g].weight[0].forbids_products = true;
    CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1) && fake.order_count == 0);
    drop();
}

static void replace_the_gradient(void)
{
    fake_replace_gradient(&held[1].weight[0], true);
}

/* While the first group is added the gradient becomes another, and the last one, half added, cannot go on. */
static void a_sweep_ends_at_a_group_that_is_refused(void)
{
    static const group groups[] = {{.tasks = "W1"},
                                   {.tasks = "P0", .shares = true},
                                   {.tasks = "P0", .shares = true},
                                   {.tasks = NULL}};
    const char *raised = NULL;
    bool is_half = false;

    for (long n = 0; !is_half; n++) {
        zbp_error error = {0};
        zbp_turn alone;

        make(groups);
        alone = (zbp_turn){&held[2].layout, &held[2].book, &held[2]};
        fake.fail_at = n;
        CHECK(zbp_pass_weights(&alone, 1, PLAIN, &error) == ZBP_ETORCH);
        is_half = held[2].book.face[0].half.panels == 1;
        if (!is_half)
            drop();
        REQUIRE(n < 50);
    }
    fake.surprise = replace_the_gradient;
    CHECK(run(PLAIN, -1, &raised) == ZBP_ETORCH && raised == FAKE_HALF);
    CHECK(memcmp(&held[1].owed[0], &held[1].weight[0].total, sizeof held[1].owed[0]) == 0);
    CHECK(held[2].book.face[0].half.panels == 1);
    drop();
}

/* ---- what I kept */

static void a_kept_gradient_goes_when_it_is_added(void)
{
    static const group groups[] = {{.tasks = "W0 W1"}, {.tasks = NULL}};
    const char *raised = FAKE_FAILED;

    for (long n = 0; raised != NULL; n++) {
        make(groups);
        (void)!run(PLAIN, n, &raised);
        for (int f = 0; f < 2; f++)
            CHECK((held[0].face[f].kind == FAKE_GONE) == (held[0].weight[f].total.of[f][0] == 1));
        drop();
        REQUIRE(n < 50);
    }
    make(groups);
    CHECK(run(RETAIN, -1, &raised) == ZBP_OK && held[0].face[0].kind == FAKE_KEPT);
    drop();
}

/* ---- what others do meanwhile */

static void hook_the_second_group(void)
{
    held[1].weight[0].seen = ZBP_WEIGHT_HOOKED;
}

static void a_group_is_looked_at_again_before_it_runs(void)
{
    static const group groups[] = {{.tasks = "W0"}, {.tasks = "P0"}, {.tasks = NULL}};
    const char *raised = NULL;

    make(groups);
    fake.surprise = hook_the_second_group;
    CHECK(run(PLAIN, -1, &raised) == ZBP_OK && has_got(1));
    CHECK(held[1].weight[0].hooks_called == 1);
    drop();
}

/* ---- no memory */

static void without_memory_nothing_is_added(void)
{
    static const group groups[] = {{.tasks = "P0 P1"}, {.tasks = "W0"}, {.tasks = NULL}};
    int refused = 0;

    for (long n = 0; n == refused; n++) {
        const char *raised = NULL;
        int status;

        make(groups);
        mallocs_left = n;
        status = run(PLAIN, -1, &raised);
        mallocs_left = -1;
        CHECK(raised == NULL && (status == ZBP_OK || status == ZBP_ENOMEM));
        if (status != ZBP_OK) {
            refused++;
            CHECK(has_got(0) ||
                  refused > 2); /* the second group's own memory comes behind the first one */
            CHECK(run(PLAIN, -1, &raised) == ZBP_OK);
        }
        CHECK(has_got(1));
        drop();
    }
    CHECK(refused >= 4);
}

static void no_group_at_all(void)
{
    const char *raised = NULL;

    make((group[]){{.tasks = NULL}});
    CHECK(run(PLAIN, -1, &raised) == ZBP_OK && fake.touches == 1); /* the run that has no group */
    CHECK(run(PLAIN, 0, &raised) == ZBP_ETORCH && raised == FAKE_FAILED);
}

int main(void)
{
    check_sees_failure();
    RUN(what_failed_goes_on_where_it_stopped);
    RUN(a_retry_may_fail_too);
    RUN(a_half_added_product_is_refused_before_anything_is_added);
    RUN(a_gradient_may_forbid_the_rest_of_a_product);
    RUN(a_retry_says_what_is_lost);
    RUN(a_sweep_adds_panel_by_panel_in_the_order_of_the_groups);
    RUN(a_sweep_that_failed_goes_on_in_the_same_order);
    RUN(a_group_may_leave_a_sweep_that_failed);
    RUN(a_sweep_begins_behind_the_product_that_becomes_the_gradient);
    RUN(a_sweep_ends_at_a_group_that_owes_more);
    RUN(a_weight_that_is_watched_is_not_swept);
    RUN(what_the_engine_adds_is_left_out_of_a_sweep);
    RUN(a_gradient_that_takes_no_product_is_not_swept);
    RUN(a_sweep_ends_at_a_group_that_is_refused);
    RUN(a_kept_gradient_goes_when_it_is_added);
    RUN(a_group_is_looked_at_again_before_it_runs);
    RUN(without_memory_nothing_is_added);
    RUN(no_group_at_all);
    return check_end();
}
