#include "check.h"
#include "books_model.h"
#include "model.h"

static zbp_alloc alloc;
static counting count;

static void empty(void)
{
    zbp_books books = {0};
    zbp_record record = {0};
    const char *reason = "unset";

    CHECK(!zbp_books_free(&books, 1, 1, 64, NULL));
    CHECK(zbp_books_since(&books, 0, NULL) == 0);
    zbp_books_untracked(&books);
    zbp_books_stop(&books, &record);
    CHECK_VALID(zbp_books_check(&books, &reason));
    zbp_books_fini(&books);
    zbp_books_fini(&books);
    CHECK(zbp_books_alloc(&books, 1, 1, 64, 8) == ZBP_OK && books.next_serial == 1); /* libc's */
    zbp_books_fini(&books);
}

static void two_records_by_hand(void)
{
    zbp_books books;
    zbp_record first, second;
    zbp_block got[3];
    uint32_t mark = 0;
    const char *reason = NULL;

    zbp_books_init(&books, &alloc);
    CHECK(zbp_books_alloc(&books, 1, 1, 64, 1000) == ZBP_OK); /* nobody looks */
    CHECK(zbp_books_start(&books, &first, 2, 1, 100) == ZBP_OK && first.first_serial == 1);
    CHECK(zbp_books_alloc(&books, 3, 7, 128, 10) == ZBP_OK);
    CHECK(zbp_books_start(&books, &second, 4, 1, 100) == ZBP_OK && second.first_serial == 2);
    CHECK(zbp_books_alloc(&books, 5, 1, 192, 200) == ZBP_OK);
    CHECK(zbp_books_free(&books, 6, 1, 128, NULL) && !zbp_books_free(&books, 6, 1, 128, NULL));
    CHECK(zbp_books_free(&books, 7, 1, 64, NULL));
    CHECK_VALID(zbp_books_check(&books, &reason));
    CHECK(first.live == 200 && first.total.peak == 210 && first.older_freed == 1000);
    CHECK(second.live == 200 && second.total.frees == 0 && second.older_freed == 1010);
    CHECK(zbp_record_event(&first, 0)->thread == 7 && zbp_record_event(&first, 0)->time_ns == 3);
    CHECK(zbp_books_mark(&books, &second, 8, 1, &mark) == ZBP_OK && mark == 1);
    CHECK(second.mark[1].serial == 3 && second.mark[1].live == 200);

    zbp_books_stop(&books, &first);
    zbp_books_untracked(&books);
    CHECK(first.untracked == 0 && second.untracked == 1);
    CHECK(zbp_books_alloc(&books, 9, 1, 192, 5) == ZBP_OK); /* the 200 went unseen */
    CHECK(first.live == 200 && second.live == 5 && second.total.freed == 200);
    CHECK(zbp_books_alloc(&books, 10, 1, 64, 6) == ZBP_OK);
    CHECK(zbp_books_alloc(&books, 11, 1, 0, 6) == ZBP_EINVAL && books.next_serial == 5);
    CHECK(zbp_books_since(&books, 0, got) == 2 && got[0].bytes == 5 && got[1].address == 64);
    CHECK(zbp_books_since(&books, 4, got) == 1 && got[0].serial == 4);
    CHECK(zbp_books_since(&books, 5, got) == 0);
    CHECK_VALID(zbp_books_check(&books, &reason));
    zbp_books_fini(&books);
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
        reason = books_model_run(bytes, run == 19 ? 0 : sizeof bytes);
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
        zbp_books books;

        zbp_books_init(&books, &alloc);
        count.fail_at = count.calls + n;
        for (uint32_t r = 0; r < RECORDS; r++) {
            int status = zbp_books_start(&books, &record[r], 1, 1, 0);

            CHECK(status == ZBP_OK || status == ZBP_ENOMEM);
            CHECK(status == ZBP_OK || (record[r].mark == NULL && books.record_count == fed));
            fed += status == ZBP_OK;
        }
        CHECK(books.record_count == fed);
        for (uint64_t b = 1; b <= BLOCKS; b++) {
            int status = zbp_books_alloc(&books, b, 1, b * 64, 1);

            CHECK(status == ZBP_OK || status == ZBP_ENOMEM);
            followed += status == ZBP_OK;
            CHECK(books.next_serial == followed && books.blocks.count == followed);
        }
        CHECK(fed == 0 || record[0].live == followed);
        CHECK_VALID(zbp_books_check(&books, &reason));
        count.fail_at = -1;
        for (uint32_t r = 0; r < RECORDS; r++) {
            zbp_books_stop(&books, &record[r]);
            zbp_record_fini(&record[r]);
        }
        zbp_books_fini(&books);
        CHECK(count.live == 0);
        is_complete = fed == RECORDS && followed == BLOCKS;
        REQUIRE(n < 1000 && (n > 0 || fed == 0));
    }
}

static void expect(const zbp_books *books, const char *wanted)
{
    const char *reason = NULL;

    CHECK(zbp_books_check(books, &reason) == ZBP_EINVAL && reason != NULL &&
          strstr(reason, wanted) != NULL);
    CHECK(zbp_books_check(books, NULL) == ZBP_EINVAL);
}

static zbp_block *slot_of(zbp_books *books, uint64_t serial)
{
    for (size_t i = 0; i < books->blocks.capacity; i++)
        if (books->blocks.slot[i].address != 0 && books->blocks.slot[i].serial == serial)
            return &books->blocks.slot[i];
    REQUIRE(!"no block has this serial");
    return NULL;
}

static void check_names_planted_faults(void)
{
    zbp_books books, broken;
    zbp_record first, second;

    zbp_books_init(&books, &alloc);
    CHECK(zbp_books_start(&books, &first, 1, 1, 0) == ZBP_OK);
    for (uint64_t b = 1; b <= 3; b++)
        CHECK(zbp_books_alloc(&books, b, 1, b * 64, 10) == ZBP_OK);
    CHECK(zbp_books_start(&books, &second, 4, 1, 0) == ZBP_OK);
    broken = books;
    broken.next_serial = 2;
    expect(&broken, "still to come");
    broken = books;
    broken.record_capacity = 1;
    expect(&broken, "room for");
    broken = books;
    broken.blocks.count++;
    expect(&broken, "blocks: fewer slots");
    slot_of(&books, 1)->serial = 2;
    expect(&books, "the same serial");
    for (size_t i = 0; i < books.blocks.capacity; i++)
        if (books.blocks.slot[i].address == 128)
            books.blocks.slot[i].serial = 1;
    slot_of(&books, 1)->bytes++;
    expect(&books, "is not what is in use");
    slot_of(&books, 1)->bytes--;
    first.total.frees++;
    expect(&books, "is not what is in use");
    first.total.frees--;
    first.total.peak++;
    expect(&books, "record: the spans do not add up");
    first.total.peak--;
    second.first_serial = 4;
    expect(&books, "begins with a serial");
    second.first_serial = 3;
    books.record[1] = &first;
    expect(&books, "fed twice");
    books.record[1] = &second;
    CHECK(zbp_books_check(&books, NULL) == ZBP_OK);
    zbp_books_fini(&books);
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
