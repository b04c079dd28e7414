/* A ledger that many threads feed: what each sees alone, and all of them together. */
#include <pthread.h>

#include "check.h"
#include "checks.h"
#include "counting.h"
#include "model.h"
#include "core/memory/zbp_tally.h"

enum { THREADS = 4, BLOCKS = 64, ROUNDS = 4000 };

static zbp_alloc alloc;
static counting count;

/* Read under the lock alone: not atomic. */
static uint64_t tick(void)
{
    static uint64_t ticks;

    return ++ticks;
}

static void nothing_is_told_at_first(void)
{
    zbp_tally tally;
    zbp_block_list list = {.count = 7};

    zbp_tally_init(&tally, tick, &alloc);
    zbp_tally_free(&tally, 16);
    CHECK(!zbp_tally_is_fed(&tally) && zbp_tally_serial(&tally) == 0);
    CHECK(zbp_tally_blocks(&tally, 0, &list) == ZBP_OK && list.count == 0 && list.block == NULL);
    CHECK(zbp_tally_collection_ends(&list) == ZBP_OK && list.block == NULL);
    zbp_block_list_fini(&list);
    zbp_tally_fini(&tally);
    CHECK(count.live == 0);
}

static void blocks_in_use_are_those_that_have_not_come_back(void)
{
    zbp_tally tally;
    zbp_block_list list;

    zbp_tally_init(&tally, tick, &alloc);
    for (uint64_t i = 1; i <= 5; i++)
        CHECK(zbp_tally_alloc(&tally, i * 16, i));
    zbp_tally_free(&tally, 48);
    zbp_tally_free(&tally, 4096); /* nobody's */
    CHECK(zbp_tally_serial(&tally) == 5);
    CHECK(zbp_tally_blocks(&tally, 1, &list) == ZBP_OK && list.count == 3);
    CHECK(list.block[0].address == 32 && list.block[1].address == 64 && list.block[2].bytes == 5);
    zbp_block_list_fini(&list);
    zbp_tally_fini(&tally);
    CHECK(count.live == 0);
}

static void records_are_fed_from_start_to_stop(void)
{
    zbp_tally tally;
    zbp_record first, second;
    uint32_t index = 7;

    zbp_tally_init(&tally, tick, &alloc);
    CHECK(zbp_tally_alloc(&tally, 16, 100));
    CHECK(zbp_tally_start(&tally, &first, 1000) == ZBP_OK && zbp_tally_is_fed(&tally));
    CHECK(zbp_tally_start(&tally, &second, 1000) == ZBP_OK);
    CHECK(zbp_tally_alloc(&tally, 32, 7));
    CHECK(zbp_tally_mark(&tally, &first, &index) == ZBP_OK);
    CHECK(!zbp_tally_stop(&tally, &first) && zbp_tally_is_fed(&tally));
    zbp_tally_untracked(&tally);
    CHECK(first.untracked == 0 && second.untracked == 1);
    zbp_tally_free(&tally, 32);
    CHECK(first.live == 7 && second.live == 0);
    CHECK(first.mark[0].time_ns < second.mark[0].time_ns);
    CHECK(second.mark[0].time_ns < first.mark[index].time_ns);
    CHECK(first.mark[0].thread == first.mark[index].thread && first.mark[0].thread > 0);
    CHECK(zbp_tally_stop(&tally, &second) && !zbp_tally_is_fed(&tally));
    zbp_record_fini(&first);
    zbp_record_fini(&second);
    zbp_tally_fini(&tally);
    CHECK(count.live == 0);
}

static void a_collection_lists_what_its_thread_takes_back(void)
{
    zbp_tally tally, other;
    zbp_block_list list;

    zbp_tally_init(&tally, tick, &alloc);
    zbp_tally_init(&other, tick, &alloc);
    for (uint64_t i = 1; i <= 300; i++)
        REQUIRE(zbp_tally_alloc(&tally, i * 16, i) && zbp_tally_alloc(&other, i * 16, i));
    zbp_tally_free(&tally, 16);
    zbp_tally_collection_begins(&tally);
    for (uint64_t i = 2; i <= 200; i++) {
        zbp_tally_free(&tally, i * 16);
        zbp_tally_free(&other, i * 16);
    }
    CHECK(zbp_tally_collection_ends(&list) == ZBP_OK && list.count == 199);
    for (size_t i = 0; i < list.count; i++)
        CHECK(list.block[i].address == (i + 2) * 16);
    zbp_block_list_fini(&list);

    zbp_tally_collection_begins(&tally);
    zbp_tally_free(&tally, 201 * 16);
    zbp_tally_forget_collections(&tally);
    zbp_tally_free(&tally, 202 * 16);
    CHECK(zbp_tally_collection_ends(&list) == ZBP_OK && list.count == 1);
    CHECK(list.block[0].address == 201 * 16);
    zbp_block_list_fini(&list);

    zbp_tally_collection_begins(&tally);
    zbp_tally_free(&tally, 204 * 16);
    zbp_tally_collection_begins(&tally); /* one that never ended is forgotten */
    zbp_tally_free(&tally, 203 * 16);
    CHECK(zbp_tally_collection_ends(&list) == ZBP_OK && list.count == 1);
    CHECK(list.block[0].address == 203 * 16);
    zbp_block_list_fini(&list);
    zbp_tally_fini(&tally);
    zbp_tally_fini(&other);
    CHECK(count.live == 0);
}

/* The n-th call for memory fails, for every n. */
static void without_memory_it_goes_on_and_says_so(void)
{
    bool has_failed = true;
    int refused = 0;

    for (long n = 0; has_failed; n++) {
        zbp_tally tally;
        zbp_record record = {0};
        zbp_block_list list = {0}, freed = {0};
        const long before = count.live;

        zbp_tally_init(&tally, tick, &alloc);
        count.fail_once = count.calls + n;
        const bool is_started = zbp_tally_start(&tally, &record, 10) == ZBP_OK;
        const bool is_followed = zbp_tally_alloc(&tally, 16, 5);
        const bool is_read = zbp_tally_blocks(&tally, 0, &list) == ZBP_OK;

        CHECK(zbp_tally_is_fed(&tally) == is_started);
        CHECK(is_read ? list.count == is_followed : list.count == 0 && list.block == NULL);
        CHECK(!is_started || record.untracked == !is_followed);
        zbp_tally_collection_begins(&tally);
        zbp_tally_free(&tally, 16);
        const bool is_listed = zbp_tally_collection_ends(&freed) == ZBP_OK;
        CHECK(is_listed ? freed.count == is_followed : freed.block == NULL);
        CHECK(zbp_tally_stop(&tally, &record));
        refused += !is_started + !is_followed + !is_read + !is_listed;
        has_failed = count.fail_once < count.calls;
        count.fail_once = -1;
        zbp_block_list_fini(&list);
        zbp_block_list_fini(&freed);
        zbp_record_fini(&record);
        zbp_tally_fini(&tally);
        CHECK(count.live == before);
    }
    CHECK(refused >= 4);
}

/* ---- threads */

typedef struct worker {
    zbp_tally *tally;
    uint64_t number;
    bool is_right;
} worker;

/* Blocks at addresses that no other thread has, some of them taken back by collections. */
static void *work(void *argument)
{
    worker *self = argument;
    uint64_t random = self->number + 1, held = 0, taken = 0;
    bool has[BLOCKS] = {false};

    for (uint32_t round = 0; round < ROUNDS; round++) {
        const uint32_t k = model_below(&random, BLOCKS);
        const uint64_t address = (self->number * BLOCKS + k + 1) * 16;
        const bool collects = model_below(&random, 8) == 0;

        if (!has[k]) {
            self->is_right = self->is_right && zbp_tally_alloc(self->tally, address, 1);
            held++;
        } else {
            zbp_block_list list = {0};

            if (collects)
                zbp_tally_collection_begins(self->tally);
            zbp_tally_free(self->tally, address);
            if (collects) {
                self->is_right = self->is_right && zbp_tally_collection_ends(&list) == ZBP_OK &&
                                 list.count == 1 && list.block[0].address == address;
                zbp_block_list_fini(&list);
            }
            taken++;
        }
        has[k] = !has[k];
    }
    for (uint32_t k = 0; k < BLOCKS; k++) {
        if (has[k])
            zbp_tally_free(self->tally, (self->number * BLOCKS + k + 1) * 16);
    }
    self->is_right = self->is_right && held >= taken;
    return NULL;
}

/* Reads while they work: what it sees is some moment's. */
static void *look(void *argument)
{
    worker *self = argument;
    uint64_t serial = 0;

    for (uint32_t round = 0; round < 200; round++) {
        const uint64_t now = zbp_tally_serial(self->tally);
        zbp_block_list list = {0};
        zbp_record record;

        self->is_right = self->is_right && now >= serial && zbp_tally_is_fed(self->tally) &&
                         zbp_tally_blocks(self->tally, serial, &list) == ZBP_OK &&
                         list.count <= THREADS * BLOCKS;
        for (size_t i = 1; i < list.count; i++)
            self->is_right = self->is_right && list.block[i].serial > list.block[i - 1].serial;
        zbp_block_list_fini(&list);
        self->is_right =
            self->is_right && zbp_tally_start(self->tally, &record, 10) == ZBP_OK &&
            !zbp_tally_stop(self->tally, &record); /* the test's own record is fed all the time */
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
    pthread_t thread[THREADS + 1];
    const char *reason = NULL;

    zbp_tally_init(&tally, tick, NULL); /* the counting allocator is one thread's */
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
    CHECK(record.live == 0 && record.untracked == 0);
    CHECK_VALID(zbp_ledger_check(&tally.ledger, &reason));
    zbp_tally_unlock(&tally);
    CHECK(tally.block_count == 0);
    CHECK(zbp_tally_stop(&tally, &record));
    zbp_record_fini(&record);
    zbp_tally_fini(&tally);
}

int main(void)
{
    alloc = counting_alloc(&count);
    check_sees_failure();
    RUN(nothing_is_told_at_first);
    RUN(blocks_in_use_are_those_that_have_not_come_back);
    RUN(records_are_fed_from_start_to_stop);
    RUN(a_collection_lists_what_its_thread_takes_back);
    RUN(without_memory_it_goes_on_and_says_so);
    RUN(threads_are_all_seen);
    return check_end();
}
