/* zbp_folds.h - gradients of one weight that I computes at several places, summed in I.
 *
 * Note [Sums in I]
 * A weight that is used n times (a recurrent layer's, a tied one) would be held n times from I to W where its nodes run
 * whole. They are added up as W would add them (Note [The order of sums] in zbp_book.h), so to the same bits: from the
 * last node of the forward to the first, as far as all before have come. The sum stands at the first face, the others
 * have none. A face that is not added ends it, and so does the first one, to whatever weight, of which W must run
 * nodes on the way: what these give comes after it. Added is what leads to the weight by transpositions at most, on
 * one stream, of nodes to which nobody can give other output gradients.
 *
 * Threads: one user at a time.
 */
#ifndef ZBP_FOLDS_H
#define ZBP_FOLDS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_alloc.h"
#include "core/base/zbp_status.h"
#include "core/pass/zbp_layout.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Held by the caller. Zeroed is legal: nothing is summed. */
typedef struct zbp_folds {
    /* Per face, ZBP_NONE for none; of one block. */
    uint32_t *sum;  /* where its sum stands: the first face of the fold */
    uint32_t *next; /* the face that is added after it */
    uint32_t *due;  /* of a sum: the face that is added next */
    uint8_t *flag;
    uint32_t face_count;
    size_t size;
    zbp_alloc alloc;
} zbp_folds;

/* One addition: the gradient at `next` to the one at `sum`. */
typedef struct zbp_fold_step {
    uint32_t sum, next;
    bool is_own; /* an addition has made the sum: nobody else has its memory */
} zbp_fold_step;

/* What became of it. */
enum {
    ZBP_FOLD_ADDED,
    ZBP_FOLD_EMPTY, /* there was no gradient to add */
    ZBP_FOLD_ENDS   /* the two do not add up: this one and all after it stay where they are */
};

/* Before I runs. `is_bound[task]`: nobody can give its node other output gradients; `is_plain[weight]`: its gradients
 * are ordinary tensors. alloc is copied; NULL is libc. ZBP_ENOMEM, ZBP_EOVERFLOW: the folds zeroed. */
ZBP_MUST_USE int zbp_folds_init(zbp_folds *folds, const zbp_layout *layout, const bool *is_bound,
                                const bool *is_plain, const zbp_alloc *alloc);
void zbp_folds_fini(zbp_folds *folds); /* zeroes it */

/* I has computed the gradient at the face, and keeps it. */
void zbp_folds_come(zbp_folds *folds, uint32_t face);

/* True with the next addition that can be done in the sum that `face` is of; zbp_folds_done is owed for it. */
bool zbp_folds_step(const zbp_folds *folds, uint32_t face, zbp_fold_step *step_out);
void zbp_folds_done(zbp_folds *folds, const zbp_fold_step *step, int fate); /* ZBP_FOLD_* */

/* ZBP_OK, or ZBP_EINVAL with *reason_out (may be NULL) a static string. */
ZBP_MUST_USE int zbp_folds_check(const zbp_folds *folds, const zbp_layout *layout,
                                 const char **reason_out);

#ifdef __cplusplus
}
#endif

#endif
