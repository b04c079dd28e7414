/* Sums in I: random layouts, facts, orders of arrival and fates against what Note [Sums in I] says, done naively;
 * failing allocations; the validator. */
#include "check.h"
#include "core/graph/zbp_graph.h"
#include "core/pass/zbp_folds.h"
#include "core/pass/zbp_policy.h"
#include "counting.h"
#include "draw.h"

enum { TASKS = 7, WEIGHTS = 3, FACES = 16 };

static uint32_t random_state = 11;

static uint32_t random_below(uint32_t n)
{
    random_state = random_state * 1664525u + 1013904223u;
    return (random_state >> 8) % n;
}

static bool mostly(void)
{
    return random_below(12) != 0;
}

typedef struct facts {
    bool is_bound[TASKS], is_plain[WEIGHTS];
} facts;

static void build(zbp_layout *layout, facts *known)
{
    const uint32_t tasks = random_below(TASKS + 1);

    zbp_layout_init(layout, WEIGHTS, 1, NULL);
    for (uint32_t w = 0; w < WEIGHTS; w++)
        known->is_plain[w] = mostly();
    for (uint32_t t = 0; t < tasks; t++) {
        REQUIRE(zbp_layout_add_task(layout, mostly() ? ZBP_TASK_WHOLE : ZBP_TASK_PRODUCT,
                                    random_below(5)) == ZBP_OK);
        layout->task[t].stream = mostly() ? 1 : 2;
        layout->task[t].takes_work = mostly() ? ZBP_DEFER_NOTHING : ZBP_DEFER_ALL;
        known->is_bound[t] = mostly();
        for (uint32_t f = random_below(3); f > 0 && layout->face_count < FACES; f--) {
            zbp_face face = {.slot = f, .weight = -1, .outside = -1};

            if (mostly() || mostly())
                face.weight = (int32_t)random_below(WEIGHTS);
            else
                face.outside = 0;
            face.flag = mostly() ? ZBP_FACE_SIMPLE : 0;
            REQUIRE(zbp_layout_add_face(layout, face) == ZBP_OK);
        }
    }
}

/* Which faces of the weight are summed, in their order. */
static uint32_t naive(const zbp_layout *layout, const facts *known, uint32_t weight, uint32_t *list)
{
    uint32_t order[2 * TASKS], count = 0;

    zbp_layout_order(layout, order);
    for (uint32_t t = 0; t < layout->task_count; t++) {
        const zbp_task *task = &layout->task[order[t]];

        for (uint32_t f = task->face_begin; f < task->face_end; f++)
            if (layout->face[f].weight < 0)
                return count;
        for (uint32_t f = task->face_begin; f < task->face_end; f++) {
            const zbp_task *before =
                count > 0 ? &layout->task[layout->face[list[count - 1]].task] : NULL;

            if (layout->face[f].weight != (int32_t)weight)
                continue;
            if (task->kind != ZBP_TASK_WHOLE || !known->is_bound[order[t]] ||
                task->takes_work != ZBP_DEFER_NOTHING || layout->face[f].flag != ZBP_FACE_SIMPLE ||
                !known->is_plain[weight])
                return count;
            if (before != NULL && (before == task || before->stream != task->stream))
                return count;
            list[count++] = f;
        }
    }
    return count;
}

/* Faces come in any order; each addition is done as soon as all before have come, in the sum's order, to its end. */
static void play(zbp_folds *folds, const zbp_layout *layout, const facts *known)
{
    uint32_t list[WEIGHTS][FACES], count[WEIGHTS], added[WEIGHTS], ends_at[WEIGHTS], order[FACES];
    bool has_come[FACES] = {0}, is_own[WEIGHTS] = {0};
    zbp_fold_step step;

    for (uint32_t w = 0; w < WEIGHTS; w++) {
        count[w] = naive(layout, known, w, list[w]);
        added[w] = 1;
        ends_at[w] = random_below(2) == 0 ? random_below(FACES) : FACES;
    }
    for (uint32_t i = 0; i < layout->face_count; i++) {
        const uint32_t j = random_below(i + 1);

        order[i] = order[j];
        order[j] = i;
    }
    for (uint32_t i = 0; i < layout->face_count; i++) {
        const int32_t w = layout->face[order[i]].weight;

        zbp_folds_come(folds, order[i]);
        has_come[order[i]] = true;
        while (zbp_folds_step(folds, order[i], &step)) {
            const int fate = added[w] >= ends_at[w] ? ZBP_FOLD_ENDS
                             : random_below(3) == 0 ? ZBP_FOLD_EMPTY
                                                    : ZBP_FOLD_ADDED;

            REQUIRE(w >= 0 && added[w] < count[w]);
            CHECK(step.sum == list[w][0] && step.next == list[w][added[w]]);
            CHECK(step.is_own == is_own[w] && has_come[step.sum] && has_come[step.next]);
            zbp_folds_done(folds, &step, fate);
            is_own[w] = is_own[w] || fate == ZBP_FOLD_ADDED;
            added[w] = fate == ZBP_FOLD_ENDS ? FACES + 1 : added[w] + 1;
        }
        for (uint32_t v = 0; v < WEIGHTS; v++) /* nothing that could be added waits */
            CHECK(count[v] == 0 || !has_come[list[v][0]] || added[v] >= count[v] ||
                  !has_come[list[v][added[v]]]);
    }
}

static void sums_are_those_that_the_note_says(void)
{
    uint32_t sums = 0;

    for (int round = 0; round < 20000; round++) {
        zbp_layout layout;
        zbp_folds folds;
        facts known;
        const char *reason = "?";

        build(&layout, &known);
        REQUIRE(zbp_folds_init(&folds, &layout, known.is_bound, known.is_plain, NULL) == ZBP_OK);
        CHECK_VALID(zbp_folds_check(&folds, &layout, &reason));
        sums += folds.face_count > 0;
        play(&folds, &layout, &known);
        reason = "?";
        CHECK_VALID(zbp_folds_check(&folds, &layout, &reason));
        zbp_folds_fini(&folds);
        zbp_layout_fini(&layout);
    }
    CHECK(sums > 1000);
}

static void drawn(zbp_layout *layout, const char *tasks)
{
    draw(layout, WEIGHTS, 1, tasks);
    for (uint32_t f = 0; f < layout->face_count; f++)
        layout->face[f].flag = ZBP_FACE_SIMPLE;
}

static const facts ALL = {{true, true, true, true, true, true, true}, {true, true, true}};

/* A group that sums nothing pays nothing. */
static void what_sums_nothing_keeps_no_memory(void)
{
    static const char *const nothing[] = {"", "W", "W0", "W0 W1 W2", "W00", "P0 P0", "Wa W0 W0"};
    counting c;
    const zbp_alloc alloc = counting_alloc(&c);

    for (size_t i = 0; i < sizeof nothing / sizeof *nothing; i++) {
        zbp_layout layout;
        zbp_folds folds;
        zbp_fold_step step;

        drawn(&layout, nothing[i]);
        REQUIRE(zbp_folds_init(&folds, &layout, ALL.is_bound, ALL.is_plain, &alloc) == ZBP_OK);
        CHECK(c.live == 0 && folds.face_count == 0);
        zbp_folds_come(&folds, 0);
        CHECK(!zbp_folds_step(&folds, 0, &step));
        zbp_folds_fini(&folds);
        zbp_layout_fini(&layout);
    }
}

static void a_failed_allocation_leaves_nothing(void)
{
    counting c;
    const zbp_alloc alloc = counting_alloc(&c);
    zbp_layout layout;
    zbp_folds folds;
    long n = 0;

    drawn(&layout, "W0 W0 W01");
    for (int status = ZBP_ENOMEM; status != ZBP_OK; n++) {
        c.fail_at = c.calls + n;
        status = zbp_folds_init(&folds, &layout, ALL.is_bound, ALL.is_plain, &alloc);
        CHECK(status == ZBP_OK || (status == ZBP_ENOMEM && folds.sum == NULL && c.live == 0));
    }
    CHECK(n == 3 && c.live == 1); /* the scratch has gone */
    zbp_folds_fini(&folds);
    CHECK(c.live == 0);
    zbp_layout_fini(&layout);
}

static void the_validator_sees_each_fault(void)
{
    zbp_layout layout, other;
    zbp_folds folds;
    const char *reason;

    drawn(&layout, "W01 W0 W0 W1 W2");
    drawn(&other, "W0 W0");
    REQUIRE(zbp_folds_init(&folds, &layout, ALL.is_bound, ALL.is_plain, NULL) == ZBP_OK);
    CHECK(zbp_folds_check(&folds, &layout, NULL) == ZBP_OK);
    CHECK(zbp_folds_check(&folds, &other, &reason) == ZBP_EINVAL);
    struct {
        uint32_t *at, value;
    } const fault[] = {
        {&folds.next[5], 0}, {&folds.due[5], 0},  {&folds.sum[0], 99}, {&folds.sum[0], 3},
        {&folds.sum[4], 0},  {&folds.due[2], 3},  {&folds.next[0], 1}, {&folds.next[0], 77},
        {&folds.due[0], 0},  {&folds.due[0], 77}, {&folds.due[0], 1},
    };
    for (size_t i = 0; i < sizeof fault / sizeof *fault; i++) {
        const uint32_t was = *fault[i].at;

        *fault[i].at = fault[i].value;
        CHECK(zbp_folds_check(&folds, &layout, &reason) == ZBP_EINVAL && reason != NULL);
        *fault[i].at = was;
    }
    for (int32_t weight = -1; weight < WEIGHTS; weight++) {
        layout.face[0].weight = weight;
        CHECK(zbp_folds_check(&folds, &layout, NULL) == (weight == 0 ? ZBP_OK : ZBP_EINVAL));
    }
    zbp_folds_fini(&folds);
    zbp_layout_fini(&layout);
    zbp_layout_fini(&other);
}

int main(void)
{
    check_sees_failure();
    RUN(sums_are_those_that_the_note_says);
    RUN(what_sums_nothing_keeps_no_memory);
    RUN(a_failed_allocation_leaves_nothing);
    RUN(the_validator_sees_each_fault);
    return check_end();
}
