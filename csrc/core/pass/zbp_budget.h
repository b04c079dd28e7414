/* zbp_budget.h - what a weight task may hold from I to W, where the caller has said how many bytes may wait.
 *
 * Pure: no state, no allocation.
 */
#ifndef ZBP_BUDGET_H
#define ZBP_BUDGET_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How a task comes by its weights' gradients. */
enum {
    ZBP_HOLD_KEPT,     /* W computes them, from tensors that are kept */
    ZBP_HOLD_PACKED,   /* likewise, but for what lies packed until W unpacks it */
    ZBP_HOLD_COMPUTED, /* I computes them, and they are kept */
    ZBP_HOLD_COUNT
};

/* The bytes of a way that cannot be gone, or has not been weighed. */
#define ZBP_NO_WAY UINT64_MAX

/* What a task would hold that nothing else holds. */
typedef struct zbp_demand {
    uint64_t bytes[ZBP_HOLD_COUNT]; /* ZBP_NO_WAY; of all three: it is kept */
    uint8_t asked;                  /* what the policy asks for, were there no budget */
} zbp_demand;

/* A ZBP_HOLD_*: what is asked for, if no more than `room` bytes are; else the way of the fewest bytes, whether
 * they fit or not, for a gradient must not be lost; of equal ones the first. */
uint8_t zbp_hold_within(uint64_t room, const zbp_demand *demand);

#ifdef __cplusplus
}
#endif

#endif
