/* The book of random groups, through a W that fails anywhere and is called again, against a count of deliveries: each
 * face's gradient comes to its weight once per W.
 *
 * An outside node leads to one weight. A gradient is a count per face. */
#include "check.h"
#include "checks.h"
#include "core/pass/zbp_book.h"
#include "model.h"

enum { WEIGHTS = 4, OUTSIDES = 2, FACES = 8, CALLS = 10 };

typedef int counts[FACES];

static struct {
    zbp_layout layout;
    zbp_book book;
    uint32_t behind[OUTSIDES];
    counts owed[WEIGHTS], added[WEIGHTS], waiting[WEIGHTS];
    bool is_released;
    int rounds, hooks_called[WEIGHTS];
    uint64_t random;
    long touches, fail_at;
} sim;

static struct {
    int complete, again, retried, released, alone, by_engine;
} met;

static bool fails(void)
{
    return sim.touches++ == sim.fail_at;
}

static uint32_t target_of(uint32_t face)
{
    const zbp_face *f = &sim.layout.face[face];

    return f->weight >= 0 ? (uint32_t)f->weight : sim.behind[f->outside];
}

static void make_group(uint64_t seed)
{
    const uint32_t tasks = 1 + (uint32_t)(seed % 4), weights = 1 + (uint32_t)(seed / 4 % WEIGHTS);

    memset(&sim, 0, sizeof sim);
    sim.random = seed;
    zbp_layout_init(&sim.layout, weights, OUTSIDES, NULL);
    for (uint32_t o = 0; o < OUTSIDES; o++) {
        sim.behind[o] = model_below(&sim.random, weights);
        REQUIRE(zbp_layout_add_hop(&sim.layout, (zbp_hop){.outside = o,
                                                          .to_outside = -1,
                                                          .to_weight = (int32_t)sim.behind[o]}) ==
                ZBP_OK);
    }
    for (uint32_t t = 0; t < tasks; t++) {
        const uint8_t kind = (uint8_t)model_below(&sim.random, ZBP_TASK_ROOT + 1);

        REQUIRE(zbp_layout_add_task(&sim.layout, kind, model_below(&sim.random, 4)) == ZBP_OK);
        sim.layout.task[t].leaves_packed =
            kind == ZBP_TASK_PRODUCT && model_below(&sim.random, 16) == 0;
        sim.layout.task[t].has_work = kind == ZBP_TASK_WHOLE && model_below(&sim.random, 16) == 0;
        for (uint32_t i = model_below(&sim.random, 2); i < 2; i++) {
            const uint32_t way = model_below(&sim.random, 8), o = model_below(&sim.random, 2);
            zbp_face face = {.weight = (int32_t)model_below(&sim.random, weights), .outside = -1};

            if (way < 2) { /* to a node, perhaps by a path to its weight */
                face.outside = (int32_t)o;
                face.weight = way == 0 ? -1 : (int32_t)sim.behind[o];
                face.flag = way == 0 ? 0 : ZBP_FACE_PATH;
            }
            REQUIRE(zbp_layout_add_face(&sim.layout, face) == ZBP_OK);
        }
    }
    for (uint32_t f = 0; f < sim.layout.face_count; f++)
        sim.owed[target_of(f)][f]++;
    REQUIRE(zbp_book_init(&sim.book, &sim.layout, NULL) == ZBP_OK);
}

static int sum_of(const counts of)
{
    int sum = 0;

    for (int f = 0; f < FACES; f++)
        sum += of[f];
    return sum;
}

static bool add_alone(zbp_how how)
{
    for (uint32_t w = 0; w < sim.book.weight_count; w++) {
        const uint32_t face = sim.book.weight[w].alone;

        if (face == ZBP_NO_FACE)
            continue;
        CHECK(!how.is_anomaly && !sim.is_released && sim.book.weight[w].seen == 0);
        CHECK(sim.owed[w][face] == 1 && sum_of(sim.owed[w]) == 1);
        if (fails())
            return false;
        sim.added[w][face]++;
        zbp_book_added_alone(&sim.book, w);
        met.alone++;
    }
    return true;
}

/* As a sink does: it notes its failure, and lets the others run. */
static bool run_sink(uint32_t w)
{
    zbp_book_arrived(&sim.book, w);
    if (!sim.book.weight[w].is_hooked) {
        if (fails())
            return false;
        sim.hooks_called[w]++;
        zbp_book_hooked(&sim.book, w);
    }
    if (fails())
        return false;
    for (int f = 0; f < FACES; f++)
        sim.added[w][f] += sim.waiting[w][f];
    met.by_engine++;
    if (zbp_book_added(&sim.book, w))
        sim.is_released = true;
    return !fails(); /* a hook behind the addition */
}

static bool run_engine(zbp_how how)
{
    bool has[WEIGHTS] = {0}, is_through = true;

    zbp_book_give_up_paths(&sim.book, &sim.layout);
    zbp_book_begin_run(&sim.book, how.retain);
    for (uint32_t w = 0; w < sim.book.weight_count; w++) {
        has[w] = sim.book.weight[w].has_arrived;
        if (!has[w])
            memset(sim.waiting[w], 0, sizeof sim.waiting[w]);
    }
    for (uint32_t f = 0; f < sim.layout.face_count; f++) {
        const uint32_t w = target_of(f);

        if (!zbp_book_wants_face(&sim.book, &sim.layout, f) || !zbp_book_wants(&sim.book, w))
            continue;
        CHECK(!sim.is_released && (sim.layout.face[f].flag & ZBP_FACE_PATH) == 0);
        if (fails())
            return false;
        sim.waiting[w][f]++;
        has[w] = true;
    }
    for (uint32_t w = 0; w < sim.book.weight_count; w++)
        is_through = (!has[w] || run_sink(w)) && is_through;
    return is_through;
}

static void check_counts(bool is_complete)
{
    const char *reason = NULL;

    CHECK_VALID(zbp_book_check(&sim.book, &sim.layout, &reason));
    for (int w = 0; w < WEIGHTS; w++) {
        for (int f = 0; f < FACES; f++) {
            const int now = sim.added[w][f] - sim.rounds * sim.owed[w][f];

            CHECK(now >= (is_complete ? sim.owed[w][f] : 0) && now <= sim.owed[w][f]);
        }
        CHECK(sim.hooks_called[w] <= 1);
    }
    if (is_complete) {
        sim.rounds++;
        memset(sim.hooks_called, 0, sizeof sim.hooks_called);
    }
}

static void call_once(void)
{
    const zbp_how how = {.retain = model_below(&sim.random, 4) == 0,
                         .is_anomaly = model_below(&sim.random, 8) == 0};
    const bool was_retry = sim.book.has_failed;
    bool failed;

    sim.touches = 0;
    sim.fail_at = model_below(&sim.random, 3) > 0 ? (long)model_below(&sim.random, 20) : -1;
    for (uint32_t w = 0; w < sim.book.weight_count; w++)
        zbp_book_see_weight(&sim.book, w, model_below(&sim.random, 6) == 0 ? ZBP_WEIGHT_HOOKED : 0);
    zbp_book_find_alone(&sim.book, &sim.layout, how);
    failed = !add_alone(how) || !run_engine(how);
    met.retried += was_retry && !failed;
    switch (zbp_book_settle(&sim.book, how, failed)) {
    case ZBP_FATE_KEEP:
        CHECK(failed);
        check_counts(false);
        break;
    case ZBP_FATE_AGAIN:
        CHECK(!failed && how.retain && !was_retry && !sim.is_released);
        met.again++;
        check_counts(true);
        break;
    case ZBP_FATE_RELEASE:
        CHECK(failed && !how.retain);
        met.released++;
        sim.is_released = true;
        zbp_layout_clear(&sim.layout);
        check_counts(false);
        break;
    case ZBP_FATE_CLOSE:
        CHECK(!failed && (!how.retain || was_retry));
        met.complete++;
        zbp_layout_fini(&sim.layout);
        zbp_book_close(&sim.book);
        check_counts(true);
        break;
    }
}

static void each_face_is_delivered_once(void)
{
    for (uint64_t seed = 1; seed <= 4000; seed++) {
        make_group(seed);
        for (int i = 0; i < CALLS && sim.book.state != ZBP_BOOK_SPENT; i++)
            call_once();
        zbp_book_fini(&sim.book);
        zbp_layout_fini(&sim.layout);
        if (check_failures > 0) {
            fprintf(stderr, "with seed %llu\n", (unsigned long long)seed);
            break;
        }
    }
    CHECK(met.complete > 100 && met.again > 100 && met.retried > 100 && met.released > 100 &&
          met.alone > 1000 && met.by_engine > 1000);
}

int main(void)
{
    check_sees_failure();
    RUN(each_face_is_delivered_once);
    return check_end();
}
