#include "check.h"
#include "checks.h"
#include "counting.h"
#include "model.h"
#include "core/memory/zbp_record.h"

static zbp_alloc alloc;
static counting count;

static zbp_block block(uint64_t bytes, uint64_t serial)
{
    return (zbp_block){(serial + 1) * 64, bytes, serial};
}

/* Serials below 10 are older than the recording. */
static void begin(zbp_record *record, uint64_t max_events)
{
    REQUIRE(zbp_record_init(record, 100, 10, 1, max_events, &alloc) == ZBP_OK);
}

static void spans_and_held_by_hand(void)
{
    zbp_record record;
    uint32_t mark[4];
    uint64_t bytes = 0;
    const char *reason = NULL;

    begin(&record, 100);
    zbp_record_alloc(&record, 101, 1, block(1000, 10));
    zbp_record_alloc(&record, 102, 2, block(200, 11));
    CHECK(zbp_record_mark(&record, 103, 12, 1, &mark[0]) == ZBP_OK && mark[0] == 1);
    zbp_record_alloc(&record, 104, 1, block(30, 12));
    zbp_record_free(&record, 105, 1, block(1000, 10));
    zbp_record_free(&record, 106, 1, block(5, 3)); /* older */
    CHECK(zbp_record_mark(&record, 107, 13, 1, &mark[1]) == ZBP_OK);
    CHECK(zbp_record_mark(&record, 108, 13, 1, &mark[2]) == ZBP_OK);
    zbp_record_alloc(&record, 109, 1, block(4, 13));
    zbp_record_free(&record, 110, 1, block(4, 13));
    zbp_record_free(&record, 111, 1, block(200, 11));
    CHECK(zbp_record_mark(&record, 112, 14, 1, &mark[3]) == ZBP_OK);
    CHECK_VALID(zbp_record_check(&record, &reason));

    CHECK(record.live == 30 && record.total.peak == 1230 && record.total.allocated == 1234);
    CHECK(record.total.freed == 1204 && record.total.allocations == 4 && record.total.frees == 3);
    CHECK(record.older_frees == 1 && record.older_freed == 5 && record.event_count == 8);
    CHECK(record.mark[1].live == 1200 && record.mark[1].span.peak == 1230);
    CHECK(record.mark[2].live == 230 && record.mark[2].span.peak == 230);
    CHECK(record.mark[3].live == 230 && record.mark[3].span.peak == 234 &&
          record.mark[3].span.freed == 204);
    CHECK(record.mark[1].thread == 1 && zbp_record_event(&record, 1)->thread == 2);
    CHECK(zbp_record_event(&record, 4)->kind == ZBP_EVENT_FREE_OLDER);

    /* Live at mark 2 and freed behind mark 3: the 200, not the 4 that came later. */
    const zbp_range last = {mark[2], mark[3]}, both = {mark[0], mark[3]};
    CHECK(zbp_record_held(&record, mark[1], last, NULL, 0, &bytes) == ZBP_OK && bytes == 200);
    CHECK(zbp_record_held(&record, mark[0], both, NULL, 0, &bytes) == ZBP_OK && bytes == 1200);
    CHECK(zbp_record_held(&record, mark[2], (zbp_range){mark[1], mark[3]}, NULL, 0, &bytes) ==
          ZBP_EINVAL);
    CHECK(zbp_record_held(&record, 0, (zbp_range){0, 5}, NULL, 0, &bytes) == ZBP_EINVAL);
    CHECK(bytes == 1200);

    /* The 1000 and the 200 were handed out before mark 1, on threads 1 and 2; mark 0 is thread 1's. */
    const zbp_range others[] = {{mark[1], mark[2]}, {0, mark[0]}, {9, 10}};
    CHECK(zbp_record_held(&record, mark[0], both, others, 1, &bytes) == ZBP_OK && bytes == 1200);
    CHECK(zbp_record_held(&record, mark[0], both, others, 2, &bytes) == ZBP_OK && bytes == 200);
    CHECK(zbp_record_held(&record, mark[0], both, others, 3, &bytes) == ZBP_EINVAL && bytes == 200);
    zbp_record_fini(&record);
    CHECK(count.live == 0);
}

static void the_log_is_bounded_and_the_counters_are_not(void)
{
    zbp_record record;
    const char *reason = NULL;
    uint32_t mark = 0;

    for (uint64_t most = 0; most <= 2 * ZBP_EVENTS_PER_CHUNK; most += ZBP_EVENTS_PER_CHUNK / 2) {
        begin(&record, most);
        for (uint64_t i = 0; i < 3 * ZBP_EVENTS_PER_CHUNK; i++)
            zbp_record_alloc(&record, 200 + i, 1, block(1, 10 + i));
        CHECK(record.event_count == most && record.live == 3 * ZBP_EVENTS_PER_CHUNK);
        CHECK(record.dropped == (most == 0 ? 0 : 3 * ZBP_EVENTS_PER_CHUNK - most));
        CHECK(zbp_record_mark(&record, 1u << 30, 1u << 30, 1, &mark) == ZBP_OK);
        CHECK(record.mark[mark].live == 3 * ZBP_EVENTS_PER_CHUNK);
        CHECK_VALID(zbp_record_check(&record, &reason));
        zbp_record_fini(&record);
    }
    CHECK(count.live == 0);
}

/* The n-th allocation fails, for each n: counters stay right, the log is a prefix, nothing leaks. */
static void memory_runs_out(void)
{
    for (long n = 0; n < 12; n++) {
        zbp_record record;
        const char *reason = NULL;
        uint32_t mark = 0;
        int status;

        count.fail_once = count.calls + n;
        status = zbp_record_init(&record, 1, 0, 1, UINT64_MAX, &alloc);
        CHECK(status == (n == 0 ? ZBP_ENOMEM : ZBP_OK));
        if (status == ZBP_OK) {
            for (uint64_t i = 0; i < 4 * ZBP_EVENTS_PER_CHUNK; i++) {
                zbp_record_alloc(&record, i + 1, 1, block(2, i));
                if (i % 100 == 0) {
                    uint32_t before = record.mark_count;

                    status = zbp_record_mark(&record, i + 1, i + 1, 1, &mark);
                    CHECK(status == ZBP_OK ? mark == before : record.mark_count == before);
                }
            }
            CHECK(record.live == 8 * ZBP_EVENTS_PER_CHUNK);
            CHECK(record.event_count + record.dropped == 4 * ZBP_EVENTS_PER_CHUNK);
            CHECK_VALID(zbp_record_check(&record, &reason));
        }
        zbp_record_fini(&record);
        count.fail_once = -1;
        CHECK(count.live == 0);
    }
}

/* Against sums over an array of blocks. */
static void model(void)
{
    enum { BLOCKS = 500 };
    static uint64_t bytes[BLOCKS], serial[BLOCKS];
    uint64_t random = 3, live = 0, peak = 0, next = 10;
    const char *reason = NULL;
    zbp_record record;
    uint32_t mark = 0;

    memset(bytes, 0, sizeof bytes);
    begin(&record, UINT64_MAX);
    for (uint64_t i = 0; i < 50000; i++) {
        uint32_t k = model_below(&random, BLOCKS);

        if (bytes[k] == 0) {
            bytes[k] = 1 + model_below(&random, 1000);
            serial[k] = next++;
            live += bytes[k];
            zbp_record_alloc(&record, 100 + i, 1, block(bytes[k], serial[k]));
        } else {
            zbp_record_free(&record, 100 + i, 1, block(bytes[k], serial[k]));
            live -= bytes[k];
            bytes[k] = 0;
        }
        peak = live > peak ? live : peak;
        if (model_below(&random, 50) == 0) {
            REQUIRE(zbp_record_mark(&record, 100 + i, next, 1, &mark) == ZBP_OK);
            CHECK(record.mark[mark].live == live && record.mark[mark - 1].span.peak <= peak);
        }
    }
    CHECK(record.live == live && record.total.peak == peak);
    CHECK_VALID(zbp_record_check(&record, &reason));
    zbp_record_fini(&record);
    CHECK(count.live == 0);
}

/* Blocks that the log knows and that come and go in long runs, on two threads: against a walk over the log. */
static void held_as_the_log_tells(void)
{
    enum { RUNS = 40, MOST = 200 };
    uint64_t random = 5, next = 10, time_ns = 100, live[RUNS * MOST];
    uint32_t live_count = 0, mark[RUNS] = {0};
    const char *reason = NULL;
    zbp_record record;

    begin(&record, UINT64_MAX);
    for (uint32_t r = 0; r < RUNS; r++) {
        uint32_t length = 1 + model_below(&random, MOST - 1), thread = 1 + model_below(&random, 2);

        for (uint32_t i = 0; i < length; i++) {
            if (r % 3 == 0 || live_count == 0) {
                live[live_count++] = next;
                zbp_record_alloc(&record, time_ns++, thread, block(next % 100, next));
                next += 1 + model_below(&random,
                                        3); /* others have been handed out that this one missed */
            } else {
                uint32_t k = model_below(&random, live_count);

                zbp_record_free(&record, time_ns++, thread, block(live[k] % 100, live[k]));
                live[k] = live[--live_count];
            }
        }
        zbp_record_free_older(&record, time_ns++, thread, block(7, 1));
        REQUIRE(zbp_record_mark(&record, time_ns, next, thread, &mark[r]) == ZBP_OK);
    }
    CHECK_VALID(zbp_record_check(&record, &reason));
    for (uint32_t q = 0; q < 200; q++) {
        uint32_t m[4] = {model_below(&random, RUNS), model_below(&random, RUNS),
                         model_below(&random, RUNS), model_below(&random, RUNS)};
        const zbp_range range = {mark[m[0] < m[1] ? m[0] : m[1]], mark[m[0] < m[1] ? m[1] : m[0]]};
        const zbp_range other = {mark[m[2] < m[3] ? m[2] : m[3]], mark[m[2] < m[3] ? m[3] : m[2]]};
        uint64_t bytes = 0, expected = 0;

        for (uint64_t i = record.mark[range.begin].events; i < record.mark[range.end].events; i++) {
            const zbp_event *freed = zbp_record_event(&record, i);
            bool is_others = false;

            for (uint64_t k = record.mark[other.begin].events; k < record.mark[other.end].events;
                 k++) {
                const zbp_event *event = zbp_record_event(&record, k);

                is_others |= event->kind == ZBP_EVENT_ALLOC &&
                             event->block.serial == freed->block.serial &&
                             event->thread == record.mark[other.begin].thread;
            }
            if (freed->kind == ZBP_EVENT_FREE && !is_others &&
                freed->block.serial < record.mark[range.begin].serial)
                expected += freed->block.bytes;
        }
        CHECK(zbp_record_held(&record, range.begin, range, &other, 1, &bytes) == ZBP_OK);
        CHECK(bytes == expected);
    }
    zbp_record_fini(&record);
    CHECK(count.live == 0);
}

/* More events in a row than since_alloc can tell. */
static void a_longer_run_than_can_be_told(void)
{
    zbp_record record;
    zbp_event *event;
    uint32_t mark[2] = {0};
    uint64_t bytes = 0;

    begin(&record, 100);
    zbp_record_free_older(&record, 101, 1, block(1, 1));
    zbp_record_alloc(&record, 102, 1, block(8, 10));
    REQUIRE(zbp_record_mark(&record, 103, 11, 1, &mark[0]) == ZBP_OK);
    for (uint64_t i = 0; i < 20; i++)
        zbp_record_free_older(&record, 104 + i, 1, block(1, 1));
    zbp_record_free(&record, 150, 1, block(8, 10));
    REQUIRE(zbp_record_mark(&record, 151, 11, 1, &mark[1]) == ZBP_OK);
    for (uint64_t i = 2; i < 23; i++) { /* as if 5 were the most */
        event = (zbp_event *)zbp_record_event(&record, i);
        CHECK(event->since_alloc == i - 1);
        event->since_alloc = i - 1 < 5 ? (unsigned)(i - 1) & 7u : 5;
    }
    const zbp_range range = {mark[0], mark[1]}, other = {0, mark[0]};
    CHECK(zbp_record_held(&record, mark[0], range, &other, 1, &bytes) == ZBP_OK && bytes == 0);
    zbp_record_fini(&record);
}

/* A block of the recording's own whose handing out the log lacks was handed out in no range. */
static void what_the_log_lacks_is_nobodys(void)
{
    zbp_record record;
    uint32_t mark[2] = {0};
    uint64_t bytes = 0;

    begin(&record, 100);
    zbp_record_alloc(&record, 101, 1, block(8, 10));
    zbp_record_alloc(&record, 102, 1, block(100, 12));
    REQUIRE(zbp_record_mark(&record, 103, 15, 1, &mark[0]) == ZBP_OK);
    zbp_record_free(&record, 104, 1, block(1, 11)); /* between two of the log */
    zbp_record_free(&record, 105, 1, block(2, 14)); /* behind all of it */
    zbp_record_free(&record, 106, 1, block(8, 10));
    REQUIRE(zbp_record_mark(&record, 107, 15, 1, &mark[1]) == ZBP_OK);
    const zbp_range range = {mark[0], mark[1]}, other = {0, mark[0]};
    CHECK(zbp_record_held(&record, mark[0], range, &other, 1, &bytes) == ZBP_OK && bytes == 3);
    CHECK(zbp_record_held(&record, 0, (zbp_range){2, 1}, NULL, 0, &bytes) == ZBP_EINVAL);
    CHECK(zbp_record_held(&record, 0, range, &(zbp_range){2, 1}, 1, &bytes) == ZBP_EINVAL);
    CHECK(bytes == 3);
    zbp_record_fini(&record);
    CHECK(count.live == 0);
}

static void counts_end_before_they_run_over(void)
{
    zbp_record record;
    zbp_event *event;
    uint32_t mark = 7;

    begin(&record, UINT64_MAX);
    zbp_record_free_older(&record, 101, 1, block(1, 1));
    zbp_record_free_older(&record, 102, 1, block(1, 2));
    event = (zbp_event *)zbp_record_event(&record, 1);
    event->since_alloc = ZBP_SINCE_MOST; /* as after so many */
    zbp_record_free_older(&record, 103, 1, block(1, 3));
    CHECK(zbp_record_event(&record, 2)->since_alloc == ZBP_SINCE_MOST);
    record.mark_count = UINT32_MAX;
    CHECK(zbp_record_mark(&record, 104, 10, 1, &mark) == ZBP_EOVERFLOW && mark == 7);
    CHECK(record.mark_count == UINT32_MAX);
    record.mark_count = 1;
    record.event_count = (uint64_t)UINT32_MAX * ZBP_EVENTS_PER_CHUNK; /* as many chunks as can be */
    zbp_record_free_older(&record, 105, 1, block(1, 4));
    CHECK(record.event_count == (uint64_t)UINT32_MAX * ZBP_EVENTS_PER_CHUNK);
    CHECK(record.dropped == 1 && record.older_frees == 4);
    record.event_count = 3;
    zbp_record_fini(&record);
    CHECK(count.live == 0);
}

static void expect(const zbp_record *record, const char *wanted)
{
    const char *reason = NULL;

    CHECK(zbp_record_check(record, &reason) == ZBP_EINVAL && reason != NULL &&
          strstr(reason, wanted) != NULL);
}

static void check_names_planted_faults(void)
{
    zbp_record record, broken;
    zbp_event *event;
    uint32_t mark = 0;

    begin(&record, 100);
    zbp_record_alloc(&record, 101, 1, block(8, 10));
    zbp_record_alloc(&record, 102, 1, block(8, 11));
    CHECK(zbp_record_mark(&record, 103, 12, 1, &mark) == ZBP_OK);
    zbp_record_free(&record, 104, 1, block(8, 10));
    broken = record;
    broken.mark_count = 0;
    expect(&broken, "no mark 0");
    broken = record;
    broken.live++;
    expect(&broken, "live is not");
    broken = record;
    broken.total.peak++;
    expect(&broken, "add up");
    broken = record;
    broken.total.allocations++;
    expect(&broken, "add up");
    broken = record;
    broken.total.frees++;
    expect(&broken, "add up");
    CHECK(zbp_record_check(&broken, NULL) == ZBP_EINVAL);
    CHECK(zbp_record_check(&record, NULL) == ZBP_OK);
    record.mark[0].span.peak = 8; /* and 16 at its end */
    expect(&record, "lower than its ends");
    record.mark[0].span.peak = 16;
    record.mark[1].live++;
    expect(&record, "lead to the next");
    record.mark[1].live--;
    record.mark[1].span.peak = 0;
    expect(&record, "lower than its ends");
    record.mark[1].span.peak = 16;
    record.mark[1].events = 1;
    expect(&record, "a mark disagree");
    record.mark[1].events = 9;
    expect(&record, "behind the log");
    record.mark[1].events = 2;
    event = (zbp_event *)zbp_record_event(&record, 2);
    event->time_ns = 1;
    expect(&record, "backwards");
    event->time_ns = 104;
    event->block.serial = 2;
    expect(&record, "own");
    event->block.serial = 10;
    event->kind = ZBP_EVENT_FREE_OLDER;
    expect(&record, "counters disagree");
    event->since_alloc = 2;
    expect(&record, "latest block");
    zbp_record_fini(&record);
}

int main(void)
{
    alloc = counting_alloc(&count);
    check_sees_failure();
    RUN(spans_and_held_by_hand);
    RUN(the_log_is_bounded_and_the_counters_are_not);
    RUN(memory_runs_out);
    RUN(model);
    RUN(held_as_the_log_tells);
    RUN(a_longer_run_than_can_be_told);
    RUN(what_the_log_lacks_is_nobodys);
    RUN(counts_end_before_they_run_over);
    RUN(check_names_planted_faults);
    return check_end();
}
