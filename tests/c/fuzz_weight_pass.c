/* Any bytes are a few parameter groups and what happens to them: weight passes of some of them, failures at
 * the n-th touch, retries, hooks that appear in between, gradients that are replaced, groups that are dropped
 * half-way. However it goes, each face must be delivered exactly once per weight pass, whole, or refused.
 *
 * For libFuzzer (clang): `make fuzz FUZZ_TARGET=fuzz_weight_pass`. With -DZBP_FUZZ_STANDALONE it has a main of
 * its own: `fuzz_weight_pass [inputs [seed]]`. The bytes seed a generator first, and then choose what happens.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_shim.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST_GROUPS = 3, MOST_CALLS = 12 };

static _Thread_local zbp_held held[MOST_GROUPS];
static _Thread_local uint32_t held_count;
static _Thread_local bool may_be_busy; /* a call is under way, which has the books */

static void require(int status)
{
    if (status != ZBP_OK)
        fake_violation(zbp_status_name(status));
}

/* ---- groups */

static void make_face(zbp_held *h, uint32_t first_outside)
{
    const uint32_t weights = h->layout.weight_count, outsides = h->layout.outside_count;
    const uint32_t way = fake_random(first_outside < outsides ? 3 : 1);
    zbp_face face = {.slot = h->layout.face_count, .weight = -1, .outside = -1};

    if (way != 1)
        face.weight = (int32_t)fake_random(weights);
    if (way != 0)
        face.outside = (int32_t)(first_outside + fake_random(outsides - first_outside));
    if (way == 2) { /* by a path: its only hop leads to the weight */
        bool is_alone = false;

        for (uint32_t i = 0, n = 0; i < h->layout.hop_count; i++) {
            if (h->layout.hop[i].outside == (uint32_t)face.outside) {
                is_alone = ++n == 1 && h->layout.hop[i].to_weight >= 0;
                face.weight = h->layout.hop[i].to_weight;
            }
        }
        h->outside[face.outside].saves = h->outside[face.outside].saves && !is_alone;
        face.flag = is_alone ? ZBP_FACE_PATH : 0;
        face.weight = is_alone ? face.weight : -1;
    }
    require(zbp_layout_add_face(&h->layout, face));
}

static void make_group(zbp_held *h)
{
    const uint32_t weights = 1 + fake_random(MOST_WEIGHTS),
                   outsides = fake_random(MOST_OUTSIDE + 1), tasks = 1 + fake_random(MOST_TASKS);

    *h = (zbp_held){0};
    zbp_layout_init(&h->layout, weights, outsides, NULL);
    for (uint32_t o = 0; o < outsides; o++) {
        const uint32_t hops = 1 + fake_random(2);

        h->outside[o].saves = fake_random(2) == 0;
        for (uint32_t i = 0; i < hops; i++) {
            const bool goes_on = o + 1 < outsides && fake_random(2) == 0;
            zbp_hop hop = {.outside = o, .slot = i, .to_outside = -1, .to_weight = -1};

            if (goes_on)
                hop.to_outside = (int32_t)(o + 1 + fake_random(outsides - o - 1));
            else
                hop.to_weight = (int32_t)fake_random(weights);
            require(zbp_layout_add_hop(&h->layout, hop));
        }
    }
    for (uint32_t t = 0; t < tasks; t++) {
        const uint8_t kind = (uint8_t)fake_random(ZBP_TASK_ROOT + 1);
        const uint32_t faces = 1 + fake_random(MOST_FACES / MOST_TASKS);

        require(zbp_layout_add_task(&h->layout, kind, fake_random(4)));
        h->layout.task[t].leaves_packed = fake_random(8) == 0;
        h->layout.task[t].stream = fake_random(8) == 0;
        for (uint32_t f = 0; f < faces; f++) {
            h->face[h->layout.face_count].kind = kind == ZBP_TASK_PRODUCT && f == 0 ? FAKE_PRODUCT
                                                 : kind == ZBP_TASK_WHOLE           ? FAKE_KEPT
                                                                                    : FAKE_COMPUTED;
            make_face(h, 0);
        }
    }
    for (uint32_t w = 0; w < weights; w++) {
        fake_weight *weight = &h->weight[w];

        weight->has_grad = fake_random(3) > 0;
        weight->sum = ++fake.sums;
        weight->forbids_products = fake_random(8) == 0;
        weight->is_cast = fake_random(4) == 0;
        weight->seen = (uint8_t)((fake_random(4) == 0 ? ZBP_WEIGHT_HOOKED : 0) |
                                 (fake_random(8) == 0 ? ZBP_WEIGHT_SPECIAL : 0));
    }
    fake_count_owed(h);
    require(zbp_book_init(&h->book, &h->layout, NULL));
}

/* Most groups are another microbatch of the group before, or have one weight in common with it. */
static void make_related(uint32_t g)
{
    static _Thread_local uint64_t seed;
    const uint32_t relation = g == 0 ? 3 : fake_random(4);
    const uint64_t now = fake.random;
    zbp_held *h = &held[g];

    if (relation < 2)
        fake.random = seed;
    else
        seed = now;
    make_group(h);
    if (relation < 2)
        fake.random = now + 1;
    for (uint32_t w = 0; w < (relation < 2 ? h->book.weight_count : relation == 2); w++)
        fake_share(&held[g - 1].weight[w], &h->weight[w]);
    for (uint32_t f = 0; f < h->book.face_count; f++)
        h->face[f].goes_alone = fake_random(6) == 0;
}

/* ---- what a user does between two calls, or in the middle of one */

static zbp_held *some_group(void)
{
    return &held[fake_random(held_count)];
}

static void add_a_hook(void)
{
    zbp_held *h = some_group();

    if (h->book.weight_count == 0)
        return;
    if (h->book.face_count > 0 && fake_random(2) == 0)
        h->face[fake_random(h->book.face_count)].is_hooked = true;
    else
        fake_mark(&h->weight[fake_random(h->book.weight_count)], ZBP_WEIGHT_HOOKED);
}

static void meddle(void)
{
    zbp_held *h = some_group();
    fake_weight *weight = &h->weight[fake_random(MOST_WEIGHTS)];

    switch (fake_random(7)) {
    case 0:
        add_a_hook();
        break;
    case 1: /* .grad is another tensor, of zeros */
        fake_replace_gradient(weight, true);
        break;
    case 2: /* or none */
        fake_replace_gradient(weight, false);
        break;
    case 3:
        fake_mark(weight, ZBP_WEIGHT_FROZEN);
        break;
    case 4:
        weight->forbids_products = !weight->forbids_products;
        break;
    case 5: /* the groups' holder lets go of one, as zbp_group_clear does */
        if (fake_random(8) == 0) {
            h->was_dropped_half = h->was_dropped_half || zbp_book_has_half(&h->book);
            zbp_held_release(h);
            zbp_book_close(&h->book);
            zbp_layout_fini(&h->layout);
        }
        break;
    default:
        break;
    }
}

/* ---- what must hold */

static bool is_half_added(const zbp_held *h, uint32_t face)
{
    return face < h->book.face_count && h->book.face[face].half.panels > 0;
}

static void check_weight(const zbp_held *h, uint32_t w)
{
    const fake_weight *weight = &h->weight[w];
    const fake_gradient *owed = &h->owed[w];
    fake_gradient rest = weight->grad;

    for (uint32_t f = 0; f < MOST_FACES; f++) {
        for (int p = 0; p < PANELS; p++) {
            const int now = weight->total.of[f][p] - h->rounds * owed->of[f][p];

            if (now > owed->of[f][p])
                fake_violation("a gradient was added twice");
            if (now < 0 && !weight->was_frozen)
                fake_violation("a gradient is missing after a complete weight pass");
        }
        if (is_half_added(h, f))
            memset(rest.of[f], 0, sizeof rest.of[f]);
    }
    if (!weight->was_frozen && !h->was_dropped_half && !fake_is_whole(h, &rest))
        fake_violation("a gradient was added to two tensors, a part to each");
}

static void check_complete(const zbp_held *h)
{
    for (uint32_t w = 0; w < MOST_WEIGHTS; w++) {
        fake_gradient due = {0};

        for (int i = 0; i <= h->rounds; i++)
            fake_add(&due, &h->owed[w]);
        if (!h->weight[w].was_frozen && memcmp(&due, &h->weight[w].total, sizeof due) != 0)
            fake_violation("a complete weight pass left out a gradient, or added one twice");
        if ((h->weight[w].seen & ZBP_WEIGHT_HOOKED) != 0 && h->weight[w].hooks_called > 1)
            fake_violation("a hook was called twice");
    }
}

static void check_group(zbp_held *h, bool was_open, bool is_through)
{
    const bool is_closed_now = was_open && h->book.state != ZBP_BOOK_OPEN;
    const char *reason = NULL;

    if (zbp_layout_check(&h->layout, &reason) != ZBP_OK ||
        zbp_book_check(&h->book, &h->layout, &reason) != ZBP_OK)
        fake_violation(reason);
    if (is_closed_now || (was_open && is_through)) {
        check_complete(h);
        h->rounds++;
        for (uint32_t w = 0; w < MOST_WEIGHTS; w++)
            h->weight[w].hooks_called = 0;
    }
    for (uint32_t w = 0; w < MOST_WEIGHTS; w++)
        check_weight(h, w);
}

/* ---- a call of W, as the bindings make it */

static int run(const bool *takes, zbp_how how, zbp_error *error)
{
    zbp_turn turn[MOST_GROUPS];
    size_t count = 0;
    bool is_free = true;
    int status = ZBP_OK;

    for (uint32_t g = 0; g < held_count && is_free; g++) {
        if (!takes[g])
            continue;
        is_free = zbp_book_claim(&held[g].book);
        if (is_free)
            turn[count++] = (zbp_turn){&held[g].layout, &held[g].book, &held[g]};
    }
    if (is_free) {
        status = zbp_pass_weights(turn, count, how, error);
    } else if (!may_be_busy) {
        fake_violation("a group is in nobody's hands, and cannot be claimed");
    }
    for (size_t i = 0; i < count; i++)
        zbp_book_give_back(turn[i].book);
    return is_free ? status : ZBP_EINVAL;
}

static _Thread_local const bool *under_way;

/* A parameter's property runs a weight pass of the very groups that one is about to run. */
static void run_once_more(void)
{
    zbp_error error = {0};

    fake.look = NULL;
    may_be_busy = true;
    if (run(under_way, (zbp_how){0}, &error) == ZBP_OK)
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

/* A warning of the pass is an error: what is retained is complete, and not ready to run again. */
static void raise_all_the_same(const bool *takes)
{
    for (uint32_t g = 0; g < held_count; g++) {
        if (!takes[g])
            continue;
        zbp_book_report_again(&held[g].book);
        if (held[g].book.state == ZBP_BOOK_OPEN)
            held[g].rounds--;
        check_group(&held[g], false, false);
    }
}

static void call(void)
{
    bool takes[MOST_GROUPS] = {0}, was_open[MOST_GROUPS], any = false;
    zbp_how how = {.retain = fake_random(4) == 0,
                   .fuse = fake_random(4) == 0,
                   .wide = fake_random(4) == 0,
                   .is_anomaly = fake_random(8) == 0};
    zbp_error error = {0};
    int status;

    for (uint32_t g = 0; g < held_count; g++) {
        takes[g] = held[g].book.state != ZBP_BOOK_SPENT && fake_random(4) > 0;
        any = any || takes[g];
        was_open[g] = held[g].book.state == ZBP_BOOK_OPEN;
    }
    if (!any)
        return;
    fake.touches = 0;
    fake.fail_at = fake_random(3) > 0 ? (long)fake_random(40) : -1;
    fake.surprise = fake_random(4) == 0 ? add_a_hook : NULL;
    fake.look = fake_random(8) == 0 ? run_once_more : NULL;
    under_way = takes;
    status = run(takes, how, &error);
    if ((status == ZBP_OK) != (error.raised == NULL))
        fake_violation("a status and its error do not agree");
    if (error.raised == FAKE_FAILED && fake.touches <= fake.fail_at)
        fake_violation("an error out of nowhere");
    if ((error.raised == FAKE_TWICE || error.raised == FAKE_LOST) && !something_is_spent())
        fake_violation("refused as run before, and nothing was");
    for (uint32_t g = 0; g < held_count; g++)
        check_group(&held[g], was_open[g], takes[g] && status == ZBP_OK);
    if (status == ZBP_OK && fake_random(8) == 0)
        raise_all_the_same(takes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fake = (fake_world){.random = 1, .fail_at = -1};
    for (size_t i = 0; i < size; i++)
        fake.random = (fake.random ^ data[i]) * 1099511628211u;
    held_count = 1 + fake_random(MOST_GROUPS);
    for (uint32_t g = 0; g < held_count; g++)
        make_related(g);
    for (int i = 0; i < MOST_CALLS; i++) {
        while (fake_random(2) == 0)
            meddle();
        call();
    }
    for (uint32_t g = 0; g < held_count; g++) {
        zbp_layout_fini(&held[g].layout);
        zbp_book_fini(&held[g].book);
    }
    return 0;
}

#ifdef ZBP_FUZZ_STANDALONE
int main(int argc, char **argv)
{
    const uint64_t inputs = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;

    for (uint64_t i = 0; i < inputs; i++) {
        const uint64_t input[2] = {seed, i};

        LLVMFuzzerTestOneInput((const uint8_t *)input, sizeof input);
    }
    printf("%llu inputs passed\n1 passed, 0 failed\n", (unsigned long long)inputs);
    return 0;
}
#endif
