/* fake_shim.h - in the shim's place: groups whose gradients are counts, and a world that can go wrong.
 *
 * A gradient is how often each face is in it. So what a weight should have got can be counted, whatever the
 * way it took. Each touch of the world (an addition, a hook, a node that runs) can be made to fail. What no W
 * may do ends the program.
 */
#pragma once

#include "shim/weight/zbp_weight.h"

enum { MOST_WEIGHTS = 4, MOST_OUTSIDE = 3, MOST_TASKS = 4, MOST_FACES = 8, MOST_HELD = 4 };

typedef struct fake_gradient {
    int of[MOST_FACES];
} fake_gradient;

/* Groups may have a weight in common: then its state is the same in each, and what was added is counted per group. */
typedef struct fake_weight {
    struct fake_weight *same; /* in the next group that has it, round in a ring; NULL: no other */
    struct fake_group *of;
    const void *key;     /* NULL: its own address */
    fake_gradient total; /* of all that was ever added */
    fake_gradient waiting;
    uint8_t seen; /* ZBP_WEIGHT_* */
    bool was_frozen;
    bool was_alone;   /* when it was last added to, */
    long added_in;    /* which was in this call */
    int hooks_called; /* of this weight pass, by calls that returned */
} fake_weight;

typedef struct fake_face {
    bool is_hooked; /* the path behind it */
    bool is_gone;   /* what I kept for it */
} fake_face;

typedef struct fake_outside {
    bool saves; /* it cannot run again once it was released */
    bool is_spent;
} fake_outside;

/* Begins as C knows it. */
typedef struct fake_group {
    zbp_group as;
    fake_weight weight[MOST_WEIGHTS];
    fake_gradient owed[MOST_WEIGHTS]; /* in one weight pass; of the layout as it was made */
    fake_face face[MOST_FACES];
    fake_outside outside[MOST_OUTSIDE];
    bool is_released;
    int rounds;      /* weight passes that are complete */
    long call;       /* the last one that has it, */
    size_t position; /* at this place */
} fake_group;

typedef struct fake_world {
    uint64_t random;
    long touches, fail_at; /* -1: none fails */
    long call, runs;
    fake_group *const *held; /* the call's groups */
    size_t held_count;
    bool retain;
    void (*look)(void); /* what a user's code does while the weights are looked at; may be NULL */
} fake_world;

extern _Thread_local fake_world fake;

/* What zbp_error.raised points to. */
extern const char FAKE_FAILED[], FAKE_TWICE[];

uint32_t fake_random(uint32_t below);

/* Once the layout is complete: counts what the weights are owed, and opens the book. */
void fake_open(fake_group *held);
/* From now on both are one weight, with what the first one has. */
void fake_share(fake_weight *weight, fake_weight *with);
void fake_mark(fake_weight *weight, uint8_t seen); /* sets ZBP_WEIGHT_* */

/* A call of W for the `count` groups, whose books are in nobody else's hands. */
int fake_call(fake_group *const *held, size_t count, zbp_how how, zbp_error *error);

void fake_add(fake_gradient *to, const fake_gradient *what, int times);

/* Ends the program. */
void fake_violation(const char *what);
