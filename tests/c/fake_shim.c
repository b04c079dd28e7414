#include "fake_shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Thread_local fake_world fake;

const char FAKE_FAILED[] = "failed", FAKE_TWICE[] = "a second time";

uint32_t fake_random(uint32_t below)
{
    fake.random = fake.random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(fake.random >> 33) % below;
}

void fake_violation(const char *what)
{
    fprintf(stderr, "fuzz_weight_pass: %s\n", what);
    abort();
}

static fake_group *fake_of(zbp_group *group)
{
    return (fake_group *)(void *)group; /* its first member */
}

static int raise_error(zbp_error *error, const char *what)
{
    if (error->raised == NULL)
        error->raised = (void *)(uintptr_t)what;
    return ZBP_ETORCH;
}

void zbp_error_clear(zbp_error *error)
{
    error->raised = NULL;
}

static int touch(zbp_error *error)
{
    return fake.touches++ == fake.fail_at ? raise_error(error, FAKE_FAILED) : ZBP_OK;
}

/* ---- gradients */

void fake_add(fake_gradient *to, const fake_gradient *what, int times)
{
    for (int f = 0; f < MOST_FACES; f++)
        to->of[f] += times * what->of[f];
}

static int sum_of(const fake_gradient *gradient)
{
    int sum = 0;

    for (int f = 0; f < MOST_FACES; f++)
        sum += gradient->of[f];
    return sum;
}

/* By how many ways one leads from the outside node to the weight; hops lead to higher numbers. */
static int ways(const zbp_layout *layout, int32_t outside, uint32_t weight)
{
    int count = 0;

    for (uint32_t h = 0; h < layout->hop_count; h++) {
        const zbp_hop *hop = &layout->hop[h];

        if (hop->outside != (uint32_t)outside)
            continue;
        count += hop->to_weight == (int32_t)weight ? 1 : 0;
        count += hop->to_outside >= 0 ? ways(layout, hop->to_outside, weight) : 0;
    }
    return count;
}

void fake_open(fake_group *held)
{
    const zbp_layout *layout = &held->as.layout;

    for (uint32_t w = 0; w < MOST_WEIGHTS; w++) {
        held->weight[w].of = held;
        for (uint32_t f = 0; f < layout->face_count; f++) {
            const zbp_face *face = &layout->face[f];

            held->owed[w].of[f] =
                face->weight < 0 ? ways(layout, face->outside, w) : face->weight == (int32_t)w;
        }
    }
    if (zbp_book_init(&held->as.book, layout) != ZBP_OK)
        fake_violation("no memory");
}

/* What the face's task computes, or I has kept. */
static fake_gradient gradient_of(const fake_group *held, uint32_t face)
{
    fake_gradient gradient = {0};

    if (held->is_released)
        fake_violation("a task runs after its group has let go of it");
    gradient.of[face] = held->face[face].is_gone ? 0 : 1;
    return gradient;
}

static fake_weight *next_of(const fake_weight *weight)
{
    return weight->same != NULL ? weight->same : (fake_weight *)(uintptr_t)weight;
}

void fake_share(fake_weight *weight, fake_weight *with)
{
    with->same = next_of(weight);
    weight->same = with;
    with->key = weight->key != NULL ? weight->key : weight;
    with->seen = weight->seen;
    with->was_frozen = weight->was_frozen;
}

void fake_mark(fake_weight *weight, uint8_t seen)
{
    fake_weight *w = weight;

    do {
        w->seen |= seen;
        w->was_frozen = w->was_frozen || (seen & ZBP_WEIGHT_FROZEN) != 0;
        w = next_of(w);
    } while (w != weight);
}

/* Within a call a weight gets the groups' gradients in their order, and all by one way. */
static void check_order(const fake_weight *weight, bool is_alone)
{
    for (const fake_weight *w = next_of(weight); w != weight; w = next_of(w)) {
        const fake_group *held = w->of;
        const uint32_t number = (uint32_t)(w - held->weight);

        if (held->call != fake.call)
            continue;
        if (held->position < weight->of->position && number < held->as.book.weight_count &&
            !held->as.book.weight[number].is_added)
            fake_violation("a weight gets its microbatches in another order");
        if (w->added_in == fake.call && w->was_alone != is_alone)
            fake_violation("a weight is alone in one group, and the engine's in another");
    }
}

static void accumulate(fake_weight *weight, const fake_gradient *gradient, bool is_alone)
{
    check_order(weight, is_alone);
    weight->was_alone = is_alone;
    weight->added_in = fake.call;
    if ((weight->seen & ZBP_WEIGHT_FROZEN) == 0)
        fake_add(&weight->total, gradient, 1);
}

/* ---- hooks */

int zbp_group_see_hooks(zbp_group *group, zbp_error *error)
{
    fake_group *held = fake_of(group);
    if (fake.look != NULL)
        fake.look();
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    for (uint32_t w = 0; w < held->as.book.weight_count; w++)
        held->as.book.weight[w].seen = held->weight[w].seen;
    for (uint32_t f = 0; f < held->as.layout.face_count; f++) {
        if (held->face[f].is_hooked)
            zbp_layout_give_up_path(&held->as.layout, f);
    }
    return ZBP_OK;
}

const void *zbp_weight_key(const zbp_group *group, uint32_t weight)
{
    const fake_group *held = (const fake_group *)(const void *)group;
    const fake_weight *w = &held->weight[weight];

    return w->key != NULL ? w->key : w;
}

/* ---- without the engine */

static void check_alone(const fake_group *held, uint32_t f)
{
    const zbp_face *face = &held->as.layout.face[f];
    const zbp_task *task = &held->as.layout.task[face->task];
    const uint32_t w = (uint32_t)face->weight;

    if (face->weight < 0 || sum_of(&held->owed[w]) != 1)
        fake_violation("a face is added alone that is not all its weight is owed");
    if ((held->weight[w].seen & ZBP_WEIGHT_HOOKED) != 0)
        fake_violation("a weight with a hook is added to without it");
    if ((held->weight[w].seen & ZBP_WEIGHT_FROZEN) != 0)
        fake_violation("a frozen weight is added to");
    if ((held->weight[w].seen & ZBP_WEIGHT_ELSEWHERE) != 0)
        fake_violation("what is kept on another stream is added without the engine");
    if (zbp_layout_has_path(face) && held->face[f].is_hooked)
        fake_violation("a path with a hook is passed over");
    if (task->leaves_packed || task->has_work ||
        (task->kind != ZBP_TASK_PRODUCT && task->kind != ZBP_TASK_WHOLE))
        fake_violation("what needs the engine is added without it");
    if (held->as.book.weight[w].has_arrived || held->as.book.weight[w].is_added)
        fake_violation("what has arrived is computed again");
}

/* The groups up to this one; those behind them need the memory. */
static void check_let_go(size_t end)
{
    for (size_t i = 0; i < end && !fake.retain; i++) {
        if (zbp_book_is_complete(&fake.held[i]->as.book) && !fake.held[i]->is_released)
            fake_violation("a group is complete, and has not let go when the next one begins");
    }
}

int zbp_add_alone(zbp_group *group, uint32_t f, zbp_how how, zbp_error *error)
{
    fake_group *held = fake_of(group);
    const fake_gradient gradient = gradient_of(held, f);

    check_alone(held, f);
    check_let_go(held->position);
    if (how.is_anomaly)
        fake_violation("anomaly mode is not told of a task");
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    accumulate(&held->weight[held->as.layout.face[f].weight], &gradient, true);
    held->face[f].is_gone =
        !how.retain && held->as.layout.task[held->as.layout.face[f].task].kind == ZBP_TASK_WHOLE;
    return ZBP_OK;
}

/* ---- with the engine */

typedef struct place {
    int pending; /* edges from which a gradient is still to come */
    bool is_reached;
    fake_gradient in;
} place;

typedef struct group_run {
    fake_group *held;
    bool task_is_due[MOST_TASKS];
    bool leads[MOST_OUTSIDE];
    place outside[MOST_OUTSIDE];
    place sink[MOST_WEIGHTS];
} group_run;

typedef struct engine_run {
    zbp_how how;
    size_t count;
    group_run group[MOST_HELD];
} engine_run;

static bool is_wanted(const group_run *g, int32_t outside, int32_t weight)
{
    return weight >= 0 ? zbp_book_wants(&g->held->as.book, (uint32_t)weight) : g->leads[outside];
}

static void expect(group_run *g, int32_t outside, int32_t weight);

static void expect_behind(group_run *g, uint32_t outside)
{
    const zbp_layout *layout = &g->held->as.layout;

    for (uint32_t h = 0; h < layout->hop_count; h++) {
        if (layout->hop[h].outside == outside)
            expect(g, layout->hop[h].to_outside, layout->hop[h].to_weight);
    }
}

static void expect(group_run *g, int32_t outside, int32_t weight)
{
    if (!is_wanted(g, outside, weight))
        return;
    if (weight >= 0) {
        g->sink[weight].pending++;
        return;
    }
    g->outside[outside].pending++;
    if (!g->outside[outside].is_reached) {
        g->outside[outside].is_reached = true;
        expect_behind(g, (uint32_t)outside);
    }
}

static bool has_sink(const fake_group *held, uint32_t w)
{
    return w < held->as.book.weight_count && !held->as.book.weight[w].is_added;
}

static void check_no_weight_twice(const engine_run *run, fake_group *held)
{
    for (size_t i = 0; i < run->count; i++) {
        for (uint32_t v = 0; v < MOST_WEIGHTS; v++) {
            for (uint32_t w = 0; w < MOST_WEIGHTS; w++) {
                if (has_sink(run->group[i].held, v) && has_sink(held, w) &&
                    zbp_weight_key(&run->group[i].held->as, v) == zbp_weight_key(&held->as, w))
                    fake_violation("groups of one run share a weight");
            }
        }
    }
}

static int add_to_run(engine_run *run, zbp_group *group, zbp_error *error)
{
    fake_group *held = fake_of(group);
    group_run *g = &run->group[run->count];

    check_no_weight_twice(run, held);
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    run->count++;
    g->held = held;
    zbp_book_begin_run(&held->as.book, run->how.retain);
    zbp_book_find_leading(&held->as.book, &held->as.layout, g->leads);
    for (uint32_t w = 0; w < held->as.book.weight_count; w++) {
        if (held->as.book.weight[w].has_arrived) {
            g->sink[w].is_reached = true;
            g->sink[w].in = held->weight[w].waiting;
        }
    }
    for (uint32_t f = 0; f < held->as.layout.face_count; f++) {
        const zbp_face *face = &held->as.layout.face[f];

        if (zbp_layout_has_path(face) && zbp_book_wants(&held->as.book, (uint32_t)face->weight))
            fake_violation("the engine does not run the steps of a path");
        expect(g, face->outside, face->weight);
        g->task_is_due[face->task] |= is_wanted(g, face->outside, face->weight);
    }
    return ZBP_OK;
}

static void deliver(group_run *g, int32_t outside, int32_t weight, const fake_gradient *gradient)
{
    place *to = weight >= 0 ? &g->sink[weight] : &g->outside[outside];

    if (!is_wanted(g, outside, weight))
        return;
    fake_add(&to->in, gradient, 1);
    to->pending--;
}

static int run_task(group_run *g, uint32_t t, zbp_error *error)
{
    const zbp_layout *layout = &g->held->as.layout;

    g->task_is_due[t] = false;
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    for (uint32_t f = layout->task[t].face_begin; f < layout->task[t].face_end; f++) {
        const fake_gradient gradient = gradient_of(g->held, f);

        deliver(g, layout->face[f].outside, layout->face[f].weight, &gradient);
    }
    return ZBP_OK;
}

static int run_outside(group_run *g, uint32_t o, bool retain, zbp_error *error)
{
    const zbp_layout *layout = &g->held->as.layout;
    fake_outside *outside = &g->held->outside[o];
    bool is_of_use = false;

    g->outside[o].is_reached = false;
    if (outside->saves && outside->is_spent)
        return raise_error(error, FAKE_TWICE);
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    outside->is_spent = !retain;
    for (uint32_t h = 0; h < layout->hop_count; h++) {
        if (layout->hop[h].outside != o)
            continue;
        is_of_use |= is_wanted(g, layout->hop[h].to_outside, layout->hop[h].to_weight);
        deliver(g, layout->hop[h].to_outside, layout->hop[h].to_weight, &g->outside[o].in);
    }
    if (!is_of_use)
        fake_violation("a node runs that leads to no weight which is still owed anything");
    return ZBP_OK;
}

/* All that is owed and not there yet must come at once: hooks are called once. */
static void call_hooks(fake_group *held, uint32_t w)
{
    fake_weight *weight = &held->weight[w];
    fake_gradient all = weight->total, due = {0};

    weight->hooks_called++;
    fake_add(&all, &weight->waiting, 1);
    fake_add(&due, &held->owed[w], held->rounds + 1);
    if (!weight->was_frozen && memcmp(&all, &due, sizeof all) != 0)
        fake_violation("a hook was given another gradient than what was still owed");
}

/* As Sink::add in run.cpp: what fails is noted, and the run goes on. */
static void run_sink(group_run *g, uint32_t w, zbp_error *error)
{
    fake_group *held = g->held;
    fake_weight *weight = &held->weight[w];

    g->sink[w].is_reached = false;
    weight->waiting = g->sink[w].in;
    held->as.book.weight[w].has_arrived = true;
    if (!held->as.book.weight[w].is_hooked) {
        if ((weight->seen & ZBP_WEIGHT_HOOKED) != 0) {
            if (touch(error) != ZBP_OK)
                return;
            call_hooks(held, w);
        }
        held->as.book.weight[w].is_hooked = true;
    }
    if (touch(error) != ZBP_OK)
        return;
    accumulate(weight, &weight->waiting, false);
    if (zbp_book_added(&held->as.book, w))
        held->is_released = true;
    (void)touch(error); /* a hook behind the addition */
}

/* Runs something that is ready; false if nothing is. */
static bool step(engine_run *run, zbp_error *error, int *status)
{
    const uint32_t kinds = MOST_TASKS + MOST_OUTSIDE + MOST_WEIGHTS;
    const uint32_t all = (uint32_t)run->count * kinds;
    const uint32_t first = fake_random(all);

    for (uint32_t i = 0; i < all; i++) {
        const uint32_t n = (first + i) % all;
        group_run *g = &run->group[n / kinds];
        uint32_t k = n % kinds;

        if (k < MOST_TASKS) {
            if (k < g->held->as.layout.task_count && g->task_is_due[k]) {
                *status = run_task(g, k, error);
                return true;
            }
        } else if (k < MOST_TASKS + MOST_OUTSIDE) {
            k -= MOST_TASKS;
            if (g->outside[k].is_reached && g->outside[k].pending == 0) {
                *status = run_outside(g, k, run->how.retain, error);
                return true;
            }
        } else {
            k -= MOST_TASKS + MOST_OUTSIDE;
            if (g->sink[k].is_reached && g->sink[k].pending == 0) {
                run_sink(g, k, error);
                return true;
            }
        }
    }
    return false;
}

static int go(engine_run *run, zbp_error *error)
{
    int status = ZBP_OK;

    fake.runs++;
    for (size_t i = 0; i < run->count; i++) {
        for (uint32_t w = 0; w < MOST_WEIGHTS; w++)
            run->group[i].sink[w].is_reached |= run->group[i].sink[w].pending > 0;
    }
    if (touch(error) != ZBP_OK) /* before anything runs */
        return ZBP_ETORCH;
    while (status == ZBP_OK && step(run, error, &status))
        ;
    return error->raised == NULL ? ZBP_OK : ZBP_ETORCH;
}

int zbp_run_engine(zbp_group *const *group, size_t count, zbp_how how, zbp_error *error)
{
    engine_run run = {.how = how};

    if (fake.runs == 0)
        check_let_go(fake.held_count);
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    for (size_t g = 0; g < count; g++) {
        if (!zbp_book_is_complete(&group[g]->book) && add_to_run(&run, group[g], error) != ZBP_OK)
            return ZBP_ETORCH;
    }
    return go(&run, error);
}

/* ---- afterwards */

void zbp_group_release(zbp_group *group)
{
    fake_of(group)->is_released = true;
}

void zbp_group_close(zbp_group *group)
{
    zbp_group_release(group);
}

void zbp_group_again(zbp_group *group)
{
    if (fake_of(group)->is_released)
        fake_violation("a group is to run again, and was released");
}

int fake_call(fake_group *const *held, size_t count, zbp_how how, zbp_error *error)
{
    zbp_group *group[MOST_HELD] = {NULL};
    int status;

    fake.call++;
    fake.touches = fake.runs = 0;
    fake.held = held;
    fake.held_count = count;
    fake.retain = how.retain;
    for (size_t i = 0; i < count; i++) {
        group[i] = &held[i]->as;
        held[i]->call = fake.call;
        held[i]->position = i;
    }
    status = zbp_pass_weights(group, count, how, error);
    if ((status == ZBP_ETORCH) != (error->raised != NULL))
        fake_violation("a status and its error do not agree");
    return status;
}
