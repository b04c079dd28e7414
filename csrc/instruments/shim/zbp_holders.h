/* zbp_holders.h - what is libtorch's, for a search that is written in Python
 * (zbpipe/leaks/_heap.py).
 *
 * Note [Handles]
 *
 * A tensor, a storage or a node need not have a Python object, and to make one changes who owns it.
 * A handle is a small Python object that owns one of them and stands for nothing. There is one
 * handle per thing at a time, so that handles are compared as addresses are. A handle shows its
 * thing's Python object, if there is one, and counts references to both without its own.
 *
 * Nothing is unpacked, no hook is run and no Python code. Other threads may change what is looked
 * at: a thing is owned before it is looked at, a node's saved tensors and a leaf's gradient are
 * read under the locks that the engine takes. Edges and hooks, which I changes, are not read while
 * a pass runs on another thread. What is not read is said to be unseen.
 *
 * All functions: with the GIL. "new" is a new reference, NULL where *error says what was raised.
 */
#pragma once

#include <Python.h>

#include "core/base/zbp_c.h"
#include "shim/input/zbp_input.h"
#include "shim/torch/zbp_error.h"

ZBP_BEGIN_C

/* Adds the type Handle. Returns 0, or -1 with a Python error set. */
int zbp_add_handle(PyObject *module);

/* New handle of the tensor, storage or node that a Python object stands for; None for any other
 * object. */
PyObject *zbp_handle_of(PyObject *object, zbp_error *error);

/* New list of (held, label, is_native): what a handle's thing holds natively; or what a saved
 * tensor, a DLPack capsule or, if group is its group, a ParamGroup holds besides its referents.
 * held: a handle or a Python object, None for something that could not be looked at. label: how
 * it is held, or what that is. is_native: it is a reference to libtorch's object. passes_run: a
 * pass of zbpipe runs on another thread. */
PyObject *zbp_references_of(PyObject *thing, const zbp_group *group, bool passes_run,
                            zbp_error *error);

/* New capsule that keeps the identities of the storages of handles from being given to others,
 * but not their memory; and sees to it that their growth is seen (zbp_tap_adopt_storage). */
PyObject *zbp_watch_storages(PyObject *handles, zbp_error *error);
/* New set of the identities of those that were freed since. */
PyObject *zbp_storages_gone(PyObject *watched, zbp_error *error);
/* New list of (device, address, bytes, identity) of the others. */
PyObject *zbp_storage_spans(PyObject *watched, zbp_error *error);

/* New set of the identities (ints) of the storages of `tensors`, a sequence, and of the tensors
 * that sparse, nested and quantized ones are made of; what is no tensor adds nothing. Likewise,
 * the addresses of their memory. */
PyObject *zbp_storages_of(PyObject *tensors, zbp_error *error);
PyObject *zbp_addresses_of(PyObject *tensors, zbp_error *error);

ZBP_END_C
