/* Recordings that any thread feeds: each alone, and several of them; random ones are fuzz_record.c's. */
#include <pthread.h>

#include "check.h"
#include "counting.h"
#include "instruments/core/zbp_record.h"
#include "model.h"

enum { THREADS = 4, BLOCKS = 64, ROUNDS = 4000 };

/* Read under the lock alone: not atomic. */
static uint64_t tick(void)
{
    static uint64_t ticks;

    return ++ticks;
}

static void two_records_by_hand(void)
{
    zbp_tally tally;
    zbp_record first, second;
    uint32_t mark = 7;

    zbp_tally_init(&tally, tick);
    zbp_tally_free(&tally, 16);
    CHECK(!zbp_tally_is_fed(&tally) && zbp_tally_serial(&tally) == 0);
    CHECK(zbp_tally_alloc(&tally, 64, 1000, 0)); /* nobody looks */
    CHECK(zbp_tally_start(&tally, &first, 100) == ZBP_OK && first.first_serial == 1);
    CHECK(zbp_tally_alloc(&tally, 128, 10, 0));
    CHECK(zbp_tally_start(&tally, &second, 100) == ZBP_OK && second.first_serial == 2);
    CHECK(zbp_tally_is_fed(&tally) && second.mark[0].time_ns > first.event[0].time_ns);
    CHECK(zbp_tally_alloc(&tally, 192, 200, 0));
    zbp_tally_free(&tally, 128);
    zbp_tally_free(&tally, 128); /* nobody's now */
    zbp_tally_free(&tally, 64);
    CHECK(first.live == 200 && first.mark[0].peak == 210);
    CHECK(second.live == 200 && second.mark[0].frees == 0);
    CHECK(first.event_count == 4 && first.event[3].kind == ZBP_EVENT_FREE_OLDER);
    CHECK(first.event[2].kind == ZBP_EVENT_FREE && first.event[2].block.bytes == 10);
    CHECK(zbp_tally_mark(&tally, &second, &mark) == ZBP_OK && mark == 1);
    CHECK(second.mark[1].live == 200 && second.mark[1].peak == 200 && second.mark[1].events == 3);
    CHECK(second.mark[1].thread == first.event[0].thread && second.mark[1].thread > 0);

    CHECK(!zbp_tally_stop(&tally, &first) && zbp_tally_is_fed(&tally));
    zbp_tally_untracked(&tally);
    CHECK(first.untracked == 0 && second.untracked == 1);
    CHECK(zbp_tally_alloc(&tally, 192, 5, 0)); /* the 200 went unseen */
    CHECK(first.live == 200 && second.live == 5);
    CHECK(second.mark[1].freed == 200 && second.mark[1].allocated == 5 &&
          second.mark[0].freed == 0);
    CHECK(second.untracked == 1 && zbp_tally_serial(&tally) == 4);
    CHECK(zbp_tally_stop(&tally, &second) && !zbp_tally_is_fed(&tally));
    second.mark_count = UINT32_MAX;
    CHECK(zbp_tally_mark(&tally, &second, &mark) == ZBP_ENOMEM && mark == 1);
    zbp_record_fini(&first);
    zbp_record_fini(&second);
    zbp_tally_fini(&tally);
    CHECK(count.live == 0);
}

static void the_log_is_bounded_and_the_counters_are_not(void)
{
    for (uint64_t most = 0; most <= 320; most += 64) {
        zbp_tally tally;
        zbp_record record;
        uint32_t mark = 0;

        zbp_tally_init(&tally, tick);
        REQUIRE(zbp_tally_start(&tally, &record, most) == ZBP_OK);
        for (uint64_t i = 1; i <= 200; i++)
            REQUIRE(zbp_tally_alloc(&tally, i * 16, 2, 0));
        CHECK(record.event_count == (most < 200 ? most : 200) && record.live == 400);
        CHECK(record.dropped == (most == 0 || most > 200 ? 0 : 200 - most));
        CHECK(zbp_tally_mark(&tally, &record, &mark) == ZBP_OK && record.mark[mark].live == 400);
        CHECK(zbp_tally_stop(&tally, &record));
        zbp_record_fini(&record);
        zbp_tally_fini(&tally);
    }
    CHECK(count.live == 0);
}

/* The n-th call for memory fails, alone or with all after it, for every n. */
static void without_memory_it_goes_on_and_says_so(void)
{
    for (int is_once = 0; is_once < 2; is_once++) {
        bool has_failed = true;

        for (long n = 0; has_failed; n++) {
            zbp_tally tally;
            zbp_record record;
            uint64_t followed = 0, marked = 0;
            uint32_t mark = 0;

            zbp_tally_init(&tally, tick);
            *(is_once ? &count.fail_once : &count.fail_at) = count.calls + n;
            const bool is_started = zbp_tally_start(&tally, &record, UINT64_MAX) == ZBP_OK;

            CHECK(is_started == (n != 0) && zbp_tally_is_fed(&tally) == is_started);
            for (uint64_t i = 1; i <= 400; i++) {
                followed += zbp_tally_alloc(&tally, i * 16, 1, 0);
                marked += is_started && zbp_tally_mark(&tally, &record, &mark) == ZBP_OK;
            }
            has_failed = n < 15;
            CHECK(tally.blocks.count == followed && tally.next_serial == followed);
            CHECK(!is_started || record.untracked == 400 - followed);
            CHECK(!is_started || record.event_count + record.dropped == followed);
            CHECK(!is_started || (record.live == followed && record.mark_count == marked + 1));
            count.fail_once = count.fail_at = -1;
            CHECK(zbp_tally_stop(&tally, &record));
            zbp_record_fini(&record);
            zbp_tally_fini(&tally);
            CHECK(count.live == 0);
        }
    }
}

/* Threads ---------------------------------------------------------------------------------------- */

typedef struct worker {
    zbp_tally *tally;
    uint64_t number;
    bool is_right;
} worker;

/* Blocks at addresses that no other thread has. */
static void *work(void *argument)
{
    worker *self = argument;
    uint64_t random = self->number + 1;
    bool has[BLOCKS] = {false};

    for (uint32_t round = 0; round < ROUNDS + BLOCKS; round++) {
        const uint32_t k = round < ROUNDS ? model_below(&random, BLOCKS) : round - ROUNDS;
        const uint64_t address = (self->number * BLOCKS + k + 1) * 16;

        if (has[k])
            zbp_tally_free(self->tally, address);
        else if (round < ROUNDS)
            self->is_right = self->is_right && zbp_tally_alloc(self->tally, address, 1, 0);
        has[k] = !has[k];
    }
    return NULL;
}

/* Reads while they work: what it sees is some moment's. */
static void *look(void *argument)
{
    worker *self = argument;
    uint64_t serial = 0;

    for (uint32_t round = 0; round < 200; round++) {
        const uint64_t now = zbp_tally_serial(self->tally);
        zbp_record record;
        uint32_t mark = 0;

        self->is_right =
            self->is_right && now >= serial && zbp_tally_is_fed(self->tally) &&
            zbp_tally_start(self->tally, &record, 10) == ZBP_OK &&
            zbp_tally_mark(self->tally, &record, &mark) == ZBP_OK &&
            !zbp_tally_stop(self->tally, &record); /* the test's own is fed all the time */
        self->is_right = self->is_right && record.mark[0].thread == record.mark[1].thread;
        zbp_record_fini(&record);
        serial = now;
    }
    return NULL;
}

static void threads_are_all_seen(void)
{
    zbp_tally tally;
    zbp_record record;
    worker of[THREADS + 1];
    int64_t logged = 0;
    pthread_t thread[THREADS + 1];

    zbp_tally_init(&tally, tick); /* the counting allocator is one thread's */
    REQUIRE(zbp_tally_start(&tally, &record, 1000000) == ZBP_OK);
    for (uint64_t i = 0; i <= THREADS; i++) {
        of[i] = (worker){&tally, i, true};
        REQUIRE(pthread_create(&thread[i], NULL, i < THREADS ? work : look, &of[i]) == 0);
    }
    for (uint64_t i = 0; i <= THREADS; i++) {
        REQUIRE(pthread_join(thread[i], NULL) == 0);
        CHECK(of[i].is_right);
    }
    zbp_tally_lock(&tally);
    for (uint32_t i = 0; i < record.event_count; i++) {
        CHECK(i == 0 || record.event[i].time_ns >= record.event[i - 1].time_ns);
        logged += record.event[i].kind == ZBP_EVENT_ALLOC ? 1 : -1; /* each block is of one byte */
    }
    CHECK(logged == 0 && tally.block_count == 0 && tally.blocks.count == 0);
    CHECK(record.live == 0 && record.untracked == 0 && record.event_count > THREADS * ROUNDS / 2);
    zbp_tally_unlock(&tally);
    CHECK(zbp_tally_stop(&tally, &record));
    zbp_record_fini(&record);
    zbp_tally_fini(&tally);
}

int main(void)
{
    check_sees_failure();
    RUN(two_records_by_hand);
    RUN(the_log_is_bounded_and_the_counters_are_not);
    RUN(without_memory_it_goes_on_and_says_so);
    RUN(threads_are_all_seen);
    return check_end();
}
