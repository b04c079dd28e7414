/* checks.h - whether an invariant of a structure of the core holds: ZBP_OK, or ZBP_EINVAL with *reason_out (may be
 * NULL) a static string that says what is wrong. */
#pragma once

#include "core/base/zbp_map.h"
#include "core/graph/zbp_graph.h"
#include "core/graph/zbp_plan.h"
#include "instruments/core/zbp_blocks.h"
#include "instruments/core/zbp_record.h"
#include "core/pass/zbp_book.h"
#include "core/pass/zbp_layout.h"

ZBP_MUST_USE int zbp_map_check(const zbp_map *map, const char **reason_out);
ZBP_MUST_USE int zbp_graph_check(const zbp_graph *graph, const char **reason_out);
/* Whether the plan is the plan of this graph: derives every definition of zbp_plan.h anew, by other means than
 * zbp_plan_build, and compares. Stands any content of the arrays and counts, as long as the arrays are as long as they
 * were built. *reason_out begins with the name of the wrong field; ZBP_ENOMEM, *reason_out NULL. Linear time and
 * scratch memory. */
ZBP_MUST_USE int zbp_plan_check(const zbp_plan *plan, const zbp_graph *graph,
                                const char **reason_out);
ZBP_MUST_USE int zbp_layout_check(const zbp_layout *layout, const char **reason_out);
/* Between two calls of W. */
ZBP_MUST_USE int zbp_book_check(const zbp_book *book, const zbp_layout *layout,
                                const char **reason_out);
ZBP_MUST_USE int zbp_blocks_check(const zbp_blocks *blocks, const char **reason_out);
ZBP_MUST_USE int zbp_record_check(const zbp_record *record, const char **reason_out);
/* And the table's and each fed record's own; nobody feeds it meanwhile. Quadratic in the blocks in use. */
ZBP_MUST_USE int zbp_tally_check(const zbp_tally *tally, const char **reason_out);
