/* The book, asked by hand: its states, ways and fates; sums in their order; retries; threads; failing allocations; the
 * validator. */
#include <pthread.h>

#include "check.h"
#include "core/pass/zbp_book.h"
#include "counting.h"
#include "draw.h"

static const zbp_how PLAIN = {0}, RETAIN = {.retain = true}, FUSE = {.fuse = true},
                     ANOMALY = {.is_anomaly = true};

static void open_book(zbp_book *book, zbp_layout *layout, uint32_t weights, uint32_t outsides,
                      const char *tasks)
{
    draw(layout, weights, outsides, tasks);
    REQUIRE(zbp_book_init(book, layout, NULL) == ZBP_OK);
}

static void close_book(zbp_book *book, zbp_layout *layout)
{
    const char *reason = NULL;

    CHECK_VALID(zbp_book_check(book, layout, &reason));
    zbp_book_fini(book);
    zbp_layout_fini(layout);
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

static zbp_way way_of(zbp_book *book, zbp_layout *layout, zbp_how how)
{
    uint32_t face = ZBP_NO_FACE;

    return zbp_book_way(book, layout, how, &face);
}

/* What a direct W without failures reports: every face by itself or with those that it meets. */
static void deliver_directly(zbp_book *book, const zbp_layout *layout, zbp_how how)
{
    zbp_book_begin_direct(book, layout);
    for (uint32_t f = 0; f < layout->face_count; f++) {
        if (!zbp_book_owes(book, layout, f))
            continue;
        if (!zbp_book_meets(book, layout, how, f))
            zbp_book_delivered(book, f);
        else if (zbp_book_came(book, layout, f))
            zbp_book_met(book, (uint32_t)layout->face[f].weight);
    }
    zbp_book_added_all(book);
}

/* ---- init, fini, close */

static void an_empty_book_is_legal(void)
{
    zbp_book book = {0};
    zbp_layout layout = {0};
    const char *reason = "?";

    CHECK_VALID(zbp_book_check(&book, &layout, &reason));
    zbp_book_fini(&book);
    REQUIRE(zbp_book_init(&book, &layout, NULL) == ZBP_OK);
    CHECK(book.weight == NULL && book.face == NULL && book.state == ZBP_BOOK_OPEN);
    CHECK(!zbp_book_has_half(&book));
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_DIRECT); /* nobody could tell */
    deliver_directly(&book, &layout, PLAIN);
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 0);
    CHECK(zbp_book_settle(&book, PLAIN, false) == ZBP_FATE_CLOSE);
    zbp_book_close(&book);
    CHECK(book.state == ZBP_BOOK_SPENT);
    zbp_book_fini(&book);
    CHECK(is_zeroed(&book, sizeof book));
    zbp_book_fini(&book);
}

static void every_allocation_fails_once(void)
{
    counting c;
    const zbp_alloc alloc = counting_alloc(&c);
    zbp_layout layout;
    int status = ZBP_ENOMEM;
    long n = 0;

    draw(&layout, 3, 1, "P01 Wa");
    for (; status != ZBP_OK; n++) {
        zbp_book book;

        c = (counting){.fail_at = -1, .fail_once = n};
        memset(&book, 0xA5, sizeof book);
        status = zbp_book_init(&book, &layout, &alloc);
        CHECK(status == (n < 2 ? ZBP_ENOMEM : ZBP_OK));
        if (status != ZBP_OK) {
            CHECK(is_zeroed(&book, sizeof book) && c.live == 0);
            zbp_book_fini(&book); /* a zeroed one is legal */
        } else {
            CHECK(c.live == 2 && book.weight_count == 3 && book.face_count == 3);
            CHECK(is_zeroed(book.weight, 3 * sizeof *book.weight));
            CHECK(is_zeroed(book.face, 3 * sizeof *book.face));
            zbp_book_fini(&book);
        }
        CHECK(c.live == 0);
        REQUIRE(n < 10);
    }
    CHECK(n == 3);
    zbp_layout_fini(&layout);
}

static void it_forgets_and_closes_what_it_allocated(void)
{
    counting c;
    const zbp_alloc alloc = counting_alloc(&c);
    zbp_layout layout;
    zbp_book book;
    const char *reason = NULL;

    draw(&layout, 2, 0, "P0 P1");
    REQUIRE(zbp_book_init(&book, &layout, &alloc) == ZBP_OK);
    zbp_layout_clear(&layout);
    CHECK(zbp_book_check(&book, &layout, NULL) == ZBP_EINVAL); /* it has faces yet */
    zbp_book_forget_faces(&book);
    CHECK(c.live == 1 && book.face_count == 0 && book.weight_count == 2);
    CHECK_VALID(zbp_book_check(&book, &layout, &reason));
    zbp_book_forget_faces(&book);
    REQUIRE(zbp_book_claim(&book));
    zbp_book_close(&book);
    CHECK(c.live == 0 && book.weight_count == 0 && book.state == ZBP_BOOK_SPENT);
    CHECK(zbp_book_is_claimed(&book)); /* the call that closed it has it still */
    CHECK_VALID(zbp_book_check(&book, &layout, &reason));
    zbp_book_close(&book);
    CHECK(book.state == ZBP_BOOK_SPENT);
    zbp_book_fini(&book);
    zbp_layout_fini(&layout);
}

/* ---- the states */

static void a_complete_group_is_done_until_it_is_reported(void)
{
    zbp_book book;
    zbp_layout layout;

    open_book(&book, &layout, 1, 0, "P0");
    deliver_directly(&book, &layout, PLAIN);
    CHECK(zbp_book_settle(&book, PLAIN, true) == ZBP_FATE_CLOSE); /* another group failed */
    zbp_book_close(&book);
    zbp_layout_fini(&layout);
    CHECK(book.state == ZBP_BOOK_UNREPORTED && way_of(&book, &layout, PLAIN) == ZBP_WAY_DONE);
    CHECK(zbp_book_settle(&book, PLAIN, true) == ZBP_FATE_KEEP); /* and once more */
    CHECK(book.state == ZBP_BOOK_UNREPORTED);
    CHECK(zbp_book_settle(&book, RETAIN, false) == ZBP_FATE_CLOSE);
    zbp_book_close(&book);
    CHECK(book.state == ZBP_BOOK_SPENT && way_of(&book, &layout, PLAIN) == ZBP_WAY_DONE);
    zbp_book_report_again(&book);
    CHECK(book.state == ZBP_BOOK_UNREPORTED);
    zbp_book_report_again(&book);
    CHECK(book.state == ZBP_BOOK_UNREPORTED);
    close_book(&book, &layout);
}

static void a_retained_group_runs_again_as_if_it_never_had(void)
{
    const char *reason = NULL;
    zbp_book book;
    zbp_layout layout;

    open_book(&book, &layout, 2, 0, "P0 W1");
    for (int round = 0; round < 3; round++) {
        CHECK(way_of(&book, &layout, RETAIN) == ZBP_WAY_DIRECT);
        for (uint32_t f = 0; f < 2; f++)
            CHECK(zbp_book_owes(&book, &layout, f));
        deliver_directly(&book, &layout, RETAIN);
        CHECK(!zbp_book_owes(&book, &layout, 0) && !zbp_book_wants(&book, 0));
        CHECK(zbp_book_settle(&book, RETAIN, false) == ZBP_FATE_AGAIN);
        CHECK(book.state == ZBP_BOOK_OPEN);
    }
    /* Failed, and complete all the same: what is to be retained is kept, and the retry makes it ready. */
    deliver_directly(&book, &layout, RETAIN);
    CHECK(zbp_book_settle(&book, RETAIN, true) == ZBP_FATE_KEEP && !book.has_failed);
    CHECK(!zbp_book_owes(&book, &layout, 0));
    CHECK(zbp_book_settle(&book, RETAIN, false) == ZBP_FATE_AGAIN);
    CHECK(zbp_book_owes(&book, &layout, 0));
    /* Complete, and the call raises only then: the retry adds nothing, the call after it all. */
    deliver_directly(&book, &layout, RETAIN);
    CHECK(zbp_book_settle(&book, RETAIN, false) == ZBP_FATE_AGAIN);
    zbp_book_report_again(&book);
    CHECK(book.state == ZBP_BOOK_OPEN && way_of(&book, &layout, RETAIN) == ZBP_WAY_DIRECT);
    for (uint32_t f = 0; f < 2; f++)
        CHECK(!zbp_book_owes(&book, &layout, f) && !zbp_book_wants(&book, f));
    CHECK_VALID(zbp_book_check(&book, &layout, &reason));
    CHECK(zbp_book_settle(&book, RETAIN, false) == ZBP_FATE_AGAIN);
    CHECK(way_of(&book, &layout, RETAIN) == ZBP_WAY_DIRECT && zbp_book_owes(&book, &layout, 0));
    close_book(&book, &layout);
}

static void a_retry_cannot_retain_what_a_plain_call_began(void)
{
    zbp_book book;
    zbp_layout layout;

    open_book(&book, &layout, 2, 0, "P0 P1");
    zbp_book_begin_direct(&book, &layout);
    zbp_book_delivered(&book, 0);
    CHECK(zbp_book_settle(&book, PLAIN, true) == ZBP_FATE_KEEP && book.has_failed);
    CHECK(!zbp_book_owes(&book, &layout, 0) && zbp_book_owes(&book, &layout, 1));
    deliver_directly(&book, &layout, RETAIN);
    CHECK(zbp_book_settle(&book, RETAIN, false) == ZBP_FATE_CLOSE && book.state == ZBP_BOOK_SPENT);
    close_book(&book, &layout);
}

/* The gradients' sums wait at the weights: what the tasks hold is not needed any more. */
static void what_waits_is_all_that_is_left(void)
{
    zbp_book book;
    zbp_layout layout;
    const char *reason = NULL;

    open_book(&book, &layout, 3, 0, "P0 P1 P2");
    zbp_book_begin_run(&book, false);
    zbp_book_arrived(&book, 0);
    zbp_book_hooked(&book, 0);
    zbp_book_delivered(&book, 0);
    CHECK(!zbp_book_added(&book, 0));
    zbp_book_arrived(&book, 1);
    CHECK(zbp_book_settle(&book, PLAIN, true) == ZBP_FATE_KEEP); /* nothing has come to weight 2 */
    zbp_book_begin_run(&book, false);
    zbp_book_arrived(&book, 2);
    zbp_book_hooked(&book, 2);
    CHECK(zbp_book_settle(&book, PLAIN, true) == ZBP_FATE_RELEASE);
    zbp_layout_clear(&layout);
    zbp_book_forget_faces(&book);
    CHECK_VALID(zbp_book_check(&book, &layout, &reason));
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_ENGINE); /* its sinks have the sums */
    zbp_book_begin_run(&book, false);
    CHECK(book.missing == 2);
    CHECK(!zbp_book_added(&book, 1));
    CHECK(!zbp_book_added(&book, 2)); /* the last one, but of a retry: the tasks went before */
    CHECK(zbp_book_settle(&book, PLAIN, false) == ZBP_FATE_CLOSE);
    close_book(&book, &layout);
}

/* ---- a run of the engine */

static void the_last_weight_tells_that_the_tasks_can_go(void)
{
    for (int retain = 0; retain < 2; retain++) {
        zbp_book book;
        zbp_layout layout;

        open_book(&book, &layout, 3, 1, "P0 W1 Ra");
        zbp_book_begin_run(&book, retain != 0);
        for (uint32_t i = 0; i < 3; i++) {
            const uint32_t w = (i + 1) % 3; /* in any order */

            CHECK(zbp_book_wants(&book, w));
            zbp_book_arrived(&book, w);
            CHECK(!zbp_book_wants(&book, w));
            zbp_book_hooked(&book, w);
            CHECK(book.weight[w].is_hooked);
            if (w < 2)
                zbp_book_delivered(&book, w);
            CHECK(zbp_book_added(&book, w) == (i == 2 && retain == 0));
            CHECK(!zbp_book_wants(&book, w) && !book.weight[w].has_arrived);
        }
        CHECK(zbp_book_settle(&book, retain != 0 ? RETAIN : PLAIN, false) ==
              (retain != 0 ? ZBP_FATE_AGAIN : ZBP_FATE_CLOSE));
        CHECK(retain == 0 || (zbp_book_wants(&book, 0) && !book.weight[0].is_hooked));
        close_book(&book, &layout);
    }
}

static void faces_are_wanted_for_their_weight_or_what_lies_behind(void)
{
    zbp_book book;
    zbp_layout layout;

    open_book(&book, &layout, 2, 2, "P0 P0 Wa Db:1");
    for (uint32_t f = 0; f < 4; f++)
        CHECK(zbp_book_wants_face(&book, &layout, f));
    zbp_book_delivered(&book, 0); /* without the engine, before it failed */
    CHECK(!zbp_book_wants_face(&book, &layout, 0) && zbp_book_wants_face(&book, &layout, 1));
    zbp_book_arrived(&book, 0);
    CHECK(!zbp_book_wants_face(&book, &layout, 1)); /* it is in the sum that waits */
    zbp_book_begin_run(&book, false);
    CHECK(!zbp_book_added(&book, 0) && zbp_book_added(&book, 1));
    CHECK(!zbp_book_wants_face(&book, &layout, 1) && !zbp_book_wants_face(&book, &layout, 3));
    CHECK(zbp_book_wants_face(&book, &layout, 2)); /* whatever lies behind */
    zbp_book_delivered(&book, 2);
    CHECK(!zbp_book_wants_face(&book, &layout, 2));
    close_book(&book, &layout);
}

static void it_unpacks_up_to_the_last_task_that_is_owed(void)
{
    zbp_book book;
    zbp_layout layout;

    open_book(&book, &layout, 3, 0, "P0 P1 P2 W0"); /* sequence numbers 100, 99, 98, 97 */
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 0);
    for (uint32_t t = 0; t < 3; t++)
        layout.task[t].leaves_packed = true;
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 100);
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_ENGINE);
    zbp_book_delivered(&book, 0);
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 99);
    layout.task[1].sequence_nr = 90;
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 98);
    zbp_book_arrived(&book, 2);
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 90);
    zbp_book_delivered(&book, 1);
    CHECK(zbp_book_unpacks_up_to(&book, &layout) == 0);
    close_book(&book, &layout);
}

/* ---- the way */

static void what_anybody_could_tell_runs_in_the_engine(void)
{
    zbp_book book;
    zbp_layout layout;

    open_book(&book, &layout, 2, 0, "P0 W1");
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_DIRECT);
    CHECK(way_of(&book, &layout, RETAIN) == ZBP_WAY_DIRECT);
    CHECK(way_of(&book, &layout, FUSE) == ZBP_WAY_DIRECT);
    CHECK(way_of(&book, &layout, ANOMALY) == ZBP_WAY_ENGINE);
    zbp_book_see_weight(&book, 1, ZBP_WEIGHT_HOOKED);
    CHECK(way_of(&book, &layout, FUSE) == ZBP_WAY_ENGINE);
    zbp_book_see_weight(&book, 1, ZBP_WEIGHT_SPECIAL | ZBP_WEIGHT_FROZEN);
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_DIRECT); /* nothing meets there */
    zbp_book_see_weight(&book, 1, 0);
    zbp_book_arrived(&book, 1);
    CHECK(way_of(&book, &layout, FUSE) == ZBP_WAY_ENGINE); /* the sum waits at its sink */
    close_book(&book, &layout);

    open_book(&book, &layout, 2, 1, "P0 Wa");
    CHECK(way_of(&book, &layout, FUSE) == ZBP_WAY_ENGINE); /* a node lies between */
    close_book(&book, &layout);
    open_book(&book, &layout, 2, 1, "P0 Wa:1");
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_DIRECT); /* only plain steps do */
    close_book(&book, &layout);
}

static void sums_are_formed_directly_where_that_is_as_an_ordinary_backward_does(void)
{
    static const struct {
        const char *tasks;
        zbp_way way;
    } cases[] = {{"P0 P0 P0", ZBP_WAY_DIRECT}, {"P0 W0", ZBP_WAY_ENGINE},
                 {"W0 P0", ZBP_WAY_ENGINE},    {"W00", ZBP_WAY_ENGINE},
                 {"P0 W1 P0", ZBP_WAY_DIRECT}, {"P0 P1 W1", ZBP_WAY_ENGINE},
                 {"D0 W1 R2", ZBP_WAY_DIRECT}, {"P0 P0 P0 D0", ZBP_WAY_ENGINE}};
    zbp_book book;
    zbp_layout layout;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        open_book(&book, &layout, 3, 0, cases[i].tasks);
        CHECK(way_of(&book, &layout, PLAIN) == cases[i].way);
        CHECK(way_of(&book, &layout, FUSE) == ZBP_WAY_DIRECT);
        close_book(&book, &layout);
    }
    open_book(&book, &layout, 1, 0, "P0 P0 W0");
    zbp_book_delivered(&book, 2); /* what is delivered meets nothing any more */
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_DIRECT);
    layout.task[1].stream = 1;
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_ENGINE);
    CHECK(way_of(&book, &layout, FUSE) == ZBP_WAY_ENGINE); /* nothing orders two streams */
    zbp_book_delivered(&book, 1);
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_DIRECT);
    close_book(&book, &layout);
    open_book(&book, &layout, 1, 0, "P0 P0");
    zbp_book_see_weight(&book, 0, ZBP_WEIGHT_SPECIAL);
    CHECK(way_of(&book, &layout, PLAIN) == ZBP_WAY_ENGINE);
    CHECK(way_of(&book, &layout, FUSE) == ZBP_WAY_DIRECT);
    close_book(&book, &layout);
}

static void a_hooked_path_is_given_up(void)
{
    zbp_book book;
    zbp_layout layout;
    uint32_t face = 7;

    open_book(&book, &layout, 2, 2, "Pa:0 Pb:1");
    zbp_book_see_path(&book, 1, true);
    CHECK(zbp_book_way(&book, &layout, PLAIN, &face) == ZBP_WAY_ENGINE);
    CHECK(layout.face[0].weight == 0 && layout.face[1].weight == -1 && layout.face[1].outside == 1);
    zbp_book_see_path(&book, 1, false); /* for good: the hook has been owed */
    CHECK(zbp_book_way(&book, &layout, PLAIN, &face) == ZBP_WAY_ENGINE);
    CHECK(layout.face[1].weight == -1);
    close_book(&book, &layout);
}

/* A W that raised has added 2 panels of face 1 to sum 5. */
static void half_add(zbp_book *book, uint32_t face)
{
    book->face[face].half = (zbp_half){.panels = 2, .sum = 5};
    CHECK(zbp_book_settle(book, PLAIN, true) == ZBP_FATE_KEEP);
}

static void a_half_added_product_goes_on_in_its_sum_or_is_refused(void)
{
    zbp_book book;
    zbp_layout layout;
    uint32_t face = 7;

    open_book(&book, &layout, 2, 2, "Pa:0 Pb:1");
    CHECK(!zbp_book_has_half(&book));
    half_add(&book, 1);
    CHECK(zbp_book_has_half(&book));
    zbp_book_see_sum(&book, 0, 9);
    zbp_book_see_sum(&book, 1, 5);
    CHECK(zbp_book_way(&book, &layout, PLAIN, &face) == ZBP_WAY_DIRECT);
    zbp_book_see_sum(&book, 1, 6); /* another gradient */
    face = 7;
    CHECK(zbp_book_way(&book, &layout, PLAIN, &face) == ZBP_WAY_REFUSED && face == 1);
    zbp_book_see_sum(&book, 1, 0); /* none */
    CHECK(zbp_book_way(&book, &layout, PLAIN, &face) == ZBP_WAY_REFUSED);
    zbp_book_see_sum(&book, 1, 5);
    face = 7;
    CHECK(zbp_book_way(&book, &layout, ANOMALY, &face) == ZBP_WAY_REFUSED && face == 1);
    zbp_book_see_weight(&book, 0, ZBP_WEIGHT_HOOKED); /* on the group's other weight: the engine */
    face = 7;
    CHECK(zbp_book_way(&book, &layout, PLAIN, &face) == ZBP_WAY_REFUSED && face == 1);
    zbp_book_see_weight(&book, 0, 0);
    zbp_book_see_path(&book, 1, true);
    face = 7;
    CHECK(zbp_book_way(&book, &layout, PLAIN, &face) == ZBP_WAY_REFUSED && face == 1);
    CHECK(layout.face[1].weight == 1); /* its path is not given up: it leads to the sum */
    zbp_book_see_path(&book, 1, false);
    CHECK(zbp_book_way(&book, &layout, PLAIN, &face) == ZBP_WAY_DIRECT); /* all is as it was */
    close_book(&book, &layout);
}

/* ---- adding without the engine */

static void faces_that_meet_are_delivered_with_their_sum(void)
{
    zbp_book book;
    zbp_layout layout;

    open_book(&book, &layout, 3, 0, "P0 P1 P0 P0 P2");
    zbp_book_begin_direct(&book, &layout);
    for (uint32_t f = 0; f < 5; f++) {
        CHECK(zbp_book_owes(&book, &layout, f));
        CHECK(zbp_book_meets(&book, &layout, PLAIN, f) == (layout.face[f].weight == 0));
        CHECK(!zbp_book_meets(&book, &layout, FUSE, f)); /* each is added as it comes */
    }
    CHECK(!zbp_book_came(&book, &layout, 0) && !zbp_book_came(&book, &layout, 2));
    CHECK(zbp_book_owes(&book, &layout, 0)); /* in a sum that goes, if it fails now */
    CHECK(zbp_book_came(&book, &layout, 3));
    zbp_book_met(&book, 0);
    CHECK(!zbp_book_owes(&book, &layout, 0) && !zbp_book_owes(&book, &layout, 3));
    CHECK(zbp_book_owes(&book, &layout, 1) && zbp_book_owes(&book, &layout, 4));
    zbp_book_see_weight(&book, 2, ZBP_WEIGHT_FROZEN);
    CHECK(!zbp_book_owes(&book, &layout, 4));
    zbp_book_see_weight(&book, 2, 0);
    CHECK(zbp_book_owes(&book, &layout, 4));
    close_book(&book, &layout);
}

static void a_retry_sums_anew_what_was_not_added(void)
{
    zbp_book book;
    zbp_layout layout;

    open_book(&book, &layout, 2, 0, "P0 P0 P1 P0");
    zbp_book_begin_direct(&book, &layout);
    CHECK(!zbp_book_came(&book, &layout, 0));
    CHECK(zbp_book_settle(&book, PLAIN, true) == ZBP_FATE_KEEP);
    zbp_book_delivered(&book, 3); /* fused, say */
    zbp_book_begin_direct(&book, &layout);
    CHECK(!zbp_book_came(&book, &layout, 0)); /* once more: the sum went with the call */
    CHECK(zbp_book_came(&book, &layout, 1));
    zbp_book_met(&book, 0);
    zbp_book_begin_direct(&book, &layout);
    CHECK(!zbp_book_owes(&book, &layout, 0) && !zbp_book_meets(&book, &layout, PLAIN, 0));
    CHECK(zbp_book_owes(&book, &layout, 2) && !zbp_book_meets(&book, &layout, PLAIN, 2));
    close_book(&book, &layout);
}

static void a_half_added_product_joins_no_sum(void)
{
    zbp_book book;
    zbp_layout layout;

    open_book(&book, &layout, 1, 0, "P0 P0 P0");
    half_add(&book, 1);
    zbp_book_begin_direct(&book, &layout);
    CHECK(!zbp_book_meets(&book, &layout, PLAIN, 1) && zbp_book_owes(&book, &layout, 1));
    CHECK(zbp_book_meets(&book, &layout, PLAIN, 0) && zbp_book_meets(&book, &layout, PLAIN, 2));
    zbp_book_delivered(&book, 0);
    zbp_book_begin_direct(&book, &layout);
    CHECK(!zbp_book_meets(&book, &layout, PLAIN, 2)); /* nobody is left to meet */
    close_book(&book, &layout);
}

/* ---- claims */

enum { THREADS = 4, CLAIMS = 20000 };

static zbp_book shared;
static long inside, got;

static void *claim_often(void *unused)
{
    (void)unused;
    for (int i = 0; i < CLAIMS; i++) {
        if (!zbp_book_claim(&shared))
            continue;
        inside++; /* no atomic: the claim orders them */
        got += inside == 1;
        inside--;
        zbp_book_give_back(&shared);
    }
    return NULL;
}

static void one_call_at_a_time_has_a_book(void)
{
    pthread_t thread[THREADS];
    zbp_book book = {0};

    CHECK(!zbp_book_is_claimed(&book));
    CHECK(zbp_book_claim(&book) && zbp_book_is_claimed(&book));
    CHECK(!zbp_book_claim(&book) && zbp_book_is_claimed(&book));
    zbp_book_give_back(&book);
    CHECK(!zbp_book_is_claimed(&book) && zbp_book_claim(&book));
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_create(&thread[i], NULL, claim_often, NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        REQUIRE(pthread_join(thread[i], NULL) == 0);
    CHECK(inside == 0 && got > 0 && got <= THREADS * CLAIMS && !zbp_book_is_claimed(&shared));
}

/* The sinks of different weights report from different threads: one of them alone is the last. */
enum { SINKS = 1000 };

static zbp_layout wide;
static long lasts;

static void *report_a_share(void *first)
{
    for (uint32_t w = *(uint32_t *)first; w < SINKS; w += THREADS) {
        zbp_book_arrived(&shared, w);
        zbp_book_hooked(&shared, w);
        zbp_book_delivered(&shared, w);
        if (zbp_book_added(&shared, w))
            __atomic_add_fetch(&lasts, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void sinks_report_from_their_threads(void)
{
    pthread_t thread[THREADS];
    uint32_t first[THREADS];

    zbp_layout_init(&wide, SINKS, 0, NULL);
    for (int32_t w = 0; w < SINKS; w++) {
        REQUIRE(zbp_layout_add_task(&wide, ZBP_TASK_WHOLE, 1) == ZBP_OK);
        REQUIRE(zbp_layout_add_face(&wide, (zbp_face){.weight = w, .outside = -1}) == ZBP_OK);
    }
    REQUIRE(zbp_book_init(&shared, &wide, NULL) == ZBP_OK);
    for (int round = 0; round < 10; round++) {
        lasts = 0;
        zbp_book_begin_run(&shared, false);
        for (uint32_t i = 0; i < THREADS; i++) {
            first[i] = i;
            REQUIRE(pthread_create(&thread[i], NULL, report_a_share, &first[i]) == 0);
        }
        for (int i = 0; i < THREADS; i++)
            REQUIRE(pthread_join(thread[i], NULL) == 0);
        CHECK(lasts == 1 && shared.missing == 0);
        CHECK(zbp_book_settle(&shared, RETAIN, false) == ZBP_FATE_AGAIN);
    }
    close_book(&shared, &wide);
}

/* ---- the validator */

static void expect(const zbp_book *book, const zbp_layout *layout, const char *wanted)
{
    const char *reason = NULL;

    CHECK(zbp_book_check(book, layout, &reason) == ZBP_EINVAL && reason != NULL &&
          strstr(reason, wanted) != NULL);
    CHECK(zbp_book_check(book, layout, NULL) == ZBP_EINVAL);
}

static void the_check_sees_each_fault(void)
{
    zbp_book book, broken;
    zbp_layout layout;
    const char *reason = "?";

    open_book(&book, &layout, 2, 1, "P0 W1 Ra");
    CHECK_VALID(zbp_book_check(&book, &layout, &reason));
    broken = book;
    broken.weight_count = 3;
    expect(&broken, &layout, "weight_count");
    broken = book;
    broken.face_count = 2;
    expect(&broken, &layout, "face_count");
    broken = book;
    broken.state = ZBP_BOOK_SPENT + 1;
    expect(&broken, &layout, "state");
    book.weight[1].has_arrived = book.weight[1].is_added = true;
    expect(&book, &layout, "still waits");
    book.weight[1].has_arrived = false;
    book.weight[1].is_hooked = true;
    CHECK(zbp_book_check(&book, &layout, NULL) == ZBP_OK);
    book.weight[1].is_added = false;
    expect(&book, &layout, "never arrived");
    book.weight[1].has_arrived = true;
    CHECK(zbp_book_check(&book, &layout, NULL) == ZBP_OK);
    book.face[0].half.panels = -1;
    expect(&book, &layout, "half added");
    book.face[0].half.panels = 1;
    CHECK(zbp_book_check(&book, &layout, NULL) == ZBP_OK);
    book.face[0].is_delivered = true;
    expect(&book, &layout, "half added");
    book.face[0].half.panels = 0;
    book.face[2].half.panels = 1;
    expect(&book, &layout, "leads to no weight");
    book.face[2].half.panels = 0;
    close_book(&book, &layout);
}

/* ---- sums in the order of an ordinary backward, to the bit; retries included */

static float value_of(uint32_t face)
{
    static const float values[] = {1e8f, 1.0f, -1e8f, 3.5f, 1e-3f, 7e7f};

    return values[face % (sizeof values / sizeof *values)];
}

/* Adds directly, fails at the n-th addition (-1: none). */
static bool add_values(zbp_book *book, const zbp_layout *layout, float *grad, long fail_at)
{
    uint32_t order[2 * 8];
    float sum[4] = {0};
    bool has[4] = {0};
    long touches = 0;

    zbp_layout_order(layout, order);
    zbp_book_begin_direct(book, layout);
    for (uint32_t i = 0; i < layout->task_count; i++) {
        const zbp_task *task = &layout->task[order[i]];

        for (uint32_t f = task->face_begin; f < task->face_end; f++) {
            const uint32_t w = (uint32_t)layout->face[f].weight;

            if (!zbp_book_owes(book, layout, f))
                continue;
            if (touches++ == fail_at)
                return false;
            if (!zbp_book_meets(book, layout, PLAIN, f)) {
                grad[w] += value_of(f);
                zbp_book_delivered(book, f);
                continue;
            }
            sum[w] = has[w] ? sum[w] + value_of(f) : value_of(f);
            has[w] = true;
            if (!zbp_book_came(book, layout, f))
                continue;
            if (touches++ == fail_at)
                return false;
            grad[w] += sum[w];
            zbp_book_met(book, w);
        }
    }
    zbp_book_added_all(book);
    return true;
}

static void sums_are_those_of_an_ordinary_backward(void)
{
    /* From the last node of the forward to the first: faces 4, 3, 1, 2, 0. */
    static const uint32_t backwards[] = {4, 3, 1, 2, 0};
    static const uint64_t sequence_nr[] = {1, 5, 4, 8, 9};
    bool is_through = false;

    for (long n = 0; !is_through; n++) {
        float grad[2] = {0.1f, 0.2f}, expected[2] = {0.1f, 0.2f}, sum[2] = {0};
        zbp_book book;
        zbp_layout layout;

        open_book(&book, &layout, 2, 0, "P0 P0 P1 P0 P0");
        for (uint32_t t = 0; t < 5; t++)
            layout.task[t].sequence_nr = sequence_nr[t];
        for (uint32_t i = 0; i < 5; i++)
            sum[layout.face[backwards[i]].weight] += value_of(backwards[i]);
        for (uint32_t w = 0; w < 2; w++)
            expected[w] += sum[w];
        is_through = add_values(&book, &layout, grad, n);
        if (!is_through) {
            CHECK(zbp_book_settle(&book, PLAIN, true) == ZBP_FATE_KEEP);
            CHECK(add_values(&book, &layout, grad, -1));
        }
        CHECK(memcmp(grad, expected, sizeof grad) == 0);
        CHECK(zbp_book_settle(&book, PLAIN, false) == ZBP_FATE_CLOSE);
        close_book(&book, &layout);
        REQUIRE(n < 20);
    }
}

int main(void)
{
    check_sees_failure();
    RUN(an_empty_book_is_legal);
    RUN(every_allocation_fails_once);
    RUN(it_forgets_and_closes_what_it_allocated);
    RUN(a_complete_group_is_done_until_it_is_reported);
    RUN(a_retained_group_runs_again_as_if_it_never_had);
    RUN(a_retry_cannot_retain_what_a_plain_call_began);
    RUN(what_waits_is_all_that_is_left);
    RUN(the_last_weight_tells_that_the_tasks_can_go);
    RUN(faces_are_wanted_for_their_weight_or_what_lies_behind);
    RUN(it_unpacks_up_to_the_last_task_that_is_owed);
    RUN(what_anybody_could_tell_runs_in_the_engine);
    RUN(sums_are_formed_directly_where_that_is_as_an_ordinary_backward_does);
    RUN(a_hooked_path_is_given_up);
    RUN(a_half_added_product_goes_on_in_its_sum_or_is_refused);
    RUN(faces_that_meet_are_delivered_with_their_sum);
    RUN(a_retry_sums_anew_what_was_not_added);
    RUN(a_half_added_product_joins_no_sum);
    RUN(one_call_at_a_time_has_a_book);
    RUN(sinks_report_from_their_threads);
    RUN(the_check_sees_each_fault);
    RUN(sums_are_those_of_an_ordinary_backward);
    return check_end();
}
