/* zbp_looks.h - what a search for holders (csrc/holders) has found, as Python objects; and what it needs of Python to
 * begin. All functions: with the GIL. "new" is a new reference, NULL where *error says what was raised.
 */
#ifndef ZBP_LOOKS_H
#define ZBP_LOOKS_H

#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shim/holders/zbp_things.h"
#include "shim/input/zbp_input.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What of the bindings a search must know. */
typedef struct zbp_group_access {
    PyTypeObject *type; /* of ParamGroup; borrowed, alive as long as the call */
    zbp_group *(*get)(PyObject *group);
} zbp_group_access;

/* work: torch.distributed's Work, array: numpy.ndarray, or NULL; both outlive *things_out. */
ZBP_MUST_USE int zbp_things_new(zbp_group_access groups, PyTypeObject *work, PyTypeObject *array,
                                zbp_things **things_out, zbp_error *error);

/* New dict of what could not be looked at, and how often. */
PyObject *zbp_things_unseen(const zbp_things *things, zbp_error *error);

/* New: the Python object of a thing, None where it has none. */
PyObject *zbp_look_object(uint8_t thing, const void *key, zbp_error *error);

/* New: what it is, for what is not Python's; else "". A tensor as "float32 [2, 3]", a node by its name. */
PyObject *zbp_look_name(uint8_t thing, const void *key, zbp_error *error);

/* New tuple (shape, dtype, object or None, bytes that it uses, 0 where unknown). wraps: an object is made where there
 * is none. */
PyObject *zbp_look_tensor(const void *tensor, bool wraps, zbp_error *error);

/* New: the name of its torch.device. */
PyObject *zbp_look_device_name(const zbp_memory *memory, zbp_error *error);

/* New set of the identities (ints) of the storages of `tensors`, a sequence, and of the tensors that sparse, nested
 * and quantized ones are made of; what is no tensor adds nothing. */
PyObject *zbp_storages_of(PyObject *tensors, zbp_error *error);

/* Likewise, the addresses of their memory. */
PyObject *zbp_addresses_of(PyObject *tensors, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
