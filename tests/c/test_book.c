/* The book, asked by hand: who is alone, states and fates, retries; threads; failing allocations. */
#include <pthread.h>

#include "check.h"
#include "core/pass/zbp_book.h"
#include "counting.h"
#include "draw.h"

static const zbp_how PLAIN = {0}, RETAIN = {.retain = true}, FUSE = {.fuse = true},
                     ANOMALY = {.is_anomaly = true};
static zbp_book book;
static zbp_layout layout;

static void open_book(uint32_t weights, uint32_t outsides, const char *tasks)
{
    draw(&layout, weights, outsides, tasks);
    REQUIRE(zbp_book_init(&book, &layout) == ZBP_OK);
}

static void close_book(void)
{
    zbp_book_close(&book);
    zbp_layout_fini(&layout);
}

static bool is_zeroed(const void *what, size_t size)
{
    const unsigned char *byte = what;

    for (size_t i = 0; i < size; i++) {
        if (byte[i] != 0)
            return false;
    }
    return true;
}

/* The faces of the weights that are alone, '-' for the others. */
static bool alone_are(zbp_how how, const char *faces)
{
    zbp_book_find_alone(&book, &layout, how);
    for (uint32_t w = 0; w < book.weight_count; w++) {
        if (book.weight[w].alone != (faces[w] == '-' ? ZBP_NO_FACE : (uint32_t)(faces[w] - '0')))
            return false;
    }
    return faces[book.weight_count] == '\0';
}

/* A W without failures that adds each weight without the engine, whether it may or not. */
static void add_all(void)
{
    for (uint32_t w = 0; w < book.weight_count; w++)
        book.weight[w].is_added = true;
}

/* ---- init, close */

static void an_empty_book_is_legal(void)
{
    book = (zbp_book){0};
    layout = (zbp_layout){0};
    zbp_book_close(&book);
    REQUIRE(zbp_book_init(&book, &layout) == ZBP_OK);
    CHECK(book.weight_count == 0 && !book.is_spent);
    CHECK(alone_are(PLAIN, "") && zbp_book_is_complete(&book));
    zbp_book_give_up_paths(&book, &layout);
    zbp_book_begin_run(&book, false);
    CHECK(book.missing == 0 && zbp_book_unpacks_up_to(&book, &layout) == 0);
    CHECK(zbp_book_settle(&book, PLAIN, false) == ZBP_FATE_CLOSE);
    zbp_book_close(&book);
    CHECK(book.is_spent && zbp_book_is_complete(&book));
}

static void every_allocation_fails_once(void)
{
    draw(&layout, 3, 1, "P01 Wa");
    for (long n = 0; n < 2; n++) {
        counting_begin(n);
        memset(&book, 0xA5, sizeof book);
        CHECK(zbp_book_init(&book, &layout) == (n < 1 ? ZBP_ENOMEM : ZBP_OK));
        count.fail_once = -1;
        CHECK(count.live == n);
        if (n == 0) {
            CHECK(is_zeroed(&book, sizeof book));
        } else {
            CHECK(book.weight_count == 3 && is_zeroed(book.weight, 3 * sizeof *book.weight));
            zbp_book_close(&book);
            CHECK(count.live == 0 && book.weight_count == 0 && book.is_spent);
        }
        zbp_book_close(&book); /* a zeroed one is legal, and a closed one */
    }
    zbp_layout_fini(&layout);
}

/* ---- who is alone */

static void what_is_at_hand_and_by_itself_is_alone(void)
{
    static const struct {
        const char *tasks, *alone;
    } cases[] = {
        {"P0 P1 W2", "012"}, {"W012", "012"},      {"P0 D1 W2", "0-2"}, {"R0 P1 P2", "-12"},
        {"P0 P0 W1", "-2-"}, {"P0 W1 W0", "-1-"},  {"D0 P0 P0", "---"}, {"Wa:0 Pb:1", "01-"},
        {"P0 P0 P0", "---"}, {"Wa:0 Pb:0", "---"}, {"P0 D0", "---"},    {"D0 P0", "---"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        open_book(3, 2, cases[i].tasks);
        CHECK(alone_are(PLAIN, cases[i].alone) && alone_are(RETAIN, cases[i].alone) &&
              alone_are(FUSE, cases[i].alone));
        CHECK(alone_are(ANOMALY, "---"));
        close_book();
    }
}

static void what_anybody_could_tell_runs_in_the_engine(void)
{
    open_book(3, 0, "P0 W1 P2");
    book.weight[1].seen = ZBP_WEIGHT_HOOKED;
    CHECK(alone_are(PLAIN, "0-2"));
    book.weight[1].seen = ZBP_WEIGHT_FROZEN; /* nothing is added there, by either way */
    CHECK(alone_are(PLAIN, "012"));
    book.weight[1].has_arrived = true; /* its sink has the sum */
    CHECK(alone_are(PLAIN, "0-2"));
    book.weight[0].is_added = true;
    CHECK(alone_are(PLAIN, "--2"));
    layout.task[2].leaves_packed = true; /* a region is computed again once in a run */
    CHECK(alone_are(PLAIN, "---"));
    close_book();
    open_book(2, 0, "W0 W1");
    layout.task[1].has_work = true; /* of a Function */
    CHECK(alone_are(PLAIN, "0-"));
    close_book();
}

static void paths_to_what_the_engine_adds_are_given_up(void)
{
    open_book(4, 4, "Pa:0 Pb:1 Pc:2 P3 Pd");
    book.weight[0].is_added = true;
    book.weight[1].has_arrived = true;
    zbp_book_give_up_paths(&book, &layout);
    CHECK(layout.face[0].weight == 0 && layout.face[1].weight == 1); /* nothing runs for them */
    CHECK(layout.face[2].weight == -1 && layout.face[2].outside == 2);
    CHECK(layout.face[3].weight == 3 && layout.face[4].outside == 3);
    close_book();
}

/* ---- the states */

static void a_retained_group_runs_again_as_if_it_never_had(void)
{
    open_book(2, 0, "P0 W1");
    for (int round = 0; round < 3; round++) {
        CHECK(alone_are(RETAIN, "01") && !zbp_book_is_complete(&book));
        add_all();
        CHECK(!zbp_book_wants(&book, 0) && zbp_book_is_complete(&book));
        CHECK(zbp_book_settle(&book, RETAIN, false) == ZBP_FATE_AGAIN);
        CHECK(!book.is_spent);
    }
    /* Failed, and complete all the same: what is to be retained is kept, and the retry makes it ready. */
    add_all();
    CHECK(zbp_book_settle(&book, RETAIN, true) == ZBP_FATE_KEEP && !book.has_failed);
    CHECK(alone_are(RETAIN, "--"));
    CHECK(zbp_book_settle(&book, RETAIN, false) == ZBP_FATE_AGAIN && alone_are(RETAIN, "01"));
    close_book();
}

/* ---- a run of the engine */

static void the_last_weight_tells_that_the_tasks_can_go(void)
{
    for (int retain = 0; retain < 2; retain++) {
        open_book(4, 1, "P0 W1 Ra P3");
        book.weight[3].is_added = true;
        zbp_book_begin_run(&book, retain != 0);
        for (uint32_t i = 0; i < 3; i++) {
            const uint32_t w = (i + 1) % 3; /* in any order */

            CHECK(zbp_book_wants(&book, w));
            book.weight[w].has_arrived = true;
            CHECK(!zbp_book_wants(&book, w) && !book.weight[w].is_hooked);
            book.weight[w].is_hooked = true;
            CHECK(book.weight[w].is_hooked);
            CHECK(zbp_book_added(&book, w) == (i == 2 && retain == 0));
            CHECK(!zbp_book_wants(&book, w) && !book.weight[w].has_arrived);
        }
        CHECK(zbp_book_settle(&book, retain != 0 ? RETAIN : PLAIN, false) ==
              (retain != 0 ? ZBP_FATE_AGAIN : ZBP_FATE_CLOSE));
        CHECK(retain == 0 || (zbp_book_wants(&book, 0) && !book.weight[0].is_hooked));
        close_book();
    }
}

static void it_unpacks_up_to_the_last_task_that_is_wanted(void)
{
    open_book(3, 0, "P0 P1 P2 W0"); /* sequence numbers 100, 99, 98, 97 */
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 0);
    for (uint32_t t = 0; t < 3; t++)
        layout.task[t].leaves_packed = true;
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 100);
    book.weight[0].is_added = true;
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 99);
    layout.task[1].sequence_nr = 90;
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 98);
    book.weight[2].has_arrived = true;
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 90);
    book.weight[1].is_added = true;
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 0);
    close_book();
}

/* ---- claims */

enum { THREADS = 4, CLAIMS = 20000 };

static long inside, got;
static int is_over; /* read and written atomically */

static void *claim_often(void *unused)
{
    (void)unused;
    for (int i = 0; i < CLAIMS; i++) {
        if (!zbp_book_claim(&book))
            continue;
        inside++; /* no atomic: the claim orders them */
        got += inside == 1;
        inside--;
        zbp_book_give_back(&book);
    }
    return NULL;
}

static void one_call_at_a_time_has_a_book(void)
{
    pthread_t thread[THREADS];

    book = (zbp_book){0};
    CHECK(!zbp_book_is_claimed(&book));
    CHECK(zbp_book_claim(&book) && zbp_book_is_claimed(&book));
    CHECK(!zbp_book_claim(&book) && zbp_book_is_claimed(&book));
    zbp_book_give_back(&book);
    CHECK(!zbp_book_is_claimed(&book));
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_create(&thread[i], NULL, claim_often, NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_join(thread[i], NULL) == 0);
    CHECK(inside == 0 && got > 0 && got <= THREADS * CLAIMS && !zbp_book_is_claimed(&book));
}

/* Others ask until the call is through. */
static void *claim_in_vain(void *claims)
{
    while (__atomic_load_n(&is_over, __ATOMIC_ACQUIRE) == 0)
        *(long *)claims += zbp_book_claim(&book);
    return NULL;
}

static void what_is_closed_stays_in_the_hands_of_its_call(void)
{
    pthread_t thread;
    long claims = 0;

    open_book(1, 0, "P0");
    REQUIRE(zbp_book_claim(&book));
    REQUIRE(pthread_create(&thread, NULL, claim_in_vain, &claims) == 0);
    for (int i = 0; i < CLAIMS; i++)
        zbp_book_close(&book);
    __atomic_store_n(&is_over, 1, __ATOMIC_RELEASE);
    REQUIRE(pthread_join(thread, NULL) == 0);
    CHECK(claims == 0 && zbp_book_is_claimed(&book));
    close_book();
}

/* The sinks of different weights report from different threads: one of them alone is the last. */
enum { SINKS = 1000 };

static long lasts;

static void *report_a_share(void *first)
{
    for (uint32_t w = *(uint32_t *)first; w < SINKS; w += THREADS) {
        book.weight[w].has_arrived = true;
        book.weight[w].is_hooked = true;
        if (zbp_book_added(&book, w))
            __atomic_add_fetch(&lasts, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void sinks_report_from_their_threads(void)
{
    pthread_t thread[THREADS];
    uint32_t first[THREADS];

    open_book(SINKS, 0, "");
    for (int round = 0; round < 10; round++) {
        lasts = 0;
        zbp_book_begin_run(&book, false);
        for (uint32_t i = 0; i < THREADS; i++) {
            first[i] = i;
            REQUIRE(pthread_create(&thread[i], NULL, report_a_share, &first[i]) == 0);
        }
        for (int i = 0; i < THREADS; i++)
            REQUIRE(pthread_join(thread[i], NULL) == 0);
        CHECK(lasts == 1 && book.missing == 0);
        CHECK(zbp_book_settle(&book, RETAIN, false) == ZBP_FATE_AGAIN);
    }
    close_book();
}

int main(void)
{
    check_sees_failure();
    RUN(an_empty_book_is_legal);
    RUN(every_allocation_fails_once);
    RUN(what_is_at_hand_and_by_itself_is_alone);
    RUN(what_anybody_could_tell_runs_in_the_engine);
    RUN(paths_to_what_the_engine_adds_are_given_up);
    RUN(a_retained_group_runs_again_as_if_it_never_had);
    RUN(the_last_weight_tells_that_the_tasks_can_go);
    RUN(it_unpacks_up_to_the_last_task_that_is_wanted);
    RUN(one_call_at_a_time_has_a_book);
    RUN(what_is_closed_stays_in_the_hands_of_its_call);
    RUN(sinks_report_from_their_threads);
    return check_end();
}
