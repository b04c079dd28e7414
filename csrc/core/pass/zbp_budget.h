/* zbp_budget.h - what a weight task may hold from I to W, where the caller has said how many bytes may wait.
 *
 * No allocation; a zbp_most is its caller's, one thread at a time.
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

/* The most of what rises and falls to 0 again. What was once so much, as in a step unlike the others, is forgotten:
 * after ZBP_MOST_PERIODS falls to 0 at the earliest, after twice as many at the latest. Zeroed: nothing was seen. */
enum { ZBP_MOST_PERIODS = 256 };

typedef struct zbp_most {
    uint64_t now, before; /* since the last ZBP_MOST_PERIODS began, and in those before */
    uint32_t periods;     /* that have ended since */
} zbp_most;

void zbp_most_see(zbp_most *most, uint64_t value);
uint64_t zbp_most_of(const zbp_most *most);

#ifdef __cplusplus
}
#endif

#endif
