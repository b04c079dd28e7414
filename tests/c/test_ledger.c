#include "check.h"
#include "checks.h"
#include "ledger_model.h"
#include "model.h"

static zbp_alloc alloc;
static counting count;

static void empty(void)
{
    zbp_ledger ledger = {0};
    zbp_record record = {0};
    const char *reason = "unset";

    CHECK(!zbp_ledger_free(&ledger, 1, 1, 64, NULL));
    CHECK(zbp_ledger_since(&ledger, 0, NULL) == 0);
    zbp_ledger_untracked(&ledger);
    zbp_ledger_stop(&ledger, &record);
    CHECK_VALID(zbp_ledger_check(&ledger, &reason));
    zbp_ledger_fini(&ledger);
    zbp_ledger_fini(&ledger);
    CHECK(zbp_ledger_alloc(&ledger, 1, 1, 64, 8) == ZBP_OK && ledger.next_serial == 1); /* libc's */
    zbp_ledger_fini(&ledger);
}

static void two_records_by_hand(void)
{
    zbp_ledger ledger;
    zbp_record first, second;
    zbp_block got[3];
    uint32_t mark = 0;
    const char *reason = NULL;

    zbp_ledger_init(&ledger, &alloc);
    CHECK(zbp_ledger_alloc(&ledger, 1, 1, 64, 1000) == ZBP_OK); /* nobody looks */
    CHECK(zbp_ledger_start(&ledger, &first, 2, 1, 100) == ZBP_OK && first.first_serial == 1);
    CHECK(zbp_ledger_alloc(&ledger, 3, 7, 128, 10) == ZBP_OK);
    CHECK(zbp_ledger_start(&ledger, &second, 4, 1, 100) == ZBP_OK && second.first_serial == 2);
    CHECK(zbp_ledger_alloc(&ledger, 5, 1, 192, 200) == ZBP_OK);
    CHECK(zbp_ledger_free(&ledger, 6, 1, 128, NULL) && !zbp_ledger_free(&ledger, 6, 1, 128, NULL));
    CHECK(zbp_ledger_free(&ledger, 7, 1, 64, NULL));
    CHECK_VALID(zbp_ledger_check(&ledger, &reason));
    CHECK(first.live == 200 && first.total.peak == 210 && first.older_freed == 1000);
    CHECK(second.live == 200 && second.total.frees == 0 && second.older_freed == 1010);
    CHECK(zbp_record_event(&first, 0)->thread == 7 && zbp_record_event(&first, 0)->time_ns == 3);
    CHECK(zbp_ledger_mark(&ledger, &second, 8, 1, &mark) == ZBP_OK && mark == 1);
    CHECK(second.mark[1].serial == 3 && second.mark[1].live == 200);

    zbp_ledger_stop(&ledger, &first);
    zbp_ledger_untracked(&ledger);
    CHECK(first.untracked == 0 && second.untracked == 1);
    CHECK(zbp_ledger_alloc(&ledger, 9, 1, 192, 5) == ZBP_OK); /* the 200 went unseen */
    CHECK(first.live == 200 && second.live == 5 && second.total.freed == 200);
    CHECK(zbp_ledger_alloc(&ledger, 10, 1, 64, 6) == ZBP_OK);
    CHECK(zbp_ledger_alloc(&ledger, 11, 1, 0, 6) == ZBP_EINVAL && ledger.next_serial == 5);
    CHECK(zbp_ledger_since(&ledger, 0, got) == 2 && got[0].bytes == 5 && got[1].address == 64);
    CHECK(zbp_ledger_since(&ledger, 4, got) == 1 && got[0].serial == 4);
    CHECK(zbp_ledger_since(&ledger, 5, got) == 0);
    CHECK_VALID(zbp_ledger_check(&ledger, &reason));
    zbp_ledger_fini(&ledger);
    zbp_record_fini(&first);
    zbp_record_fini(&second);
    CHECK(count.live == 0);
}

static void random_runs(void)
{
    static uint8_t bytes[3 * MODEL_STEPS + 1];
    uint64_t random = 7;

    for (uint32_t run = 0; run < 20; run++) {
        const char *reason;

        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = (uint8_t)model_random(&random);
        bytes[0] = (uint8_t)run; /* the allocation that fails */
        reason = ledger_model_run(bytes, run == 19 ? 0 : sizeof bytes);
        if (reason != NULL)
            check_fail(__FILE__, __LINE__, reason);
    }
}

/* The n-th allocation and all after it fail, for each n: what cannot be followed leaves no trace, and nothing leaks. */
static void memory_runs_out(void)
{
    enum { RECORDS = 70, BLOCKS = 400 };
    static zbp_record record[RECORDS];
    bool is_complete = false;

    for (long n = 0; !is_complete; n++) {
        const char *reason = NULL;
        uint64_t followed = 0;
        uint32_t fed = 0;
        zbp_ledger ledger;

        zbp_ledger_init(&ledger, &alloc);
        count.fail_at = count.calls + n;
        for (uint32_t r = 0; r < RECORDS; r++) {
            int status = zbp_ledger_start(&ledger, &record[r], 1, 1, 0);

            CHECK(status == ZBP_OK || status == ZBP_ENOMEM);
            CHECK(status == ZBP_OK || (record[r].mark == NULL && ledger.record_count == fed));
            fed += status == ZBP_OK;
        }
        CHECK(ledger.record_count == fed);
        for (uint64_t b = 1; b <= BLOCKS; b++) {
            int status = zbp_ledger_alloc(&ledger, b, 1, b * 64, 1);

            CHECK(status == ZBP_OK || status == ZBP_ENOMEM);
            followed += status == ZBP_OK;
            CHECK(ledger.next_serial == followed && ledger.blocks.count == followed);
        }
        CHECK(fed == 0 || record[0].live == followed);
        CHECK_VALID(zbp_ledger_check(&ledger, &reason));
        count.fail_at = -1;
        for (uint32_t r = 0; r < RECORDS; r++) {
            zbp_ledger_stop(&ledger, &record[r]);
            zbp_record_fini(&record[r]);
        }
        zbp_ledger_fini(&ledger);
        CHECK(count.live == 0);
        is_complete = fed == RECORDS && followed == BLOCKS;
        REQUIRE(n < 1000 && (n > 0 || fed == 0));
    }
}

static void expect(const zbp_ledger *ledger, const char *wanted)
{
    const char *reason = NULL;

    CHECK(zbp_ledger_check(ledger, &reason) == ZBP_EINVAL && reason != NULL &&
          strstr(reason, wanted) != NULL);
    CHECK(zbp_ledger_check(ledger, NULL) == ZBP_EINVAL);
}

static zbp_block *slot_of(zbp_ledger *ledger, uint64_t serial)
{
    for (size_t i = 0; i < ledger->blocks.capacity; i++)
        if (ledger->blocks.slot[i].address != 0 && ledger->blocks.slot[i].serial == serial)
            return &ledger->blocks.slot[i];
    REQUIRE(!"no block has this serial");
    return NULL;
}

static void check_names_planted_faults(void)
{
    zbp_ledger ledger, broken;
    zbp_record first, second;

    zbp_ledger_init(&ledger, &alloc);
    CHECK(zbp_ledger_start(&ledger, &first, 1, 1, 0) == ZBP_OK);
    for (uint64_t b = 1; b <= 3; b++)
        CHECK(zbp_ledger_alloc(&ledger, b, 1, b * 64, 10) == ZBP_OK);
    CHECK(zbp_ledger_start(&ledger, &second, 4, 1, 0) == ZBP_OK);
    broken = ledger;
    broken.next_serial = 2;
    expect(&broken, "still to come");
    broken = ledger;
    broken.record_capacity = 1;
    expect(&broken, "room for");
    broken = ledger;
    broken.blocks.count++;
    expect(&broken, "blocks: fewer slots");
    slot_of(&ledger, 1)->serial = 2;
    expect(&ledger, "the same serial");
    for (size_t i = 0; i < ledger.blocks.capacity; i++)
        if (ledger.blocks.slot[i].address == 128)
            ledger.blocks.slot[i].serial = 1;
    slot_of(&ledger, 1)->bytes++;
    expect(&ledger, "is not what is in use");
    slot_of(&ledger, 1)->bytes--;
    first.total.frees++;
    expect(&ledger, "is not what is in use");
    first.total.frees--;
    first.total.peak++;
    expect(&ledger, "record: the spans do not add up");
    first.total.peak--;
    second.first_serial = 4;
    expect(&ledger, "begins with a serial");
    second.first_serial = 3;
    ledger.record[1] = &first;
    expect(&ledger, "fed twice");
    ledger.record[1] = &second;
    CHECK(zbp_ledger_check(&ledger, NULL) == ZBP_OK);
    zbp_ledger_fini(&ledger);
    zbp_record_fini(&first);
    zbp_record_fini(&second);
    CHECK(count.live == 0);
}

int main(void)
{
    alloc = counting_alloc(&count);
    check_sees_failure();
    RUN(empty);
    RUN(two_records_by_hand);
    RUN(random_runs);
    RUN(memory_runs_out);
    RUN(check_names_planted_faults);
    return check_end();
}
