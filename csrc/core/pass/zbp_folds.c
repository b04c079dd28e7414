#include "core/pass/zbp_folds.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"
#include "core/graph/zbp_graph.h"
#include "core/pass/zbp_policy.h"

enum { HAS_COME = 1, IS_OWN = 2 };

/* While folds are planned: per weight, in the scratch part of the block. */
typedef struct planning {
    const zbp_layout *layout;
    const bool *is_bound, *is_plain;
    uint32_t *last; /* the face that is added last so far; ZBP_NONE */
} planning;

static bool may_fold(const planning *p, const zbp_face *face)
{
    const zbp_task *task = &p->layout->task[face->task];

    return task->kind == ZBP_TASK_WHOLE && p->is_bound[face->task] &&
           task->takes_work == ZBP_DEFER_NOTHING && (face->flag & ZBP_FACE_SIMPLE) != 0 &&
           p->is_plain[face->weight];
}

static bool fits_behind(const zbp_layout *layout, uint32_t last, uint32_t face)
{
    const uint32_t a = layout->face[last].task, b = layout->face[face].task;

    return a != b && layout->task[a].stream == layout->task[b].stream;
}

static bool leads_directly(const zbp_layout *layout, uint32_t task)
{
    for (uint32_t f = layout->task[task].face_begin; f < layout->task[task].face_end; f++) {
        if (layout->face[f].weight < 0)
            return false;
    }
    return true;
}

/* True if anything is summed. `is_over[weight]`: a face that is not added has come. */
static bool plan(zbp_folds *folds, const planning *p, const uint32_t *order, uint8_t *is_over)
{
    const zbp_layout *layout = p->layout;
    bool sums = false;

    for (uint32_t t = 0; t < layout->task_count && leads_directly(layout, order[t]); t++) {
        const zbp_task *task = &layout->task[order[t]];

        for (uint32_t f = task->face_begin; f < task->face_end; f++) {
            const int32_t w = layout->face[f].weight;
            const uint32_t last = p->last[w];

            if (is_over[w] != 0)
                continue;
            if (!may_fold(p, &layout->face[f]) ||
                (last != ZBP_NONE && !fits_behind(layout, last, f))) {
                is_over[w] = 1;
                continue;
            }
            if (last != ZBP_NONE) {
                if (folds->sum[last] == ZBP_NONE) {
                    folds->sum[last] = last;
                    folds->due[last] = f;
                }
                folds->sum[f] = folds->sum[last];
                folds->next[last] = f;
                sums = true;
            }
            p->last[w] = f;
        }
    }
    return sums;
}

int zbp_folds_init(zbp_folds *folds, const zbp_layout *layout, const bool *is_bound,
                   const bool *is_plain, const zbp_alloc *alloc)
{
    const uint32_t faces = layout->face_count, weights = layout->weight_count;
    const zbp_alloc by = zbpi_alloc_copy(alloc);
    const uint64_t kept = 3 * (uint64_t)faces;
    uint32_t *words, *order;
    void *block, *scratch;
    size_t scratch_size;
    planning p = {layout, is_bound, is_plain, NULL};
    int status;

    memset(folds, 0, sizeof *folds);
    if (layout->task_count < 2 || faces < 2)
        return ZBP_OK;
    status = zbpi_block_new(&by, 2 * (uint64_t)layout->task_count + weights, weights, &scratch,
                            &scratch_size);
    if (status != ZBP_OK)
        return status;
    status = zbpi_block_new(&by, kept, faces, &block, &folds->size);
    if (status != ZBP_OK) {
        zbpi_free(&by, scratch, scratch_size);
        return status;
    }
    words = block;
    memset(words, 0xFF, kept * sizeof *words); /* ZBP_NONE */
    folds->sum = zbpi_block_take(&words, faces);
    folds->next = zbpi_block_take(&words, faces);
    folds->due = zbpi_block_take(&words, faces);
    folds->flag = memset(words, 0, faces);
    folds->face_count = faces;
    folds->alloc = by;

    words = scratch;
    order = zbpi_block_take(&words, 2 * (size_t)layout->task_count);
    zbp_layout_order(layout, order);
    p.last = zbpi_block_take(&words, weights);
    memset(p.last, 0xFF, weights * sizeof *p.last);
    if (!plan(folds, &p, order, memset(words, 0, weights)))
        zbp_folds_fini(folds);
    zbpi_free(&by, scratch, scratch_size);
    return ZBP_OK;
}

void zbp_folds_fini(zbp_folds *folds)
{
    if (folds->face_count > 0)
        zbpi_free(&folds->alloc, folds->sum, folds->size);
    memset(folds, 0, sizeof *folds);
}

void zbp_folds_come(zbp_folds *folds, uint32_t face)
{
    if (face < folds->face_count)
        folds->flag[face] |= HAS_COME;
}

bool zbp_folds_step(const zbp_folds *folds, uint32_t face, zbp_fold_step *step_out)
{
    const uint32_t sum = face < folds->face_count ? folds->sum[face] : ZBP_NONE;
    const uint32_t due = sum != ZBP_NONE ? folds->due[sum] : ZBP_NONE;

    if (due == ZBP_NONE || (folds->flag[sum] & folds->flag[due] & HAS_COME) == 0)
        return false;
    *step_out = (zbp_fold_step){sum, due, (folds->flag[sum] & IS_OWN) != 0};
    return true;
}

void zbp_folds_done(zbp_folds *folds, const zbp_fold_step *step, int fate)
{
    folds->due[step->sum] = fate == ZBP_FOLD_ENDS ? ZBP_NONE : folds->next[step->next];
    if (fate == ZBP_FOLD_ADDED)
        folds->flag[step->sum] |= IS_OWN;
}

static const char *fault_at(const zbp_folds *folds, const zbp_layout *layout, uint32_t f)
{
    const uint32_t sum = folds->sum[f], next = folds->next[f], due = folds->due[f];

    if (sum == ZBP_NONE)
        return next != ZBP_NONE || due != ZBP_NONE ? "a face of no sum has a next one" : NULL;
    if (sum >= folds->face_count || folds->sum[sum] != sum)
        return "sum: it stands at a face of another";
    if (layout->face[f].weight < 0 || layout->face[f].weight != layout->face[sum].weight)
        return "sum: of two weights";
    if (sum != f && due != ZBP_NONE)
        return "due: of a face that is no sum";
    if (next != ZBP_NONE && (next >= folds->face_count || folds->sum[next] != sum))
        return "next: a face of another sum";
    if (due != ZBP_NONE && (due >= folds->face_count || folds->sum[due] != sum || due == sum))
        return "due: a face of another sum";
    return NULL;
}

int zbp_folds_check(const zbp_folds *folds, const zbp_layout *layout, const char **reason_out)
{
    const char *fault = NULL;

    if (folds->face_count != 0 && folds->face_count != layout->face_count)
        fault = "face_count: another layout's";
    for (uint32_t f = 0; f < folds->face_count && fault == NULL; f++)
        fault = fault_at(folds, layout, f);
    if (reason_out != NULL)
        *reason_out = fault;
    return fault == NULL ? ZBP_OK : ZBP_EINVAL;
}
