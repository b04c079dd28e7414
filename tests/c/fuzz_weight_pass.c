/* Any bytes are a few parameter groups and what happens to them: weight passes of some of them, failures at
 * the n-th touch, retries, hooks that appear in between, weights that are frozen, groups that are dropped
 * half-way. However it goes, each face must be delivered exactly once per weight pass.
 * The bytes seed the generator that chooses what happens. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_shim.h"
#include "fuzz.h"

enum { MOST_GROUPS = 3, MOST_CALLS = 12 };

const uint32_t fuzz_longest = 16;

static _Thread_local fake_group held[MOST_GROUPS];
static _Thread_local uint32_t held_count;
static _Thread_local bool has_raised[MOST_GROUPS]; /* a call that was not to retain it */
static _Thread_local bool may_be_busy;             /* a call is under way, which has the books */

static void require(int status)
{
    if (status != ZBP_OK)
        fake_violation("no success");
}

/* ---- groups */

static void make_face(fake_group *h)
{
    const uint32_t outsides = h->as.layout.outside_count, way = fake_random(outsides > 0 ? 3 : 1);
    zbp_face face = {.slot = h->as.layout.face_count, .weight = -1, .outside = -1};

    if (way != 1)
        face.weight = (int32_t)fake_random(h->as.layout.weight_count);
    if (way != 0)
        face.outside = (int32_t)fake_random(outsides);
    if (way == 2) { /* by a path: its only hop leads to the weight */
        uint32_t hops = 0;

        for (uint32_t i = 0; i < h->as.layout.hop_count; i++) {
            if (h->as.layout.hop[i].outside == (uint32_t)face.outside) {
                face.weight = h->as.layout.hop[i].to_weight;
                hops++;
            }
        }
        face.weight = hops == 1 ? face.weight : -1;
        if (face.weight >= 0)
            h->outside[face.outside].saves = false;
    }
    require(zbp_layout_add_face(&h->as.layout, face));
}

static void make_hops(fake_group *h)
{
    const uint32_t outsides = h->as.layout.outside_count;

    for (uint32_t o = 0; o < outsides; o++) {
        const uint32_t hops = 1 + fake_random(2);

        h->outside[o].saves = fake_random(2) == 0;
        for (uint32_t i = 0; i < hops; i++) {
            const bool goes_on = o + 1 < outsides && fake_random(2) == 0;
            zbp_hop hop = {.outside = o, .slot = i, .to_outside = -1, .to_weight = -1};

            if (goes_on)
                hop.to_outside = (int32_t)(o + 1 + fake_random(outsides - o - 1));
            else
                hop.to_weight = (int32_t)fake_random(h->as.layout.weight_count);
            require(zbp_layout_add_hop(&h->as.layout, hop));
        }
    }
}

static void make_group(fake_group *h)
{
    const uint32_t weights = 1 + fake_random(MOST_WEIGHTS),
                   outsides = fake_random(3) > 0 ? 0 : fake_random(MOST_OUTSIDE + 1),
                   tasks = 1 + fake_random(MOST_TASKS);

    *h = (fake_group){0};
    h->as.layout = (zbp_layout){.weight_count = weights, .outside_count = outsides};
    make_hops(h);
    for (uint32_t t = 0; t < tasks; t++) {
        const uint8_t kind = (uint8_t)(fake_random(3) == 0   ? fake_random(ZBP_TASK_ROOT + 1)
                                       : fake_random(2) == 0 ? ZBP_TASK_WHOLE
                                                             : ZBP_TASK_PRODUCT);

        require(zbp_layout_add_task(&h->as.layout, kind, fake_random(4)));
        h->as.layout.task[t].leaves_packed = kind < ZBP_TASK_WHOLE && fake_random(8) == 0;
        h->as.layout.task[t].has_work = kind == ZBP_TASK_WHOLE && fake_random(8) == 0;
        for (uint32_t f = fake_random(MOST_FACES / MOST_TASKS); f < MOST_FACES / MOST_TASKS; f++)
            make_face(h);
    }
    fake_open(h);
    for (uint32_t w = 0; w < weights; w++)
        h->weight[w].seen = fake_random(8) == 0 ? ZBP_WEIGHT_HOOKED : 0;
}

/* The plan sees to it that there is nothing else. */
static bool owes_each_weight(const fake_group *h)
{
    static const fake_gradient nothing;
    bool owes = true;

    for (uint32_t w = 0; w < h->as.layout.weight_count; w++)
        owes = owes && memcmp(&h->owed[w], &nothing, sizeof nothing) != 0;
    return owes;
}

static void fini(fake_group *h)
{
    zbp_layout_fini(&h->as.layout);
    zbp_book_close(&h->as.book);
}

/* Most groups are another microbatch of the group before, or have one weight in common with it. */
static void make_related(uint32_t g)
{
    static _Thread_local uint64_t seed;
    const uint32_t relation = g == 0 ? 3 : fake_random(4);
    const uint64_t now = fake.random;
    fake_group *h = &held[g];

    if (relation < 2)
        fake.random = seed;
    else
        seed = now;
    for (make_group(h); !owes_each_weight(h); make_group(h))
        fini(h);
    if (relation < 2)
        fake.random = now + 1;
    for (uint32_t w = 0; w < (relation < 2 ? h->as.book.weight_count : relation == 2); w++)
        fake_share(&held[g - 1].weight[w], &h->weight[w]);
}

/* ---- what a user does between two calls */

static void meddle(void)
{
    fake_group *h = &held[fake_random(held_count)];
    fake_weight *weight = &h->weight[fake_random(MOST_WEIGHTS)];

    switch (fake_random(8)) {
    case 0:
        fake_mark(weight, ZBP_WEIGHT_HOOKED);
        break;
    case 1:
        h->face[fake_random(MOST_FACES)].is_hooked = true;
        break;
    case 2:
        if (fake_random(2) == 0)
            fake_mark(weight, fake_random(2) == 0 ? ZBP_WEIGHT_FROZEN : ZBP_WEIGHT_ELSEWHERE);
        break;
    case 3: /* the groups' holder lets go of one, as zbp_group_clear does */
        if (fake_random(8) == 0) {
            zbp_book_close(&h->as.book);
            zbp_group_release(&h->as);
            zbp_layout_fini(&h->as.layout);
        }
        break;
    default:
        break;
    }
}

/* ---- what must hold */

static void check_weight(const fake_group *h, uint32_t w, bool is_complete)
{
    const fake_weight *weight = &h->weight[w];

    for (uint32_t f = 0; f < MOST_FACES; f++) {
        const int owed = h->owed[w].of[f], now = weight->total.of[f] - h->rounds * owed;

        if (now > owed)
            fake_violation("a gradient was added twice");
        if (now < (is_complete ? owed : 0) && !weight->was_frozen)
            fake_violation("a complete weight pass left out a gradient");
    }
    if (weight->hooks_called > 1)
        fake_violation("a hook was called twice");
}

static void check_group(fake_group *h, bool is_complete)
{
    for (uint32_t w = 0; w < MOST_WEIGHTS; w++) {
        check_weight(h, w, is_complete);
        if (is_complete)
            h->weight[w].hooks_called = 0;
    }
    h->rounds += is_complete;
}

/* What was retained runs again, all else is spent; after an error nothing is. */
static void check_state(uint32_t g, zbp_how how, bool is_complete)
{
    const bool is_again = how.retain && !has_raised[g];

    if (held[g].as.book.is_spent != (is_complete && !is_again))
        fake_violation(is_complete ? "a weight pass retains what it was not to retain, or spends it"
                                   : "a group that has failed cannot be repeated");
    if (is_complete && !is_again && (!held[g].is_released || held[g].as.book.weight_count != 0))
        fake_violation("a group that is spent holds on to its tasks, or to its book");
    if (!is_complete && !how.retain && zbp_book_is_complete(&held[g].as.book) &&
        !held[g].is_released)
        fake_violation("a group that is complete holds on to its tasks");
}

/* ---- a call of W, as the bindings make it */

static int run(const bool *takes, bool is_reversed, zbp_how how, zbp_error *error)
{
    fake_group *taken[MOST_GROUPS] = {NULL};
    size_t count = 0;
    bool is_free = true;
    int status = ZBP_ENOMEM;

    for (uint32_t i = 0; i < held_count && is_free; i++) {
        const uint32_t g = is_reversed ? held_count - 1 - i : i;

        if (!takes[g])
            continue;
        is_free = zbp_book_claim(&held[g].as.book);
        if (is_free)
            taken[count++] = &held[g];
    }
    if (is_free)
        status = fake_call(taken, count, how, error);
    else if (!may_be_busy)
        fake_violation("a group is in nobody's hands, and cannot be claimed");
    for (size_t i = 0; i < count; i++)
        zbp_book_give_back(&taken[i]->as.book);
    return status;
}

static _Thread_local const bool *under_way;

/* A parameter's property runs a weight pass of the very groups that one is about to run. */
static void run_once_more(void)
{
    zbp_error error = {0};

    fake.look = NULL;
    may_be_busy = true;
    if (run(under_way, false, (zbp_how){0}, &error) == ZBP_OK)
        fake_violation("two weight passes had one group at once");
    may_be_busy = false;
}

static bool something_is_spent(void)
{
    for (uint32_t g = 0; g < held_count; g++) {
        for (uint32_t o = 0; o < MOST_OUTSIDE; o++) {
            if (held[g].outside[o].is_spent)
                return true;
        }
    }
    return false;
}

static void call(void)
{
    bool takes[MOST_GROUPS] = {0}, any = false;
    const zbp_how how = {.retain = fake_random(4) == 0, .is_anomaly = fake_random(8) == 0};
    zbp_error error = {0};
    int status;

    for (uint32_t g = 0; g < held_count; g++) {
        takes[g] = !held[g].as.book.is_spent && fake_random(4) > 0;
        any = any || takes[g];
    }
    if (!any)
        return;
    fake.fail_at = fake_random(3) > 0 ? (long)fake_random(40) : -1;
    fake.look = fake_random(8) == 0 ? run_once_more : NULL;
    under_way = takes;
    status = run(takes, fake_random(4) == 0, how, &error);
    if (error.raised == FAKE_FAILED && fake.touches <= fake.fail_at)
        fake_violation("an error out of nowhere");
    if (error.raised == FAKE_TWICE && !something_is_spent())
        fake_violation("refused as run before, and nothing was");
    for (uint32_t g = 0; g < held_count; g++) {
        check_group(&held[g], takes[g] && status == ZBP_OK);
        if (takes[g])
            check_state(g, how, status == ZBP_OK);
        has_raised[g] = has_raised[g] || (takes[g] && status != ZBP_OK && !how.retain);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fake = (fake_world){.random = 1, .fail_at = -1};
    for (size_t i = 0; i < size; i++)
        fake.random = (fake.random ^ data[i]) * 1099511628211u;
    held_count = 1 + fake_random(MOST_GROUPS);
    memset(has_raised, 0, sizeof has_raised);
    for (uint32_t g = 0; g < held_count; g++)
        make_related(g);
    for (int i = 0; i < MOST_CALLS; i++) {
        while (fake_random(2) == 0)
            meddle();
        call();
    }
    for (uint32_t g = 0; g < held_count; g++)
        fini(&held[g]);
    return 0;
}
