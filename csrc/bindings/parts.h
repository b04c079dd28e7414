/* parts.h - the parts of the extension module, each in a file of its own.
 *
 * Each zbp_add_*(module) adds what its part offers to the module. Returns 0, or -1 with a Python error set.
 */
#ifndef ZBP_PARTS_H
#define ZBP_PARTS_H

#include <Python.h>

#include "shim/pass/zbp_input.h"
#include "shim/torch/zbp_raise.h"

/* What a function of the shim returned, or NULL with what it raised as the Python error. */
static inline PyObject *zbp_or_raise(PyObject *object, zbp_error *error)
{
    return object != NULL ? object : zbp_error_raise(error);
}

/* Raises it. Always -1. */
static inline int zbp_fail(zbp_error *error)
{
    zbp_error_raise(error);
    return -1;
}

int zbp_add_describe(PyObject *module);
int zbp_add_holders(PyObject *module);
int zbp_add_leaks(PyObject *module);
int zbp_add_memory(PyObject *module);
int zbp_add_passes(PyObject *module);
int zbp_add_release(PyObject *module);
int zbp_add_work(PyObject *module);

/* A zbpipe.Policy, for I: its words as numbers. Returns 0, or -1 with an error set. */
int zbp_read_policy(PyObject *policy, zbp_policy *out);
/* Its choice that is True or False. Returns 0, or -1 with an error set. */
int zbp_read_flag(PyObject *policy, const char *name, bool *out);

/* Appends value, which it steals and which may be NULL with an error set. Returns 0, or -1 with an error set. */
int zbp_append_new(PyObject *list, PyObject *value);

/* New list with a tuple (name, kind, why, is_packed, faces, tensors) per task. A spent group has none.
 *
 * name: its node's; None for "waiting". kind: "product", "deferred", "whole" or "root"; "handed over" for a whole node
 * whose Function has left work to W; "outside" for a node between the tasks and the weights, which W runs and which has
 * saved something; "waiting" for a weight to which a W that raised could not add its gradient. why: it is of that kind,
 * zbp_why_name(). is_packed: W unpacks something for it.
 *
 * faces: a list of (slot, shape, way, weights). slot: the node's edge. shape: of the gradient there, zbp_face_shape().
 * way: what makes W run the engine from there to the weights, None if nothing does. weights: those it leads to, a list.
 *
 * tensors: those that W will read, a list of tuples (role, storage, bytes, shape, dtype, device, weights). role:
 * "matrix", "output gradient", "light gradient" (of a vector, computed in I), "kept gradient" (of a matrix, likewise),
 * "saved" (by the node, or what work was given) or "waiting gradient". storage: an int, the same for tensors that share
 * memory, 0 where there is none; bytes: of the whole storage. weights: the leaf tensors whose gradients are computed
 * from it, a list. NULL with an error set, while the group's W runs RuntimeError. */
PyObject *zbp_describe_group(zbp_group *group);
/* New tuple of the leaf tensors that the group serves, empty once it is spent. NULL with an error set, while its W runs
 * RuntimeError. */
PyObject *zbp_weights_wrap(zbp_group *group);

/* Adds the type ParamGroup. New reference, or NULL with an error set. */
PyTypeObject *zbp_add_group(PyObject *module);

/* A new ParamGroup. Steals group; frees it on an error. */
PyObject *zbp_group_wrap(PyTypeObject *type, zbp_group *group);

/* The group in a ParamGroup. Precondition: object is one. Borrowed from it. */
zbp_group *zbp_group_in(PyObject *object);

/* Of zbpipe._C; both are owned by it. */
typedef struct zbp_module_state {
    PyTypeObject *group_type;
    PyObject *run_error;
} zbp_module_state;

zbp_module_state *zbp_state_of(PyObject *module);

/* The type ParamGroup of zbpipe._C, borrowed. Cannot fail. */
PyTypeObject *zbp_group_type(PyObject *module);

/* What a backward that failed raises. Borrowed. Cannot fail. */
PyObject *zbp_run_error(PyObject *module);

#endif
