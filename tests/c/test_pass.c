/* The weight pass against the fake shim: what is alone and what is not, how often the engine runs,
 * when groups let go, no memory. Failures anywhere, retries, hooks, frozen weights and calls of some
 * groups are fuzz_weight_pass.c's. */
#include "check.h"
#include "counting.h"
#include "draw.h"
#include "fake_shim.h"

static const zbp_how PLAIN = {0}, RETAIN = {.retain = true}, ANOMALY = {.is_anomaly = true};
static fake_group held[MOST_HELD];
static size_t held_count;

/* ---- groups */

typedef struct group {
    const char *tasks;
    uint8_t seen[2]; /* of its two weights */
    bool shares;     /* its weights are those of the group before */
    bool node_saves; /* its two outside nodes, a, which leads to b and weight 0, and b, to 1 */
} group;

static void make_group(fake_group *h, const group *g)
{
    const zbp_hop hops[] = {{.outside = 0, .slot = 0, .to_outside = 1, .to_weight = -1},
                            {.outside = 0, .slot = 1, .to_outside = -1, .to_weight = 0},
                            {.outside = 1, .slot = 0, .to_outside = -1, .to_weight = 1}};
    const bool has_second = strpbrk(g->tasks, "1ab") != NULL;

    *h = (fake_group){0};
    draw(&h->as.layout, has_second ? 2 : 1, has_second ? 2 : 0, g->tasks);
    for (size_t i = 0; has_second && i < sizeof hops / sizeof *hops; i++)
        REQUIRE(zbp_layout_add_hop(&h->as.layout, hops[i]) == ZBP_OK);
    REQUIRE(h->as.layout.task_count <= MOST_TASKS && h->as.layout.face_count <= MOST_FACES);
    for (int w = 0; w < 2; w++) {
        h->weight[w].seen = g->seen[w];
        h->outside[w].saves = g->node_saves;
    }
    fake_open(h);
}

static void make(const group *groups)
{
    fake = (fake_world){.random = 1, .fail_at = -1};
    for (held_count = 0; held_count < MOST_HELD && groups[held_count].tasks != NULL; held_count++) {
        make_group(&held[held_count], &groups[held_count]);
        for (int w = 0; w < 2 && groups[held_count].shares; w++)
            fake_share(&held[held_count - 1].weight[w], &held[held_count].weight[w]);
    }
}

static void drop(void)
{
    for (size_t g = 0; g < held_count; g++) {
        zbp_layout_fini(&held[g].as.layout);
        zbp_book_close(&held[g].as.book);
    }
}

static int run(zbp_how how, long fail_at, const char **raised_out)
{
    fake_group *taken[MOST_HELD] = {NULL};
    zbp_error error = {0};
    int status;

    for (size_t g = 0; g < held_count; g++)
        taken[g] = &held[g];
    fake.fail_at = fail_at;
    status = fake_call(taken, held_count, how, &error);
    *raised_out = error.raised;
    return status;
}

static int run_well(zbp_how how)
{
    const char *raised = NULL;

    return run(how, -1, &raised);
}

/* So often each weight has got all that it is owed, and nothing else. */
static bool has_got(int times)
{
    for (size_t g = 0; g < held_count; g++) {
        for (int w = 0; w < MOST_WEIGHTS; w++) {
            fake_gradient due = {0};

            fake_add(&due, &held[g].owed[w], times);
            if (memcmp(&due, &held[g].weight[w].total, sizeof due) != 0)
                return false;
        }
    }
    return true;
}

static bool are_all(bool spent)
{
    for (size_t g = 0; g < held_count; g++) {
        if (held[g].as.book.is_spent != spent)
            return false;
    }
    return true;
}

static bool was_alone(size_t g, int w)
{
    return held[g].weight[w].added_in == fake.call && held[g].weight[w].was_alone;
}

/* ---- who is alone */

static void what_is_alone_runs_without_the_engine(void)
{
    make((group[]){{.tasks = "P0 W1"}, {.tasks = "P0 Pb:1"}, {.tasks = NULL}});
    CHECK(run_well(PLAIN) == ZBP_OK && has_got(1) && fake.runs == 0);
    for (size_t g = 0; g < 2; g++)
        CHECK(was_alone(g, 0) && was_alone(g, 1));
    drop();
    make((group[]){{.tasks = "P0 W1"}, {.tasks = NULL}});
    CHECK(run_well(ANOMALY) == ZBP_OK && has_got(1) && fake.runs == 1); /* which is to tell of it */
    drop();
}

static void a_weight_is_the_engines_in_all_groups_or_in_none(void)
{
    static const char *const others[] = {"P0 P0", "D0", "W0 W0", "R0"};

    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        for (size_t at = 0; at < 3; at++) {
            group groups[] = {{.tasks = "P0 W1"},
                              {.tasks = "P0 W1", .shares = true},
                              {.tasks = "P0 W1", .shares = true},
                              {.tasks = NULL}};

            groups[at].tasks = others[i];
            make(groups);
            CHECK(run_well(PLAIN) == ZBP_OK && has_got(1) && fake.runs == 3);
            for (size_t g = 0; g < 3; g++)
                CHECK(!was_alone(g, 0) && was_alone(g, 1) == (g != at));
            drop();
        }
    }
}

static void groups_without_a_common_weight_run_at_once(void)
{
    make((group[]){{.tasks = "D0"},
                   {.tasks = "D0"},
                   {.tasks = "D0", .shares = true}, /* with the second one: the next run */
                   {.tasks = "D0"},
                   {.tasks = NULL}});
    CHECK(run_well(PLAIN) == ZBP_OK && has_got(1) && fake.runs == 2);
    drop();
}

/* ---- what becomes of groups */

/* The first group lets go before the second one, which fails, begins. */
static void a_complete_group_lets_go_at_once(void)
{
    const char *raised = NULL;

    for (int retain = 0; retain < 2; retain++) {
        make((group[]){{.tasks = "P0"}, {.tasks = "D0 P1"}, {.tasks = NULL}});
        CHECK(run(retain != 0 ? RETAIN : PLAIN, 6, &raised) == ZBP_ETORCH);
        CHECK(zbp_book_is_complete(&held[0].as.book) && !zbp_book_is_complete(&held[1].as.book));
        CHECK(held[0].is_released == (retain == 0) && !held[1].is_released);
        CHECK((held[0].as.layout.task_count == 0) == (retain == 0));
        for (int i = 0; i < 2; i++) /* it is given again, as often as the others fail */
            CHECK(run(PLAIN, 0, &raised) == ZBP_ETORCH && are_all(false));
        CHECK(held[0].is_released && held[0].as.layout.task_count == 0);
        CHECK(run_well(PLAIN) == ZBP_OK && has_got(1) && are_all(true));
        drop();
    }
}

/* ---- no memory */

static void without_memory_it_can_be_repeated(void)
{
    int refused = 0;

    for (long n = 0; n == refused; n++) {
        const char *raised = NULL;
        int status;

        make((group[]){{.tasks = "P0 D1"}, {.tasks = "D0 P1", .shares = true}, {.tasks = NULL}});
        counting_begin(n);
        status = run(PLAIN, -1, &raised);
        counting_begin(-1);
        CHECK(raised == NULL && (status == ZBP_OK || status == ZBP_ENOMEM));
        if (status != ZBP_OK) {
            refused++;
            CHECK(n > 0 || has_got(0));
            CHECK(run_well(PLAIN) == ZBP_OK);
        }
        CHECK(has_got(1) && are_all(true));
        drop();
    }
    CHECK(refused == 3); /* who is alone; two runs */
}

static void no_group_at_all(void)
{
    const char *raised = NULL;

    make((group[]){{.tasks = NULL}});
    CHECK(run(PLAIN, 0, &raised) == ZBP_OK && fake.touches == 0 && raised == NULL);
}

int main(void)
{
    check_sees_failure();
    RUN(what_is_alone_runs_without_the_engine);
    RUN(a_weight_is_the_engines_in_all_groups_or_in_none);
    RUN(groups_without_a_common_weight_run_at_once);
    RUN(a_complete_group_lets_go_at_once);
    RUN(without_memory_it_can_be_repeated);
    RUN(no_group_at_all);
    return check_end();
}
