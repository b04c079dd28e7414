/* fake_shim.h - in the shim's place: groups whose gradients are counts, and a world that can go wrong.
 *
 * Every face has a few panels of its own (one, or for a product PANELS), and a gradient is how often each
 * panel is in it. So what a weight should have got can be counted, whatever the way it took. Each touch of
 * the world (an addition, a hook, a node that runs) can be made to fail.
 */
#ifndef FAKE_SHIM_H
#define FAKE_SHIM_H

#include "pass/zbp_pass.h"

enum { MOST_WEIGHTS = 4, MOST_OUTSIDE = 3, MOST_TASKS = 4, MOST_FACES = 8, PANELS = 3 };

typedef struct fake_gradient {
    int of[MOST_FACES][PANELS];
} fake_gradient;

/* Groups may have a weight in common: then its state is the same in each, and what was added is counted per group. */
typedef struct fake_weight {
    struct fake_weight *same; /* in the next group that has it, round in a ring; NULL: no other */
    const void *key;          /* NULL: its own address */
    bool has_grad, forbids_products; /* its .grad */
    bool is_cast; /* its dtype is another than the product's: nothing is added in one operation */
    uint64_t sum; /* the identity of that */
    fake_gradient grad;
    fake_gradient total; /* of all that was ever added, in whichever .grad */
    fake_gradient waiting;
    uint8_t seen; /* ZBP_WEIGHT_* */
    bool was_frozen;
    int hooks_called; /* of this weight pass, by calls that returned */
} fake_weight;

/* What a face's gradient is: W multiplies or computes it, or I computed and kept it. */
typedef enum fake_kind { FAKE_PRODUCT, FAKE_COMPUTED, FAKE_KEPT, FAKE_GONE } fake_kind;

typedef struct fake_face {
    fake_kind kind;
    bool is_hooked;
    bool goes_alone; /* its product is laid out as no other */
} fake_face;

typedef struct fake_outside {
    bool saves; /* it cannot run again once it was released */
    bool is_spent;
} fake_outside;

struct zbp_held {
    zbp_layout layout;
    zbp_book book;
    fake_weight weight[MOST_WEIGHTS];
    fake_gradient owed[MOST_WEIGHTS]; /* in one weight pass; of the layout as it was made */
    fake_face face[MOST_FACES];
    fake_outside outside[MOST_OUTSIDE];
    bool is_released;
    int rounds;            /* weight passes that are complete */
    bool was_dropped_half; /* with a product of which some panels had been added */
};

typedef struct fake_world {
    uint64_t random;
    long touches, fail_at; /* -1: none fails */
    struct {
        const zbp_held *held;
        int64_t panel;
    } order[64]; /* the panels that were added, the first ones */
    uint32_t order_count;
    long joins;             /* so often the caller's streams have waited for a group's */
    uint64_t sums;          /* identities given away */
    void (*surprise)(void); /* what a user's code that runs within a touch does; may be NULL */
    void (*look)(void);     /* likewise, while the weights are looked at */
} fake_world;

extern _Thread_local fake_world fake;

/* What zbp_error.raised points to. */
extern const char FAKE_FAILED[], FAKE_HALF[], FAKE_TWICE[], FAKE_LOST[];

uint32_t fake_random(uint32_t below);

/* From now on both are one weight, with what the first one has. */
void fake_share(fake_weight *weight, fake_weight *with);
/* Its .grad is another tensor, of zeros, or none. */
void fake_replace_gradient(fake_weight *weight, bool has_grad);
void fake_mark(fake_weight *weight, uint8_t seen); /* sets ZBP_WEIGHT_* */

/* Counts what the weights are owed, once the layout is complete. */
void fake_count_owed(zbp_held *held);
void fake_add(fake_gradient *to, const fake_gradient *what);
/* Whether no face is in it by some of its panels alone. */
bool fake_is_whole(const zbp_held *held, const fake_gradient *gradient);

/* Ends the program. */
void fake_violation(const char *what);

#endif
