#include "core/pass/zbp_panels.h"

static int64_t most(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

zbp_panels zbp_panels_of(int64_t batches, int64_t rows, int64_t columns)
{
    const int64_t size = most(1, rows * columns);
    const int64_t step = most(1, (int64_t)ZBP_PANEL * ZBP_PANEL / size);

    return (zbp_panels){.batches = batches,
                        .rows = rows,
                        .columns = columns,
                        .step = least(step, most(1, batches))};
}

/* How many panels a matrix is cut into, along its longer side. */
static int64_t count_panels(const zbp_panels *panels)
{
    const int64_t size = most(panels->rows, panels->columns);

    if (least(panels->rows, panels->columns) < ZBP_NARROWEST)
        return 1;
    return (size + ZBP_PANEL - 1) / ZBP_PANEL;
}

int64_t zbp_panels_count(const zbp_panels *panels)
{
    const int64_t steps = (panels->batches + panels->step - 1) / panels->step;

    return panels->step == 1
               ? steps * count_panels(panels)
               : steps - 1 + (panels->batches % panels->step == 1 ? count_panels(panels) : 1);
}

bool zbp_panels_next(zbp_panels *panels, zbp_panel *out)
{
    const bool by_rows = panels->rows >= panels->columns;
    const int64_t size = by_rows ? panels->rows : panels->columns;
    const int64_t batch_count = least(panels->step, panels->batches - panels->batch);
    const int64_t count = batch_count == 1 ? count_panels(panels) : 1;
    const int64_t tiles = size / ZBP_TILE;
    int64_t end = size;

    if (panels->batch >= panels->batches)
        return false;
    /* Of the same size up to a tile: BLAS computes a few rows in another way than many. */
    if (panels->panel + 1 < count)
        end = panels->row + (tiles / count + (panels->panel < tiles % count ? 1 : 0)) * ZBP_TILE;
    *out = (zbp_panel){.batch = panels->batch,
                       .batch_count = batch_count,
                       .begin = panels->row,
                       .count = end - panels->row,
                       .by_rows = by_rows,
                       .is_cut = count > 1};
    panels->row = end;
    if (++panels->panel == count) {
        panels->panel = 0;
        panels->row = 0;
        panels->batch += batch_count;
    }
    return true;
}
