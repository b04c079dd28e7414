/* zbp_layout.h - a parameter group as numbers: its weights, its tasks with their faces, and the
 * nodes between the faces and the weights.
 *
 * The shim keeps nodes, edges and tensors in arrays of its own, by the same indices. A layout knows
 * no tensor and decides nothing; what has been added of it is the book's (zbp_book.h).
 *
 * Allocation: three arrays that grow. Threads: one writer, or any number of readers.
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_c.h"

ZBP_BEGIN_C

/* What a weight task is. The words stand in zbpipe/_tasks.py, in this order. */
enum {
    ZBP_TASK_PRODUCT,  /* W multiplies the output gradient with the other factor */
    ZBP_TASK_DEFERRED, /* W runs the node again with the edges towards the weights alone */
    /* I ran the node with all its edges; W starts from the gradients that it gave */
    ZBP_TASK_WHOLE,
    ZBP_TASK_ROOT /* a stage output outside the input closure: W starts there */
};

/* Why no path leads from a face to a weight. */
enum {
    ZBP_OBSTACLE_NONE, /* one does, or the face ends at the weight */
    ZBP_OBSTACLE_NODE, /* a node on the way is no plain step, or is watched */
    ZBP_OBSTACLE_CAST, /* a second cast would round what the first one has left */
    ZBP_OBSTACLE_SUM   /* several gradients meet on the way, and are to be added there */
};

/* One edge of a task towards the weights. It leads to a weight or to an outside node. A face with a
 * path has both: from the node to the weight lead plain steps alone, which lay the gradient out
 * anew or cast it. */
typedef struct zbp_face {
    uint32_t task;
    uint32_t slot;      /* position among the node's edges */
    int32_t weight;     /* where it ends, at once or by a path; -1 where it does not */
    int32_t outside;    /* the node outside the closure that it leads to; -1 for a weight */
    bool is_viewed;     /* its path does more than to transpose matrices and cast them */
    bool is_transposed; /* it does no more, and transposes them */
    uint8_t steps;      /* plain steps behind it: its path, if it has one */
    uint8_t obstacle;   /* ZBP_OBSTACLE_* */
} zbp_face;

typedef struct zbp_task {
    uint32_t face_begin, face_end;
    uint64_t sequence_nr; /* tasks run from the highest to the lowest */
    uint8_t kind;         /* ZBP_TASK_* */
    uint8_t why;          /* it is of that kind: ZBP_WHY_* (zbp_kind.h) */
    uint8_t takes_work; /* of which weights a Function's backward may hand work over: ZBP_DEFER_* */
    bool leaves_packed; /* W unpacks what is saved behind hooks, within a run of the engine */
    bool has_work;      /* a Function has handed work over, which W runs in the engine */
} zbp_task;

/* An edge of an outside node that W follows. It leads to another outside node or to a weight; the
 * number of the other is -1. */
typedef struct zbp_hop {
    uint32_t outside; /* whose edge it is */
    uint32_t slot;
    int32_t to_outside;
    int32_t to_weight;
} zbp_hop;

/* Held by the caller, who sets outside_count and weight_count. Zeroed is a legal empty layout. */
typedef struct zbp_layout {
    zbp_task *task;
    zbp_face *face; /* those of a task lie together, in the order of their slots */
    zbp_hop *hop;
    uint32_t task_count, face_count, hop_count, outside_count, weight_count;
    uint32_t task_capacity, face_capacity, hop_capacity;
} zbp_layout;

void zbp_layout_fini(zbp_layout *layout); /* zeroes it; a zeroed one is legal */

/* Adds a task without faces, number task_count - 1 afterwards. ZBP_ENOMEM. */
ZBP_MUST_USE int zbp_layout_add_task(zbp_layout *layout, uint8_t kind, uint64_t sequence_nr);

/* Adds a face to the last task; `face.task` is set here. ZBP_ENOMEM. */
ZBP_MUST_USE int zbp_layout_add_face(zbp_layout *layout, zbp_face face);
/* The same errors. */
ZBP_MUST_USE int zbp_layout_add_hop(zbp_layout *layout, zbp_hop hop);

/* The task's face that is this edge of its node, counted from its first; -1 if none is. */
int32_t zbp_layout_face_at(const zbp_layout *layout, uint32_t task, uint32_t slot);

bool zbp_layout_has_path(const zbp_face *face);
/* The face leads to the first node of its path again and no more to the weight. Without a path it
 * stays as it is. */
void zbp_layout_give_up_path(zbp_layout *layout, uint32_t face);

ZBP_END_C
