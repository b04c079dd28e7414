#include "core/pass/zbp_book.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

int zbp_book_init(zbp_book *book, const zbp_layout *layout, const zbp_alloc *alloc)
{
    const size_t weight_size = layout->weight_count * sizeof *book->weight;
    const size_t face_size = layout->face_count * sizeof *book->face;

    memset(book, 0, sizeof *book);
    book->alloc = zbpi_alloc_copy(alloc);
    if (weight_size > 0 && (book->weight = zbpi_resize(&book->alloc, NULL, 0, weight_size)) == NULL)
        goto out_of_memory;
    book->weight_count = layout->weight_count;
    if (face_size > 0 && (book->face = zbpi_resize(&book->alloc, NULL, 0, face_size)) == NULL)
        goto out_of_memory;
    book->face_count = layout->face_count;
    if (weight_size > 0)
        memset(book->weight, 0, weight_size);
    if (face_size > 0)
        memset(book->face, 0, face_size);
    return ZBP_OK;
out_of_memory:
    zbp_book_fini(book);
    return ZBP_ENOMEM;
}

void zbp_book_fini(zbp_book *book)
{
    zbpi_free(&book->alloc, book->weight, book->weight_count * sizeof *book->weight);
    zbpi_free(&book->alloc, book->face, book->face_count * sizeof *book->face);
    memset(book, 0, sizeof *book);
}

void zbp_book_forget_faces(zbp_book *book)
{
    zbpi_free(&book->alloc, book->face, book->face_count * sizeof *book->face);
    book->face = NULL;
    book->face_count = 0;
}

void zbp_book_close(zbp_book *book)
{
    const zbp_book left = {
        .state = book->state == ZBP_BOOK_UNREPORTED ? ZBP_BOOK_UNREPORTED : ZBP_BOOK_SPENT,
        .claimed = book->claimed,
        .alloc = book->alloc,
    };

    zbp_book_fini(book);
    *book = left;
}

bool zbp_book_claim(zbp_book *book)
{
    return __atomic_exchange_n(&book->claimed, 1, __ATOMIC_ACQ_REL) == 0;
}

void zbp_book_give_back(zbp_book *book)
{
    __atomic_store_n(&book->claimed, 0, __ATOMIC_RELEASE);
}

bool zbp_book_is_claimed(const zbp_book *book)
{
    return __atomic_load_n(&book->claimed, __ATOMIC_ACQUIRE) != 0;
}

void zbp_book_see_weight(zbp_book *book, uint32_t weight, uint8_t seen)
{
    book->weight[weight].seen = seen;
}

void zbp_book_see_path(zbp_book *book, uint32_t face, bool is_hooked)
{
    book->face[face].path_is_hooked = is_hooked;
}

void zbp_book_see_sum(zbp_book *book, uint32_t face, uint64_t sum)
{
    book->face[face].sum_now = sum;
}

static bool is_half_added(const zbp_book_face *face)
{
    return face->half.panels > 0;
}

bool zbp_book_has_half(const zbp_book *book)
{
    for (uint32_t f = 0; f < book->face_count; f++) {
        if (is_half_added(&book->face[f]))
            return true;
    }
    return false;
}

/* The engine knows how gradients of all kinds and of several streams are summed; without it only
 * products of one stream are, or, where each is added by itself, whatever comes from one stream is added
 * as it comes. */
static bool adds_one_by_one(zbp_how how)
{
    return how.fuse || how.wide;
}

static bool sum_directly(const zbp_task *a, const zbp_task *b, zbp_how how)
{
    return a->stream == b->stream &&
           (adds_one_by_one(how) || (a->kind == ZBP_TASK_PRODUCT && b->kind == ZBP_TASK_PRODUCT));
}

static bool sums_directly(zbp_book *book, const zbp_layout *layout, zbp_how how)
{
    for (uint32_t w = 0; w < book->weight_count; w++)
        book->weight[w].first = ZBP_NO_FACE;
    for (uint32_t f = 0; f < layout->face_count; f++) {
        const zbp_face *face = &layout->face[f];
        zbp_book_weight *weight = &book->weight[face->weight];

        if (book->face[f].is_delivered)
            continue;
        if (weight->first != ZBP_NO_FACE &&
            (((weight->seen & ZBP_WEIGHT_SPECIAL) != 0 && !adds_one_by_one(how)) ||
             !sum_directly(&layout->task[face->task],
                           &layout->task[layout->face[weight->first].task], how)))
            return false;
        weight->first = f;
    }
    return true;
}

/* Whether nobody could tell that the engine did not run. */
static bool runs_directly(zbp_book *book, const zbp_layout *layout, zbp_how how)
{
    for (uint32_t t = 0; t < layout->task_count; t++) {
        /* Within one run of the engine a checkpointed region is computed again only once. */
        if (layout->task[t].leaves_packed)
            return false;
    }
    for (uint32_t f = 0; f < layout->face_count; f++) {
        if (layout->face[f].weight < 0)
            return false;
    }
    for (uint32_t w = 0; w < book->weight_count; w++) {
        if (book->weight[w].has_arrived || (book->weight[w].seen & ZBP_WEIGHT_HOOKED) != 0)
            return false;
    }
    return !how.is_anomaly && sums_directly(book, layout, how);
}

zbp_way zbp_book_way(zbp_book *book, zbp_layout *layout, zbp_how how, uint32_t *face_out)
{
    bool is_direct;

    if (book->state != ZBP_BOOK_OPEN)
        return ZBP_WAY_DONE;
    for (uint32_t f = 0; f < book->face_count; f++) {
        if (!book->face[f].path_is_hooked)
            continue;
        *face_out = f;
        if (is_half_added(&book->face[f]))
            return ZBP_WAY_REFUSED;
        zbp_layout_give_up_path(layout, f);
    }
    is_direct = runs_directly(book, layout, how);
    for (uint32_t f = 0; f < book->face_count; f++) {
        const zbp_book_face *face = &book->face[f];

        *face_out = f;
        if (is_half_added(face) && !(is_direct && face->sum_now == face->half.sum))
            return ZBP_WAY_REFUSED;
    }
    return is_direct ? ZBP_WAY_DIRECT : ZBP_WAY_ENGINE;
}

void zbp_book_count_owed(zbp_book *book, const zbp_layout *layout)
{
    for (uint32_t w = 0; w < book->weight_count; w++)
        book->weight[w].meeting = 0;
    for (uint32_t f = 0; f < layout->face_count; f++) {
        zbp_book_weight *weight = &book->weight[layout->face[f].weight];

        if (!zbp_book_owes(book, layout, f))
            continue;
        weight->first = f;
        weight->meeting++;
    }
}

bool zbp_book_is_owed(const zbp_book *book, uint32_t weight)
{
    return book->weight[weight].meeting > 0;
}

uint32_t zbp_book_sole_product(const zbp_book *book, const zbp_layout *layout, uint32_t weight)
{
    const zbp_book_weight *at = &book->weight[weight];
    const zbp_task *task;

    if (at->meeting != 1 || (at->seen & ZBP_WEIGHT_SPECIAL) != 0)
        return ZBP_NO_FACE;
    task = &layout->task[layout->face[at->first].task];
    return task->kind == ZBP_TASK_PRODUCT && task->stream == 0 ? at->first : ZBP_NO_FACE;
}

void zbp_book_begin_direct(zbp_book *book, const zbp_layout *layout)
{
    for (uint32_t w = 0; w < book->weight_count; w++) {
        book->weight[w].first = ZBP_NO_FACE;
        book->weight[w].meeting = 0;
    }
    for (uint32_t f = 0; f < book->face_count; f++) {
        zbp_book_weight *weight = &book->weight[layout->face[f].weight];

        if (book->face[f].is_delivered || is_half_added(&book->face[f]))
            continue;
        book->face[f].next = weight->first;
        weight->first = f;
        weight->meeting++;
    }
}

bool zbp_book_owes(const zbp_book *book, const zbp_layout *layout, uint32_t face)
{
    const zbp_book_weight *weight = &book->weight[layout->face[face].weight];

    /* An accumulator would add nothing to a frozen weight either. */
    return !book->face[face].is_delivered && (weight->seen & ZBP_WEIGHT_FROZEN) == 0;
}

bool zbp_book_meets(const zbp_book *book, const zbp_layout *layout, zbp_how how, uint32_t face)
{
    const uint32_t first = book->weight[layout->face[face].weight].first;

    return !adds_one_by_one(how) && !is_half_added(&book->face[face]) && first != ZBP_NO_FACE &&
           book->face[first].next != ZBP_NO_FACE;
}

bool zbp_book_came(zbp_book *book, const zbp_layout *layout, uint32_t face)
{
    return --book->weight[layout->face[face].weight].meeting == 0;
}

void zbp_book_met(zbp_book *book, uint32_t weight)
{
    for (uint32_t f = book->weight[weight].first; f != ZBP_NO_FACE; f = book->face[f].next)
        book->face[f].is_delivered = true;
}

bool zbp_book_wants(const zbp_book *book, uint32_t weight)
{
    return !book->weight[weight].is_added && !book->weight[weight].has_arrived;
}

bool zbp_book_wants_face(const zbp_book *book, const zbp_layout *layout, uint32_t face)
{
    const int32_t weight = layout->face[face].weight;

    return !book->face[face].is_delivered && (weight < 0 || zbp_book_wants(book, (uint32_t)weight));
}

static uint32_t count_missing(const zbp_book *book)
{
    uint32_t missing = 0;

    for (uint32_t w = 0; w < book->weight_count; w++)
        missing += book->weight[w].is_added ? 0 : 1;
    return missing;
}

void zbp_book_begin_run(zbp_book *book, bool retain)
{
    book->missing = count_missing(book);
    /* In a retry a task can come late: all its weights may have been added before. */
    book->goes_with_last = !retain && book->missing == book->weight_count;
}

void zbp_book_arrived(zbp_book *book, uint32_t weight)
{
    book->weight[weight].has_arrived = true;
}

void zbp_book_hooked(zbp_book *book, uint32_t weight)
{
    book->weight[weight].is_hooked = true;
}

void zbp_book_delivered(zbp_book *book, uint32_t face)
{
    book->face[face].is_delivered = true;
}

bool zbp_book_added(zbp_book *book, uint32_t weight)
{
    book->weight[weight].is_added = true;
    book->weight[weight].has_arrived = false;
    return __atomic_sub_fetch(&book->missing, 1, __ATOMIC_ACQ_REL) == 0 && book->goes_with_last;
}

void zbp_book_added_all(zbp_book *book)
{
    for (uint32_t w = 0; w < book->weight_count; w++)
        book->weight[w].is_added = true;
}

static void make_ready_again(zbp_book *book)
{
    for (uint32_t w = 0; w < book->weight_count; w++) {
        book->weight[w].is_added = false;
        book->weight[w].is_hooked = false;
    }
    for (uint32_t f = 0; f < book->face_count; f++)
        book->face[f].is_delivered = false;
}

void zbp_book_report_again(zbp_book *book)
{
    if (book->state != ZBP_BOOK_OPEN) {
        book->state = ZBP_BOOK_UNREPORTED;
        return;
    }
    zbp_book_added_all(book);
    for (uint32_t f = 0; f < book->face_count; f++)
        book->face[f].is_delivered = !is_half_added(&book->face[f]); /* that weight is frozen now */
}

zbp_fate zbp_book_settle(zbp_book *book, zbp_how how, bool failed)
{
    bool is_computed = true;

    if (!failed && how.retain && book->state == ZBP_BOOK_OPEN && !book->has_failed) {
        make_ready_again(book);
        return ZBP_FATE_AGAIN;
    }
    if (!failed) {
        book->state = ZBP_BOOK_SPENT;
        return ZBP_FATE_CLOSE;
    }
    if (book->state != ZBP_BOOK_OPEN || how.retain)
        return ZBP_FATE_KEEP;
    if (count_missing(book) == 0) {
        book->state = ZBP_BOOK_UNREPORTED;
        return ZBP_FATE_CLOSE;
    }
    book->has_failed = true;
    for (uint32_t w = 0; w < book->weight_count; w++)
        is_computed = is_computed && !zbp_book_wants(book, w);
    return is_computed ? ZBP_FATE_RELEASE : ZBP_FATE_KEEP;
}

uint64_t zbp_book_unpacks_up_to(const zbp_book *book, const zbp_layout *layout)
{
    uint64_t last = 0;

    for (uint32_t f = 0; f < book->face_count; f++) {
        const zbp_task *task = &layout->task[layout->face[f].task];

        if (task->leaves_packed && task->sequence_nr > last && zbp_book_wants_face(book, layout, f))
            last = task->sequence_nr;
    }
    return last;
}

static const char *fault_in(const zbp_book *book, const zbp_layout *layout)
{
    if (book->weight_count != layout->weight_count && book->weight_count != 0)
        return "weight_count is not the layout's";
    if (book->face_count != layout->face_count)
        return "face_count is not the layout's";
    if (book->state > ZBP_BOOK_SPENT)
        return "state is none";
    for (uint32_t w = 0; w < book->weight_count; w++) {
        const zbp_book_weight *weight = &book->weight[w];

        if (weight->is_added && weight->has_arrived)
            return "weight: what was added still waits";
        if (weight->is_hooked && !weight->is_added && !weight->has_arrived)
            return "weight: its hooks saw a gradient that never arrived";
    }
    for (uint32_t f = 0; f < book->face_count; f++) {
        const zbp_book_face *face = &book->face[f];

        if (face->half.panels < 0 || (is_half_added(face) && face->is_delivered))
            return "face: delivered, and half added";
        if (is_half_added(face) && layout->face[f].weight < 0)
            return "face: half added, and leads to no weight";
    }
    return NULL;
}

int zbp_book_check(const zbp_book *book, const zbp_layout *layout, const char **reason_out)
{
    const char *reason = fault_in(book, layout);

    if (reason_out != NULL)
        *reason_out = reason;
    return reason == NULL ? ZBP_OK : ZBP_EINVAL;
}
