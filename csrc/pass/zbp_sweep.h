/* zbp_sweep.h - W of several microbatches: the products for one weight, in one sweep over its gradient.
 *
 * Note [Sweeps]
 * Groups of several microbatches that are given together have the same weights. Added one after the other,
 * their products read and write each gradient once per group; in a sweep they are added panel by panel,
 * and each panel's in the order of the groups: once in all. Every element gets its additions in the order
 * that it would have had, so no bit differs.
 *
 * When a group is about to be added directly, the products that it alone owes to a weight are added together
 * with those of the groups behind it, as long as each of these owes the weight nothing but one product; the
 * first group for which that is not so ends the sweep, since what it adds comes before what follows. Their
 * faces are then delivered, and each group's own turn adds what is left of it. A sweep that raises leaves in
 * each face's book how many panels are in: some products have one more than others. Together or one by one,
 * they go on from there.
 *
 * A weight without a gradient is not swept: the first product becomes its gradient, in the first group's
 * turn, and the sweep begins with the next one's.
 */
#ifndef ZBP_SWEEP_H
#define ZBP_SWEEP_H

#include "pass/zbp_pass.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which groups of a call share weights; owned by the caller, borrows the turns. */
typedef struct zbp_sweeps zbp_sweeps;

/* *sweeps_out: NULL where no two groups share a weight. ZBP_ENOMEM, ZBP_EOVERFLOW. */
ZBP_MUST_USE int zbp_sweeps_new(const zbp_turn *turn, size_t count, zbp_sweeps **sweeps_out);
void zbp_sweeps_free(zbp_sweeps *sweeps); /* NULL is legal */

/* Before this turn's group, whose way is ZBP_WAY_DIRECT, is added: adds what can be swept together with it. NULL is
 * legal. After an error the books say what was added. */
ZBP_MUST_USE int zbp_sweep(zbp_sweeps *sweeps, size_t turn, zbp_how how, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
