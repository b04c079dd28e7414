/* zbp_describe.h - a parameter group from outside: its state, its end, and what W will do and read, one task, face or
 * tensor at a time. Who looks decides what that means (bindings/describe.c). Conventions: zbp_input.h. Indices are
 * those of the group's layout, and in range. But for its state and its end, no W of the group runs meanwhile. Nothing
 * is unpacked, and nothing but the weights can be kept alive.
 */
#ifndef ZBP_DESCRIBE_H
#define ZBP_DESCRIBE_H

#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_status.h"
#include "core/pass/zbp_group.h"
#include "shim/torch/zbp_error.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ZBP_GROUP_READY, ZBP_GROUP_RUNNING, ZBP_GROUP_SPENT };

int zbp_group_state(const zbp_group *group); /* ZBP_GROUP_*; never fails, looks at a flag */
void zbp_group_free(zbp_group *group);       /* NULL is legal; frees all that W would have needed */

/* *out: bytes of the tensors held for W, each storage once; 0 while W runs. */
ZBP_MUST_USE int zbp_group_bytes_held(const zbp_group *group, size_t *out, zbp_error *error);

/* New tuple of the group's leaf tensors. */
PyObject *zbp_group_weights(zbp_group *group, zbp_error *error);

/* New: the name of a task's autograd node. */
PyObject *zbp_task_name(zbp_group *group, uint32_t task, zbp_error *error);
/* Its Function has left work to W. */
bool zbp_task_has_work(zbp_group *group, uint32_t task);

/* New tuple of ints: the shape of the gradient at a face, -1 where it is not known as a number; () for a nested one. */
PyObject *zbp_face_shape(zbp_group *group, uint32_t face, zbp_error *error);
/* New: the name of the node behind the face's plain steps. *watched_out: it has hooks. */
PyObject *zbp_face_end(zbp_group *group, uint32_t face, bool *watched_out, zbp_error *error);

/* What a tensor that W reads is to its task. */
enum {
    ZBP_PART_MATRIX,      /* multiplied with the output gradient, for the edge number `place` */
    ZBP_PART_OUTPUT_GRAD, /* of the node */
    ZBP_PART_KEPT,        /* the gradient that I computed for the task's face number `place` */
    ZBP_PART_SAVED,       /* by the node */
    ZBP_PART_WORK_SAVED,  /* what work was given that computes the gradients of `faces` */
    ZBP_PART_WORK_GRAD,   /* and what it has computed */
    ZBP_PART_WAITING      /* of no task: a weight's gradient that a W which raised could not add */
};

typedef struct zbp_held_tensor {
    uint8_t part; /* ZBP_PART_* */
    uint32_t place;
    const int32_t *faces; /* of work: numbers within the task, -1 where nobody wants the gradient */
    size_t face_count;
    int64_t dims;
    const void
        *storage;    /* the same for tensors that share memory, NULL for one without a storage */
    size_t bytes;    /* of the whole storage */
    PyObject *shape; /* tuple of ints, as zbp_face_shape() */
    PyObject *dtype, *device;
} zbp_held_tensor;

/* Is told of a tensor, all of which is borrowed until it returns: 0, or -1 with a Python error set, which ends the
 * call. */
typedef int (*zbp_tensor_visit)(void *arg, const zbp_held_tensor *tensor);

/* Those that W reads for a task; of a weight, the gradient that waits, if one does. */
ZBP_MUST_USE int zbp_task_tensors(zbp_group *group, uint32_t task, zbp_tensor_visit visit,
                                  void *arg, zbp_error *error);
ZBP_MUST_USE int zbp_weight_waiting(zbp_group *group, uint32_t weight, zbp_tensor_visit visit,
                                    void *arg, zbp_error *error);

/* New: the name of a node between the tasks and the weights; None where it saves nothing. *packed_out: it has saved
 * something behind hooks. */
PyObject *zbp_outside_name(zbp_group *group, uint32_t outside, bool *packed_out, zbp_error *error);
/* What it has saved and W will read; not what lies behind hooks, which nobody can see without running them, nor while
 * a thread runs the node, which may be another microbatch's too. */
ZBP_MUST_USE int zbp_outside_tensors(zbp_group *group, uint32_t outside, zbp_tensor_visit visit,
                                     void *arg, zbp_error *error);

/* *out: 1 if the group's W may read weights themselves, or what has their memory, beside what it holds: it runs nodes
 * again, or ones between its tasks and the weights, or unpacks what was saved. 0 otherwise, and for a spent group. */
ZBP_MUST_USE int zbp_group_reads_weights(const zbp_group *group, int *out, zbp_error *error);

/* *out: 1 if hooks watch the accumulation of `tensor`: its own, its accumulator's, as those of DDP. */
ZBP_MUST_USE int zbp_is_watched(PyObject *tensor, int *out, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
