/* The book of random groups, through a W that fails anywhere and is called again, against a count of deliveries: each
 * face's gradient comes to its weight once per W, whole, or is refused.
 *
 * An outside node leads to one weight. A gradient is a count per face and panel. */
#include "check.h"
#include "core/pass/zbp_book.h"
#include "model.h"

enum { WEIGHTS = 4, OUTSIDES = 2, FACES = 8, PANELS = 3, CALLS = 10 };

typedef int counts[FACES][PANELS];

static struct {
    zbp_layout layout;
    zbp_book book;
    uint32_t behind[OUTSIDES];
    counts owed[WEIGHTS], added[WEIGHTS], waiting[WEIGHTS];
    bool is_product[FACES], is_hooked[FACES], is_released;
    uint64_t sum[WEIGHTS], sums;
    int rounds, hooks_called[WEIGHTS];
    uint64_t random;
    long touches, fail_at;
} sim;

static struct {
    int complete, again, refused, retried, released, unreported;
} met;

static bool fails(void)
{
    return sim.touches++ == sim.fail_at;
}

static void add_face(counts to, uint32_t face)
{
    for (int p = 0; p < PANELS; p++)
        to[face][p]++;
}

static void add_counts(counts to, counts what)
{
    for (int f = 0; f < FACES; f++) {
        for (int p = 0; p < PANELS; p++)
            to[f][p] += what[f][p];
    }
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
    for (uint32_t o = 0; o < OUTSIDES; o++)
        sim.behind[o] = model_below(&sim.random, weights);
    for (uint32_t t = 0; t < tasks; t++) {
        const bool is_product = model_below(&sim.random, 3) > 0;

        REQUIRE(zbp_layout_add_task(&sim.layout, is_product ? ZBP_TASK_PRODUCT : ZBP_TASK_WHOLE,
                                    model_below(&sim.random, 4)) == ZBP_OK);
        sim.layout.task[t].leaves_packed = model_below(&sim.random, 16) == 0;
        for (uint32_t i = model_below(&sim.random, 2); i < 2; i++) {
            const uint32_t way = model_below(&sim.random, 8), o = model_below(&sim.random, 2);
            zbp_face face = {.weight = (int32_t)model_below(&sim.random, weights), .outside = -1};

            if (way < 2) { /* to a node, perhaps by a path to its weight */
                face.outside = (int32_t)o;
                face.weight = way == 0 ? -1 : (int32_t)sim.behind[o];
                face.flag = way == 0 ? 0 : ZBP_FACE_PATH;
            }
            sim.is_product[sim.layout.face_count] = is_product;
            REQUIRE(zbp_layout_add_face(&sim.layout, face) == ZBP_OK);
        }
    }
    for (uint32_t f = 0; f < sim.layout.face_count; f++)
        add_face(sim.owed[target_of(f)], f);
    for (uint32_t w = 0; w < weights; w++)
        sim.sum[w] = ++sim.sums;
    REQUIRE(zbp_book_init(&sim.book, &sim.layout, NULL) == ZBP_OK);
}

static bool add_panels(uint32_t face)
{
    zbp_half *half = &sim.book.face[face].half;
    const uint32_t w = target_of(face);

    for (int64_t p = half->panels; p < PANELS; p++) {
        if (fails())
            return false;
        sim.added[w][face][p]++;
        *half = (zbp_half){.panels = p + 1, .sum = sim.sum[w]};
    }
    *half = (zbp_half){0};
    return true;
}

static bool run_directly(zbp_how how)
{
    uint32_t order[2 * 4];
    counts sum[WEIGHTS] = {{{0}}};

    zbp_layout_order(&sim.layout, order);
    zbp_book_begin_direct(&sim.book, &sim.layout);
    for (uint32_t i = 0; i < sim.layout.task_count; i++) {
        const zbp_task *task = &sim.layout.task[order[i]];

        for (uint32_t f = task->face_begin; f < task->face_end; f++) {
            const uint32_t w = target_of(f);

            if (!zbp_book_owes(&sim.book, &sim.layout, f))
                continue;
            CHECK(!sim.is_released);
            if (zbp_book_meets(&sim.book, &sim.layout, how, f)) {
                if (fails())
                    return false;
                add_face(sum[w], f);
                if (!zbp_book_came(&sim.book, &sim.layout, f))
                    continue;
                if (fails())
                    return false;
                add_counts(sim.added[w], sum[w]);
                zbp_book_met(&sim.book, w);
            } else {
                if (!sim.is_product[f] && fails())
                    return false;
                if (!sim.is_product[f])
                    add_face(sim.added[w], f);
                else if (!add_panels(f))
                    return false;
                zbp_book_delivered(&sim.book, f);
            }
        }
    }
    zbp_book_added_all(&sim.book);
    return !fails(); /* streams could not be joined */
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
    add_counts(sim.added[w], sim.waiting[w]);
    for (uint32_t f = 0; f < sim.layout.face_count; f++) {
        if (sim.layout.face[f].weight == (int32_t)w)
            zbp_book_delivered(&sim.book, f);
    }
    if (zbp_book_added(&sim.book, w))
        sim.is_released = true;
    return !fails(); /* a hook behind the addition */
}

static bool run_engine(zbp_how how)
{
    bool has[WEIGHTS] = {0}, is_through = true;

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
        CHECK(!sim.is_released);
        if (fails())
            return false;
        add_face(sim.waiting[w], f);
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
            for (int p = 0; p < PANELS; p++) {
                const int now = sim.added[w][f][p] - sim.rounds * sim.owed[w][f][p];

                CHECK(now >= (is_complete ? sim.owed[w][f][p] : 0) && now <= sim.owed[w][f][p]);
            }
        }
        CHECK(sim.hooks_called[w] <= 1);
    }
    if (is_complete) {
        sim.rounds++;
        memset(sim.hooks_called, 0, sizeof sim.hooks_called);
    }
}

static void meddle(void)
{
    const uint32_t weights = sim.book.weight_count, faces = sim.book.face_count;

    if (weights > 0 && model_below(&sim.random, 4) == 0) /* another gradient */
        sim.sum[model_below(&sim.random, weights)] = ++sim.sums;
    if (faces > 0 && model_below(&sim.random, 8) == 0)
        sim.is_hooked[model_below(&sim.random, faces)] = true;
    for (uint32_t w = 0; w < weights; w++)
        zbp_book_see_weight(&sim.book, w, model_below(&sim.random, 6) == 0 ? ZBP_WEIGHT_HOOKED : 0);
    for (uint32_t f = 0; f < faces; f++) {
        zbp_book_see_path(&sim.book, f,
                          sim.is_hooked[f] && (sim.layout.face[f].flag & ZBP_FACE_PATH) != 0);
        zbp_book_see_sum(&sim.book, f, sim.sum[target_of(f)]);
    }
}

static void look_at_way(zbp_way way, zbp_how how, bool had_half)
{
    if (way == ZBP_WAY_REFUSED)
        CHECK(had_half);
    if (way == ZBP_WAY_ENGINE)
        CHECK(!had_half);
    if (way != ZBP_WAY_DIRECT)
        return;
    CHECK(!how.is_anomaly);
    for (uint32_t w = 0; w < sim.book.weight_count; w++)
        CHECK(!sim.book.weight[w].has_arrived && sim.book.weight[w].seen == 0);
    for (uint32_t t = 0; t < sim.layout.task_count; t++)
        CHECK(!sim.layout.task[t].leaves_packed);
    for (uint32_t f = 0; f < sim.layout.face_count; f++)
        CHECK(sim.layout.face[f].weight >= 0 && !sim.book.face[f].path_is_hooked);
}

static void call_once(void)
{
    const zbp_how how = {.retain = model_below(&sim.random, 4) == 0,
                         .fuse = model_below(&sim.random, 4) == 0,
                         .is_anomaly = model_below(&sim.random, 8) == 0};
    const bool had_half = zbp_book_has_half(&sim.book), was_retry = sim.book.has_failed;
    uint32_t face = ZBP_NO_FACE;
    bool failed;
    zbp_way way;

    meddle();
    sim.touches = 0;
    sim.fail_at = model_below(&sim.random, 3) > 0 ? (long)model_below(&sim.random, 20) : -1;
    way = zbp_book_way(&sim.book, &sim.layout, how, &face);
    look_at_way(way, how, had_half);
    if (way == ZBP_WAY_REFUSED) {
        CHECK(face < sim.book.face_count && sim.book.face[face].half.panels > 0);
        met.refused++;
        return;
    }
    failed = way == ZBP_WAY_DIRECT   ? !run_directly(how)
             : way == ZBP_WAY_ENGINE ? !run_engine(how)
                                     : fails();
    met.retried += was_retry && !failed;
    switch (zbp_book_settle(&sim.book, how, failed)) {
    case ZBP_FATE_KEEP:
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
        zbp_book_forget_faces(&sim.book);
        check_counts(false);
        break;
    case ZBP_FATE_CLOSE:
        met.complete += !failed;
        met.unreported += failed;
        zbp_layout_fini(&sim.layout);
        zbp_book_close(&sim.book);
        check_counts(way != ZBP_WAY_DONE);
        break;
    }
}

static void each_face_is_delivered_once_or_refused(void)
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
    CHECK(met.complete > 100 && met.again > 100 && met.refused > 100 && met.retried > 100 &&
          met.released > 100 && met.unreported > 10);
}

int main(void)
{
    check_sees_failure();
    RUN(each_face_is_delivered_once_or_refused);
    return check_end();
}
