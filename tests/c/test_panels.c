/* Panels: together they are the product, in pieces of the sizes that BLAS rounds alike. */
#include "check.h"
#include "core/pass/zbp_panels.h"

/* By counting each element of the longer side, for a batch of at most 8. */
static void cover(int64_t batches, int64_t rows, int64_t columns)
{
    static unsigned char seen[8][4096];
    const int64_t size = rows >= columns ? rows : columns;
    zbp_panels panels = zbp_panels_of(batches, rows, columns);
    const int64_t count = zbp_panels_count(&panels);
    zbp_panel piece;
    int64_t number = 0;

    memset(seen, 0, sizeof seen);
    for (; zbp_panels_next(&panels, &piece); number++) {
        REQUIRE(piece.batch >= 0 && piece.batch_count > 0 &&
                piece.batch + piece.batch_count <= batches);
        REQUIRE(piece.begin >= 0 && piece.count >= 0 && piece.begin + piece.count <= size);
        CHECK(piece.by_rows == (rows >= columns));
        CHECK(piece.is_cut || (piece.begin == 0 && piece.count == size));
        CHECK(!piece.is_cut || (piece.batch_count == 1 && piece.count <= ZBP_PANEL + ZBP_TILE));
        CHECK(!piece.is_cut || piece.begin % ZBP_TILE == 0);
        CHECK(!piece.is_cut || (rows >= ZBP_NARROWEST && columns >= ZBP_NARROWEST));
        for (int64_t b = piece.batch; b < piece.batch + piece.batch_count; b++) {
            for (int64_t i = piece.begin; i < piece.begin + piece.count; i++)
                seen[b][i]++;
        }
        REQUIRE(number < 100);
    }
    CHECK(number == count);
    for (int64_t b = 0; b < batches; b++) {
        for (int64_t i = 0; i < size; i++)
            CHECK(seen[b][i] == 1);
    }
    CHECK(!zbp_panels_next(&panels, &piece));
}

static void pieces_cover_the_product_once(void)
{
    static const int64_t sizes[] = {0, 1, 47, 255, 256, 257, 528, 529, 1000, 1056, 1057, 4096};

    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++) {
            for (int64_t batches = 0; batches <= 8; batches += batches < 3 ? 1 : 5)
                cover(batches, sizes[i], sizes[j]);
        }
    }
}

static void a_matrix_with_a_short_side_is_not_cut(void)
{
    zbp_panels panels = zbp_panels_of(1, 4096, ZBP_NARROWEST - 1);
    zbp_panel piece;

    CHECK(zbp_panels_next(&panels, &piece) && !piece.is_cut && piece.count == 4096);
    CHECK(!zbp_panels_next(&panels, &piece));
}

static void pieces_of_one_size_up_to_a_tile(void)
{
    zbp_panels panels = zbp_panels_of(1, 1200, 300);
    zbp_panel piece;
    int64_t counts[3] = {0};

    for (int i = 0; i < 3; i++) {
        REQUIRE(zbp_panels_next(&panels, &piece));
        counts[i] = piece.count;
    }
    CHECK(!zbp_panels_next(&panels, &piece));
    CHECK(counts[0] == 432 && counts[1] == 384 && counts[2] == 384);
}

static void small_matrices_of_a_batch_go_together(void)
{
    zbp_panels panels = zbp_panels_of(1000, 64, 64);
    zbp_panel piece;
    int64_t matrices = 0;

    while (zbp_panels_next(&panels, &piece)) {
        CHECK(piece.batch_count * 64 * 64 <= (int64_t)ZBP_PANEL * ZBP_PANEL);
        matrices += piece.batch_count;
    }
    CHECK(matrices == 1000);
}

int main(void)
{
    check_sees_failure();
    RUN(pieces_cover_the_product_once);
    RUN(a_matrix_with_a_short_side_is_not_cut);
    RUN(pieces_of_one_size_up_to_a_tile);
    RUN(small_matrices_of_a_batch_go_together);
    return check_end();
}
