#include "fake_shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Thread_local fake_world fake;

const char FAKE_FAILED[] = "failed", FAKE_HALF[] = "half added", FAKE_TWICE[] = "a second time",
           FAKE_LOST[] = "lost";

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

void fake_add(fake_gradient *to, const fake_gradient *what)
{
    for (int f = 0; f < MOST_FACES; f++) {
        for (int p = 0; p < PANELS; p++)
            to->of[f][p] += what->of[f][p];
    }
}

static int panels_of(const zbp_held *held, uint32_t face)
{
    return held->face[face].kind == FAKE_PRODUCT ? PANELS : 1;
}

static fake_gradient of_face(const zbp_held *held, uint32_t face)
{
    fake_gradient gradient = {0};

    for (int p = 0; p < panels_of(held, face); p++)
        gradient.of[face][p] = 1;
    return gradient;
}

bool fake_is_whole(const zbp_held *held, const fake_gradient *gradient)
{
    for (uint32_t f = 0; f < MOST_FACES; f++) {
        for (int p = 1; p < panels_of(held, f); p++) {
            if (gradient->of[f][p] != gradient->of[f][0])
                return false;
        }
    }
    return true;
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

void fake_count_owed(zbp_held *held)
{
    const zbp_layout *layout = &held->layout;

    for (uint32_t f = 0; f < layout->face_count; f++) {
        const zbp_face *face = &layout->face[f];
        const fake_gradient one = of_face(held, f);

        for (uint32_t w = 0; w < layout->weight_count; w++) {
            int times = face->weight == (int32_t)w ? 1 : 0;

            if (face->weight < 0)
                times = ways(layout, face->outside, w);
            while (times-- > 0)
                fake_add(&held->owed[w], &one);
        }
    }
}

/* What the face's task computes now. */
static fake_gradient compute(const zbp_held *held, uint32_t face)
{
    if (held->is_released)
        fake_violation("a task runs after its group has let go of it");
    return held->face[face].kind == FAKE_GONE ? (fake_gradient){0} : of_face(held, face);
}

static fake_weight *next_of(fake_weight *weight)
{
    return weight->same != NULL ? weight->same : weight;
}

void fake_share(fake_weight *weight, fake_weight *with)
{
    fake_weight *const rest = next_of(weight);

    with->key = weight->key != NULL ? weight->key : weight;
    with->has_grad = weight->has_grad;
    with->forbids_products = weight->forbids_products;
    with->is_cast = weight->is_cast;
    with->sum = weight->sum;
    with->seen = weight->seen;
    with->was_frozen = weight->was_frozen;
    with->same = rest;
    weight->same = with;
}

void fake_replace_gradient(fake_weight *weight, bool has_grad)
{
    const uint64_t sum = ++fake.sums;
    fake_weight *w = weight;

    do {
        w->has_grad = has_grad;
        w->sum = sum;
        w->grad = (fake_gradient){0};
        w = next_of(w);
    } while (w != weight);
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

static void accumulate(fake_weight *weight, const fake_gradient *gradient)
{
    if ((weight->seen & ZBP_WEIGHT_FROZEN) != 0)
        return;
    if (!weight->has_grad)
        fake_replace_gradient(weight, true);
    fake_add(&weight->grad, gradient);
    fake_add(&weight->total, gradient);
}

/* ---- looks */

int zbp_look(zbp_held *held, zbp_book *book, zbp_error *error)
{
    if (fake.look != NULL)
        fake.look();
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    for (uint32_t w = 0; w < book->weight_count; w++)
        zbp_book_see_weight(book, w, held->weight[w].seen);
    for (uint32_t f = 0; f < book->face_count; f++) {
        const int32_t weight = held->layout.face[f].weight;

        zbp_book_see_path(book, f, held->face[f].is_hooked);
        zbp_book_see_sum(
            book, f, weight >= 0 && held->weight[weight].has_grad ? held->weight[weight].sum : 0);
    }
    return ZBP_OK;
}

const void *zbp_weight_key(zbp_held *held, uint32_t weight)
{
    const fake_weight *w = &held->weight[weight];

    return w->key != NULL ? w->key : w;
}

int zbp_follow_caller(zbp_held *held, zbp_error *error)
{
    (void)held;
    return touch(error);
}

int zbp_join_streams(zbp_held *held, zbp_error *error)
{
    (void)held;
    fake.joins++;
    return touch(error);
}

/* ---- without the engine */

struct zbp_adding {
    zbp_held *held;
    zbp_how how;
    fake_gradient sum[MOST_WEIGHTS];
};

int zbp_adding_new(zbp_held *held, zbp_how how, zbp_adding **adding_out, zbp_error *error)
{
    for (uint32_t w = 0; w < held->layout.weight_count; w++) {
        if ((held->weight[w].seen & ZBP_WEIGHT_HOOKED) != 0)
            fake_violation("a weight with a hook is about to be added to without it");
    }
    for (uint32_t f = 0; f < held->layout.face_count; f++) {
        if ((held->layout.face[f].flag & ZBP_FACE_PATH) != 0 && held->face[f].is_hooked)
            fake_violation("a path with a hook is about to be passed over");
    }
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    *adding_out = calloc(1, sizeof **adding_out);
    (*adding_out)->held = held;
    (*adding_out)->how = how;
    return ZBP_OK;
}

void zbp_adding_free(zbp_adding *adding)
{
    free(adding);
}

int zbp_adding_begin(zbp_adding *adding, uint32_t task, zbp_error *error)
{
    (void)adding, (void)task;
    return touch(error);
}

static fake_weight *weight_of(zbp_adding *adding, uint32_t face)
{
    return &adding->held->weight[adding->held->layout.face[face].weight];
}

static fake_weight *weight_at(const zbp_product *product)
{
    zbp_held *held = product->turn->held;

    return &held->weight[held->layout.face[product->face].weight];
}

static bool adds_in_one(const zbp_product *product, zbp_how how)
{
    return (weight_at(product)->is_cast ? how.wide : how.fuse) &&
           product->turn->book->face[product->face].half.panels == 0;
}

static void check_swept(const zbp_product *first, const zbp_product *product)
{
    const zbp_held *held = product->turn->held;
    const zbp_face *face = &held->layout.face[product->face];

    if (zbp_weight_key(product->turn->held, (uint32_t)face->weight) !=
        zbp_weight_key(first->turn->held, (uint32_t)first->turn->layout->face[first->face].weight))
        fake_violation("products of two weights are added together");
    if ((weight_at(product)->seen & (ZBP_WEIGHT_HOOKED | ZBP_WEIGHT_SPECIAL)) != 0 ||
        ((face->flag & ZBP_FACE_PATH) != 0 && held->face[product->face].is_hooked))
        fake_violation("a product is added together with others past a hook, or to a subclass");
    if (held->layout.task[face->task].stream != 0)
        fake_violation("products of several streams are added together");
}

/* How many of the first can be added, and together. */
static uint32_t go_together(const zbp_product *product, uint32_t count, zbp_how how)
{
    uint32_t together = 0;

    for (; together < count; together++) {
        const zbp_product *next = &product[together];
        const fake_face *face = &next->turn->held->face[next->face];

        if (count > 1)
            check_swept(product, next);
        if (face->kind != FAKE_PRODUCT || !weight_at(next)->has_grad ||
            weight_at(next)->forbids_products ||
            (together > 0 &&
             (face->goes_alone || adds_in_one(next, how) != adds_in_one(product, how))))
            break;
    }
    return together;
}

static int add_panel(const zbp_product *product, int64_t p, zbp_error *error)
{
    fake_weight *weight = weight_at(product);
    zbp_half *half = &product->turn->book->face[product->face].half;
    fake_gradient panel = {0};

    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    if (fake.order_count < sizeof fake.order / sizeof *fake.order) {
        fake.order[fake.order_count].held = product->turn->held;
        fake.order[fake.order_count++].panel = p;
    }
    panel.of[product->face][p] = 1;
    accumulate(weight, &panel);
    *half = p + 1 < PANELS ? (zbp_half){.panels = p + 1, .sum = weight->sum} : (zbp_half){0};
    return ZBP_OK;
}

int zbp_add_products(const zbp_product *product, uint32_t count, zbp_how how, uint32_t *added_out,
                     zbp_error *error)
{
    const uint32_t together = go_together(product, count, how);
    int64_t begun[8];

    *added_out = 0;
    if (together > 0 && adds_in_one(product, how)) {
        for (; *added_out < together; ++*added_out) {
            const fake_gradient whole =
                of_face(product[*added_out].turn->held, product[*added_out].face);

            if (touch(error) != ZBP_OK)
                return ZBP_ETORCH;
            accumulate(weight_at(&product[*added_out]), &whole);
        }
        return ZBP_OK;
    }
    for (uint32_t i = 0; i < together; i++)
        begun[i] = product[i].turn->book->face[product[i].face].half.panels;
    for (int64_t p = 0; p < PANELS; p++) {
        for (uint32_t i = 0; i < together; i++) {
            if (p >= begun[i] && add_panel(&product[i], p, error) != ZBP_OK)
                return ZBP_ETORCH;
            *added_out += p + 1 == PANELS ? 1 : 0;
        }
    }
    return ZBP_OK;
}

int zbp_add_gradient(zbp_adding *adding, uint32_t face, zbp_error *error)
{
    const fake_gradient gradient = compute(adding->held, face);

    if (fake.surprise != NULL)
        fake.surprise();
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    accumulate(weight_of(adding, face), &gradient);
    return ZBP_OK;
}

void zbp_let_go(zbp_adding *adding, uint32_t face)
{
    if (adding->held->face[face].kind == FAKE_KEPT)
        adding->held->face[face].kind = FAKE_GONE;
}

int zbp_sum_gradient(zbp_adding *adding, uint32_t face, zbp_error *error)
{
    const fake_gradient gradient = compute(adding->held, face);

    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    fake_add(&adding->sum[adding->held->layout.face[face].weight], &gradient);
    return ZBP_OK;
}

int zbp_add_sum(zbp_adding *adding, uint32_t weight, zbp_error *error)
{
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    accumulate(&adding->held->weight[weight], &adding->sum[weight]);
    return ZBP_OK;
}

/* ---- with the engine */

typedef struct place {
    int pending; /* edges from which a gradient is still to come */
    bool is_reached;
    fake_gradient in;
} place;

typedef struct group_run {
    zbp_held *held;
    bool task_has_run[MOST_TASKS];
    place outside[MOST_OUTSIDE];
    place sink[MOST_WEIGHTS];
} group_run;

struct zbp_run {
    zbp_how how;
    size_t count;
    group_run group[8];
};

int zbp_run_new(zbp_how how, zbp_run **run_out, zbp_error *error)
{
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    *run_out = calloc(1, sizeof **run_out);
    (*run_out)->how = how;
    return ZBP_OK;
}

void zbp_run_free(zbp_run *run)
{
    free(run);
}

static void expect(group_run *g, int32_t outside, int32_t weight);

static void expect_behind(group_run *g, uint32_t outside)
{
    const zbp_layout *layout = &g->held->layout;

    for (uint32_t h = 0; h < layout->hop_count; h++) {
        if (layout->hop[h].outside == outside)
            expect(g, layout->hop[h].to_outside, layout->hop[h].to_weight);
    }
}

static void expect(group_run *g, int32_t outside, int32_t weight)
{
    if (weight >= 0) {
        g->sink[weight].pending += zbp_book_wants(&g->held->book, (uint32_t)weight) ? 1 : 0;
        return;
    }
    g->outside[outside].pending++;
    if (!g->outside[outside].is_reached) {
        g->outside[outside].is_reached = true;
        expect_behind(g, (uint32_t)outside);
    }
}

int zbp_run_add(zbp_run *run, zbp_held *held, zbp_error *error)
{
    group_run *g = &run->group[run->count++];

    g->held = held;
    zbp_book_begin_run(&held->book, run->how.retain);
    for (uint32_t w = 0; w < held->layout.weight_count; w++) {
        if (held->book.weight[w].has_arrived) {
            g->sink[w].is_reached = true;
            g->sink[w].in = held->weight[w].waiting;
        }
    }
    for (uint32_t f = 0; f < held->layout.face_count; f++) {
        if (zbp_book_wants_face(&held->book, &held->layout, f))
            expect(g, held->layout.face[f].weight < 0 ? held->layout.face[f].outside : -1,
                   held->layout.face[f].weight);
    }
    return touch(error);
}

static void deliver(group_run *g, int32_t outside, int32_t weight, const fake_gradient *gradient)
{
    place *to = weight >= 0 ? &g->sink[weight] : &g->outside[outside];

    if (weight >= 0 && !zbp_book_wants(&g->held->book, (uint32_t)weight))
        return;
    fake_add(&to->in, gradient);
    to->pending--;
}

static int run_task(group_run *g, uint32_t t, zbp_error *error)
{
    const zbp_layout *layout = &g->held->layout;

    g->task_has_run[t] = true;
    if (g->held->is_released)
        return ZBP_OK; /* late, in a retry: all its weights have been added */
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    for (uint32_t f = layout->task[t].face_begin; f < layout->task[t].face_end; f++) {
        if (zbp_book_wants_face(&g->held->book, layout, f)) {
            const fake_gradient gradient = compute(g->held, f);

            deliver(g, layout->face[f].outside, layout->face[f].weight, &gradient);
        }
    }
    return ZBP_OK;
}

static int run_outside(group_run *g, uint32_t o, bool retain, zbp_error *error)
{
    const zbp_layout *layout = &g->held->layout;
    fake_outside *outside = &g->held->outside[o];

    g->outside[o].is_reached = false;
    if (outside->saves && outside->is_spent)
        return raise_error(error, FAKE_TWICE);
    if (touch(error) != ZBP_OK)
        return ZBP_ETORCH;
    outside->is_spent = !retain;
    for (uint32_t h = 0; h < layout->hop_count; h++) {
        if (layout->hop[h].outside == o)
            deliver(g, layout->hop[h].to_outside, layout->hop[h].to_weight, &g->outside[o].in);
    }
    return ZBP_OK;
}

/* All that is owed and not there yet must come at once: hooks are called once. */
static void call_hooks(zbp_held *held, uint32_t w)
{
    fake_weight *weight = &held->weight[w];
    fake_gradient all = weight->total, due = {0};

    weight->hooks_called++;
    fake_add(&all, &weight->waiting);
    for (int i = 0; i <= held->rounds; i++)
        fake_add(&due, &held->owed[w]);
    if (!weight->was_frozen && memcmp(&all, &due, sizeof all) != 0)
        fake_violation("a hook was given another gradient than what was still owed");
}

/* As Sink::add in weight_nodes.cpp: what fails is noted, and the run goes on. */
static void run_sink(group_run *g, uint32_t w, zbp_error *error)
{
    zbp_held *held = g->held;
    fake_weight *weight = &held->weight[w];

    g->sink[w].is_reached = false;
    weight->waiting = g->sink[w].in;
    zbp_book_arrived(&held->book, w);
    if (!held->book.weight[w].is_hooked) {
        if ((weight->seen & ZBP_WEIGHT_HOOKED) != 0) {
            if (touch(error) != ZBP_OK)
                return;
            call_hooks(held, w);
        }
        zbp_book_hooked(&held->book, w);
    }
    if (touch(error) != ZBP_OK)
        return;
    accumulate(weight, &weight->waiting);
    for (uint32_t f = 0; f < held->layout.face_count; f++) {
        if (held->layout.face[f].weight == (int32_t)w)
            zbp_book_delivered(&held->book, f);
    }
    if (zbp_book_added(&held->book, w))
        held->is_released = true;
    (void)touch(error); /* a hook behind the addition */
}

/* Runs something that is ready; false if nothing is. */
static bool step(zbp_run *run, zbp_error *error, int *status)
{
    const uint32_t kinds = MOST_TASKS + MOST_OUTSIDE + MOST_WEIGHTS;
    const uint32_t all = (uint32_t)run->count * kinds;
    const uint32_t first = fake_random(all);

    for (uint32_t i = 0; i < all; i++) {
        const uint32_t n = (first + i) % all;
        group_run *g = &run->group[n / kinds];
        const zbp_layout *layout = &g->held->layout;
        uint32_t k = n % kinds;

        if (k < MOST_TASKS) {
            if (k < layout->task_count && !g->task_has_run[k]) {
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

int zbp_run_go(zbp_run *run, zbp_error *error)
{
    int status = ZBP_OK;

    for (size_t i = 0; i < run->count; i++) {
        for (uint32_t w = 0; w < MOST_WEIGHTS; w++)
            run->group[i].sink[w].is_reached |= run->group[i].sink[w].pending > 0;
    }
    if (run->count == 0)
        return ZBP_OK;
    if (touch(error) != ZBP_OK) /* before anything runs */
        return ZBP_ETORCH;
    while (status == ZBP_OK && step(run, error, &status))
        ;
    return error->raised == NULL ? ZBP_OK : ZBP_ETORCH;
}

/* ---- afterwards */

void zbp_held_release(zbp_held *held)
{
    held->is_released = true;
}

void zbp_held_close(zbp_held *held)
{
    held->is_released = true;
}

void zbp_held_again(zbp_held *held)
{
    if (held->is_released)
        fake_violation("a group is to run again, and was released");
}

int zbp_error_half_added(zbp_held *held, uint32_t face, zbp_error *error)
{
    if (held->book.face[face].half.panels == 0)
        fake_violation("refused for a product that is not half added");
    return raise_error(error, FAKE_HALF);
}

void zbp_error_name_lost(zbp_error *error, const zbp_turn *turn, size_t count)
{
    (void)turn, (void)count;
    if (error->raised == FAKE_TWICE)
        error->raised = (void *)(uintptr_t)FAKE_LOST;
}
