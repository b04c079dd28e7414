#include "core/pass/zbp_book.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"

int zbp_book_init(zbp_book *book, const zbp_layout *layout)
{
    memset(book, 0, sizeof *book);
    book->weight = zbpi_zeroed(layout->weight_count * sizeof *book->weight);
    if (book->weight == NULL)
        return ZBP_ENOMEM;
    book->weight_count = layout->weight_count;
    return ZBP_OK;
}

/* The claim is left alone: other threads ask for it at any time. */
void zbp_book_close(zbp_book *book)
{
    zbpi_free(book->weight);
    book->weight = NULL;
    book->weight_count = book->missing = 0;
    book->is_spent = true;
    book->has_failed = book->goes_with_last = false;
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

/* Whether the face's gradient needs nothing run: a product, or what I has kept. */
static bool is_at_hand(const zbp_task *task)
{
    switch (task->kind) {
    case ZBP_TASK_PRODUCT:
        /* Within one run of the engine a checkpointed region is computed again only once. */
        return !task->leaves_packed;
    case ZBP_TASK_WHOLE:
        return !task->has_work;
    default:
        return false;
    }
}

/* Notes for each weight its face, ZBP_NO_FACE where there are several or one that needs the
 * engine. */
static void find_sole_faces(zbp_book *book, const zbp_layout *layout, bool *has_outside_out)
{
    enum { NONE_YET = UINT32_MAX - 1 };

    *has_outside_out = false;
    for (uint32_t w = 0; w < book->weight_count; w++)
        book->weight[w].alone = NONE_YET;
    for (uint32_t f = 0; f < layout->face_count; f++) {
        const zbp_face *face = &layout->face[f];

        if (face->weight < 0) {
            *has_outside_out = true;
        } else {
            uint32_t *alone = &book->weight[face->weight].alone;
            const bool is_first = *alone == NONE_YET;

            *alone = is_first && is_at_hand(&layout->task[face->task]) ? f : ZBP_NO_FACE;
        }
    }
    for (uint32_t w = 0; w < book->weight_count; w++) {
        if (book->weight[w].alone == NONE_YET)
            book->weight[w].alone = ZBP_NO_FACE;
    }
}

void zbp_book_find_alone(zbp_book *book, const zbp_layout *layout, zbp_how how)
{
    bool has_outside = false;

    find_sole_faces(book, layout, &has_outside);
    /* A face without a path may lead through nodes to any weight that they lead to. */
    for (uint32_t h = 0; has_outside && h < layout->hop_count; h++) {
        if (layout->hop[h].to_weight >= 0)
            book->weight[layout->hop[h].to_weight].alone = ZBP_NO_FACE;
    }
    for (uint32_t w = 0; w < book->weight_count; w++) {
        zbp_book_weight *weight = &book->weight[w];

        if (how.is_anomaly || weight->is_added || weight->has_arrived ||
            (weight->seen & (ZBP_WEIGHT_HOOKED | ZBP_WEIGHT_ELSEWHERE)) != 0)
            weight->alone = ZBP_NO_FACE;
    }
}

void zbp_book_give_up_paths(const zbp_book *book, zbp_layout *layout)
{
    for (uint32_t f = 0; f < layout->face_count; f++) {
        if (layout->face[f].weight >= 0 && zbp_book_wants(book, (uint32_t)layout->face[f].weight))
            zbp_layout_give_up_path(layout, f);
    }
}

bool zbp_book_wants(const zbp_book *book, uint32_t weight)
{
    return !book->weight[weight].is_added && !book->weight[weight].has_arrived;
}

void zbp_book_find_leading(const zbp_book *book, const zbp_layout *layout, bool *leads)
{
    bool is_changed = true, is_back = false;

    for (uint32_t o = 0; o < layout->outside_count; o++)
        leads[o] = false;
    while (is_changed) { /* seldom more than twice: hops come in the order of the walk */
        is_changed = false;
        is_back = !is_back; /* either order of a chain takes one pass */
        for (uint32_t i = 0; i < layout->hop_count; i++) {
            const zbp_hop *hop = &layout->hop[is_back ? layout->hop_count - 1 - i : i];

            if (!leads[hop->outside] &&
                (hop->to_weight >= 0 ? zbp_book_wants(book, (uint32_t)hop->to_weight)
                                     : leads[hop->to_outside]))
                leads[hop->outside] = is_changed = true;
        }
    }
}

static uint32_t count_missing(const zbp_book *book)
{
    uint32_t missing = 0;

    for (uint32_t w = 0; w < book->weight_count; w++)
        missing += book->weight[w].is_added ? 0 : 1;
    return missing;
}

bool zbp_book_is_complete(const zbp_book *book)
{
    return count_missing(book) == 0;
}

void zbp_book_begin_run(zbp_book *book, bool retain)
{
    book->missing = count_missing(book);
    book->goes_with_last = !retain;
}

bool zbp_book_added(zbp_book *book, uint32_t weight)
{
    book->weight[weight].is_added = true;
    book->weight[weight].has_arrived = false;
    return __atomic_sub_fetch(&book->missing, 1, __ATOMIC_ACQ_REL) == 0 && book->goes_with_last;
}

zbp_fate zbp_book_settle(zbp_book *book, zbp_how how, bool failed)
{
    if (!failed && how.retain && !book->has_failed) {
        for (uint32_t w = 0; w < book->weight_count; w++) {
            book->weight[w].is_added = false;
            book->weight[w].is_hooked = false;
        }
        return ZBP_FATE_AGAIN;
    }
    if (!failed) {
        book->is_spent = true;
        return ZBP_FATE_CLOSE;
    }
    if (how.retain)
        return ZBP_FATE_KEEP;
    book->has_failed = true;
    for (uint32_t w = 0; w < book->weight_count; w++) {
        if (zbp_book_wants(book, w))
            return ZBP_FATE_KEEP;
    }
    return ZBP_FATE_RELEASE;
}

uint64_t zbp_book_unpacks_up_to(const zbp_book *book, const zbp_layout *layout)
{
    uint64_t last = 0;

    for (uint32_t f = 0; f < layout->face_count; f++) {
        const zbp_task *task = &layout->task[layout->face[f].task];
        const int32_t weight = layout->face[f].weight;

        if (task->leaves_packed && task->sequence_nr > last &&
            (weight < 0 || zbp_book_wants(book, (uint32_t)weight)))
            last = task->sequence_nr;
    }
    return last;
}
