/* zbp_panels.h - the pieces of a product that W computes and adds one at a time, so that no temporary
 * has the whole product's size.
 *
 * Pieces are the same for the same sizes: a W that raised between two of them goes on by their number.
 */
#ifndef ZBP_PANELS_H
#define ZBP_PANELS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Sizes in elements. */
enum {
    ZBP_TILE =
        48, /* the kernels of BLAS (6, 8, 12, 16, 24, 48 wide) begin a new tile here anyway */
    ZBP_PANEL = 11 *
        ZBP_TILE,       /* so many that packing the other factor anew for each panel costs little */
    ZBP_NARROWEST = 256 /* with fewer of the other, BLAS has ways to cut that depend on all sizes */
};

/* Matrices [batch, batch + batch_count) of a batch; of a single one the rows or columns
 * [begin, begin + count). */
typedef struct zbp_panel {
    int64_t batch, batch_count;
    int64_t begin, count;
    bool by_rows;
    bool is_cut; /* else begin and count cover the matrix */
} zbp_panel;

/* An iteration; held by the caller, read through zbp_panels_next alone. */
typedef struct zbp_panels {
    int64_t batches, rows, columns;
    int64_t step;              /* matrices at a time */
    int64_t batch, panel, row; /* of the next piece; `row`: or column */
} zbp_panels;

/* Of a batch of products of this size, each of which may be 0; a single matrix is a batch of 1. */
zbp_panels zbp_panels_of(int64_t batches, int64_t rows, int64_t columns);

/* How many pieces there are in all. */
int64_t zbp_panels_count(const zbp_panels *panels);

/* The next piece; false behind the last. All pieces together cover the product, none overlaps. */
bool zbp_panels_next(zbp_panels *panels, zbp_panel *out);

#ifdef __cplusplus
}
#endif

#endif
