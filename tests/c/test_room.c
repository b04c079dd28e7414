/* What may wait under a budget: against lists that are added up anew each time, and steps at random that must be within
 * their budget from the second on. */
#include <pthread.h>

#include "check.h"
#include "counting.h"
#include "model.h"
#include "core/pass/zbp_room.h"

static zbp_alloc alloc;
static counting count;

static void nothing_is_counted_at_first(void)
{
    zbp_room room = {0};
    const char *reason = "unset";
    uint64_t always = 7, all = 7;

    zbp_room_forget(&room, 16);
    zbp_room_weigh(&room, NULL, 0, 0, &always, &all);
    CHECK(always == 0 && all == 0 && room.bytes == 0);
    CHECK_VALID(zbp_room_check(&room, &reason));
    zbp_room_fini(&room);
    zbp_room_init(&room, NULL);
    zbp_room_fini(&room);
}

/* Against how often each storage is counted, in an array. */
static void each_storage_is_counted_once(void)
{
    enum { STORAGES = 700 };
    static uint64_t times[STORAGES];
    uint64_t random = 1;
    const char *reason = NULL;
    zbp_room room;

    memset(times, 0, sizeof times);
    zbp_room_init(&room, &alloc);
    for (uint32_t i = 0; i < 60000; i++) {
        const uint32_t k = model_below(&random, STORAGES);

        if (model_below(&random, 2) != 0 || times[k] == 0) {
            /* Only the first place says how large it is. */
            const zbp_place place = {(k + 1) * 16, times[k] == 0 ? k : model_below(&random, 9)};

            REQUIRE(zbp_room_count(&room, place) == ZBP_OK);
            times[k]++;
        } else {
            zbp_room_forget(&room, (k + 1) * 16);
            times[k]--;
        }
        if (i % 500 == 0) {
            uint64_t bytes = 0;

            for (uint32_t s = 0; s < STORAGES; s++)
                bytes += times[s] != 0 ? s : 0;
            CHECK(room.bytes == bytes);
            CHECK_VALID(zbp_room_check(&room, &reason));
        }
    }
    zbp_room_fini(&room);
    CHECK(count.live == 0);
}

enum { BLOCKS = 20000 };

/* Counts so many of two bytes each, one after the other. */
static void *count_twos(void *arg)
{
    zbp_room *room = arg;

    for (uint64_t k = 1; k <= BLOCKS; k++)
        REQUIRE(zbp_room_count(room, (zbp_place){k * 16, 2}) == ZBP_OK);
    return NULL;
}

static void who_asks_for_the_bytes_waits_for_nobody(void)
{
    uint64_t seen = 0, now = 0;
    zbp_room room;
    pthread_t counts;

    zbp_room_init(&room, NULL);
    REQUIRE(pthread_create(&counts, NULL, count_twos, &room) == 0);
    for (; now < 2 * BLOCKS; seen = now) {
        now = zbp_room_bytes(&room);
        REQUIRE(now >= seen && now % 2 == 0);
    }
    REQUIRE(pthread_join(counts, NULL) == 0);
    CHECK(now == 2 * BLOCKS && zbp_room_bytes(&room) == now);
    zbp_room_fini(&room);
}

static void a_room_that_is_wrong_is_told(void)
{
    const char *reason = NULL;
    zbp_room room;

    zbp_room_init(&room, &alloc);
    REQUIRE(zbp_room_count(&room, (zbp_place){16, 5}) == ZBP_OK);
    room.bytes++;
    CHECK(zbp_room_check(&room, &reason) == ZBP_EINVAL && reason != NULL);
    CHECK(zbp_room_check(&room, NULL) == ZBP_EINVAL);
    room.bytes--;
    for (size_t i = 0; i < room.counted.capacity; i++)
        room.counted.slot[i].serial = 0;
    CHECK(zbp_room_check(&room, &reason) == ZBP_EINVAL && reason != NULL);
    room.counted.count++;
    CHECK(zbp_room_check(&room, &reason) == ZBP_EINVAL && reason != NULL);
    room.counted.count--;
    zbp_room_fini(&room);
}

static void without_memory_nothing_is_counted(void)
{
    const char *reason = NULL;
    zbp_room room;
    uint64_t i = 0;

    zbp_room_init(&room, &alloc);
    REQUIRE(zbp_room_count(&room, (zbp_place){8, 1}) == ZBP_OK);
    count.fail_at = count.calls;
    while (i < 1000 && zbp_room_count(&room, (zbp_place){(i + 1) * 16, 3}) == ZBP_OK)
        i++;
    CHECK(i < 1000 && room.bytes == 1 + 3 * i);
    CHECK(zbp_room_count(&room, (zbp_place){8, 1}) == ZBP_OK); /* it is there already */
    zbp_room_forget(&room, 8);
    CHECK(room.bytes == 1 + 3 * i);
    CHECK_VALID(zbp_room_check(&room, &reason));
    count.fail_at = -1;
    zbp_room_fini(&room);
    CHECK(count.live == 0);
}

/* Each place against all before it. */
static void what_is_not_counted_is_weighed_once(void)
{
    enum { PLACES = 24 };
    uint64_t random = 3;
    zbp_room room;

    zbp_room_init(&room, &alloc);
    for (uint32_t s = 1; s <= 10; s += 3)
        REQUIRE(zbp_room_count(&room, (zbp_place){s, s}) == ZBP_OK);
    for (uint32_t round = 0; round < 20000; round++) {
        const uint32_t places = model_below(&random, PLACES + 1);
        const uint32_t always = model_below(&random, places + 1);
        zbp_place place[PLACES];
        uint64_t always_bytes = 0, all_bytes = 0, always_naive = 0, all_naive = 0;

        for (uint32_t i = 0; i < places; i++) {
            const uint32_t s = 1 + model_below(&random, 12);
            bool is_new = s % 3 != 1 || s > 10;

            place[i] = (zbp_place){s, s};
            for (uint32_t j = 0; j < i; j++)
                is_new = is_new && place[j].storage != s;
            all_naive += is_new ? s : 0;
            always_naive += is_new && i < always ? s : 0;
        }
        zbp_room_weigh(&room, place, always, places, &always_bytes, &all_bytes);
        CHECK(always_bytes == always_naive && all_bytes == all_naive);
    }
    zbp_room_fini(&room);
}

/* What is due to tasks that have not run is kept free for them, and so is what is known to come. */
static void what_is_kept_free_is_not_given_away(void)
{
    const zbp_demand demand = {{6, ZBP_NO_WAY, 2}, ZBP_HOLD_KEPT};
    zbp_room room = {0};
    zbp_budget budget = {.at_most = 10};
    zbp_share share = {0}, nothing = {0};
    uint64_t due[] = {2, 5};

    zbp_budget_expect(&budget, due[0]);
    zbp_budget_expect(&budget, due[1]);
    CHECK(budget.least == 7 && budget.due == 7);
    CHECK(zbp_room_choose(&room, &budget, &share, &due[0], &demand) ==
          ZBP_HOLD_COMPUTED); /* 5 free */
    CHECK(budget.due == 5 && due[0] == 0 && share.least == 2);
    zbp_room_settle(&budget, &share, &due[1], 1);
    CHECK(budget.due == 0 && budget.least == 7 && share.least == 3);
    CHECK(zbp_room_choose(&room, &budget, &share, &due[0], &demand) == ZBP_HOLD_KEPT);

    /* It waits, and later calls know that so much comes. */
    zbp_room_leave(&room, &share);
    CHECK(zbp_most_of(&room.most) == 0);
    zbp_room_wait(&room, &share);
    CHECK(room.waiting == 5 && zbp_most_of(&room.most) == 5);
    zbp_room_leave(&room, &share);
    zbp_room_leave(&room, &share);
    zbp_room_wait(&room, &nothing); /* which is no fall to 0 */
    zbp_room_leave(&room, &nothing);
    CHECK(room.most.periods == 1);
    CHECK(room.waiting == 0 && zbp_most_of(&room.most) == 5);
    budget = (zbp_budget){.at_most = 10};
    CHECK(zbp_room_choose(&room, &budget, &share, &due[0], &demand) == ZBP_HOLD_COMPUTED);
    budget = (zbp_budget){.at_most = 11};
    CHECK(zbp_room_choose(&room, &budget, &share, &due[0], &demand) == ZBP_HOLD_KEPT);
}

/* ---- steps at random */

enum { MICROBATCHES = 6, TASKS = 4, EVENTS = 2 * MICROBATCHES };

typedef struct one_step {
    zbp_demand demand[MICROBATCHES][TASKS];
    uint8_t microbatch[EVENTS]; /* the first time its I, the second time its W */
    uint64_t most;              /* that waits at the same time, at least */
} one_step;

static uint64_t least_of(const zbp_demand *demand)
{
    uint64_t least = demand->bytes[0];

    for (uint32_t way = 1; way < ZBP_HOLD_COUNT; way++)
        least = demand->bytes[way] < least ? demand->bytes[way] : least;
    return least;
}

static uint64_t least_of_all(const one_step *step, uint32_t m)
{
    uint64_t least = 0;

    for (uint32_t t = 0; t < TASKS; t++)
        least += least_of(&step->demand[m][t]);
    return least;
}

static one_step draw_step(uint64_t *random)
{
    one_step step = {0};
    bool has_come[MICROBATCHES] = {false};
    uint64_t waits = 0;

    for (uint32_t e = 0; e < EVENTS; e++)
        step.microbatch[e] = (uint8_t)(e / 2);
    for (uint32_t e = EVENTS - 1; e > 0; e--) {
        const uint32_t other = model_below(random, e + 1);
        const uint8_t m = step.microbatch[e];

        step.microbatch[e] = step.microbatch[other];
        step.microbatch[other] = m;
    }
    for (uint32_t m = 0; m < MICROBATCHES; m++) {
        for (uint32_t t = 0; t < TASKS; t++) {
            zbp_demand *demand = &step.demand[m][t];

            demand->asked = (uint8_t)model_below(random, ZBP_HOLD_COUNT);
            for (uint32_t way = 0; way < ZBP_HOLD_COUNT; way++)
                demand->bytes[way] = way != ZBP_HOLD_COMPUTED && model_below(random, 4) == 0
                                         ? ZBP_NO_WAY
                                         : model_below(random, 50);
        }
    }
    for (uint32_t e = 0; e < EVENTS; e++) {
        const uint32_t m = step.microbatch[e];

        waits = has_come[m] ? waits - least_of_all(&step, m) : waits + least_of_all(&step, m);
        has_come[m] = true;
        step.most = waits > step.most ? waits : step.most;
    }
    return step;
}

static uint64_t storage_of(uint32_t m, uint32_t t)
{
    return 1 + m * TASKS + t;
}

/* The most bytes that were counted at once. */
static uint64_t run_step(zbp_room *room, const one_step *step, uint64_t at_most)
{
    zbp_share share[MICROBATCHES] = {{0}};
    bool has_come[MICROBATCHES] = {false};
    uint64_t most = 0;

    for (uint32_t e = 0; e < EVENTS; e++) {
        const uint32_t m = step->microbatch[e];
        zbp_budget budget = {.at_most = at_most};
        uint64_t due[TASKS];

        if (has_come[m]) {
            for (uint32_t t = 0; t < TASKS; t++)
                zbp_room_forget(room, storage_of(m, t));
            zbp_room_leave(room, &share[m]);
            continue;
        }
        has_come[m] = true;
        for (uint32_t t = 0; t < TASKS; t++) {
            due[t] = least_of(&step->demand[m][t]);
            zbp_budget_expect(&budget, due[t]);
        }
        for (uint32_t t = 0; t < TASKS; t++) {
            const zbp_demand *demand = &step->demand[m][t];
            const uint8_t way = zbp_room_choose(room, &budget, &share[m], &due[t], demand);
            const zbp_place place = {storage_of(m, t), demand->bytes[way]};

            REQUIRE(demand->bytes[way] != ZBP_NO_WAY && zbp_room_count(room, place) == ZBP_OK);
            most = room->bytes > most ? room->bytes : most;
        }
        zbp_room_wait(room, &share[m]);
    }
    return most;
}

static void a_step_is_within_the_budget_from_its_second_run(void)
{
    uint64_t random = 5;
    uint32_t exceeded = 0, had_more = 0;

    for (uint32_t round = 0; round < 5000; round++) {
        const one_step step = draw_step(&random);
        const uint64_t at_most = step.most + model_below(&random, 200);
        const char *reason = NULL;
        zbp_room room;

        zbp_room_init(&room, &alloc);
        exceeded += run_step(&room, &step, at_most) > at_most;
        CHECK(zbp_most_of(&room.most) == step.most);
        for (uint32_t again = 0; again < 2; again++) {
            const uint64_t most = run_step(&room, &step, at_most);

            CHECK(most <= at_most);
            had_more += most > step.most;
            CHECK(room.bytes == 0 && room.waiting == 0);
            CHECK_VALID(zbp_room_check(&room, &reason));
        }
        zbp_room_fini(&room);
    }
    CHECK(exceeded > 100); /* the first run does not know yet */
    CHECK(had_more > 1000);
    CHECK(count.live == 0);
}

int main(void)
{
    alloc = counting_alloc(&count);
    check_sees_failure();
    RUN(nothing_is_counted_at_first);
    RUN(each_storage_is_counted_once);
    RUN(who_asks_for_the_bytes_waits_for_nobody);
    RUN(a_room_that_is_wrong_is_told);
    RUN(without_memory_nothing_is_counted);
    RUN(what_is_not_counted_is_weighed_once);
    RUN(what_is_kept_free_is_not_given_away);
    RUN(a_step_is_within_the_budget_from_its_second_run);
    return check_end();
}
