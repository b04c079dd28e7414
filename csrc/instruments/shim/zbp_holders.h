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

/* Adds the type Handle and the function that gives handles; the functions that look at storages.
 * Returns 0, or -1 with a Python error set. */
int zbp_add_handle(PyObject *module);
int zbp_add_storages(PyObject *module);

/* New list of (held, label, is_native): what a handle's thing holds natively; or what a saved
 * tensor, a DLPack capsule or, if group is its group, a ParamGroup holds besides its referents.
 * held: a handle or a Python object, None for something that could not be looked at. label: how
 * it is held, or what that is. is_native: it is a reference to libtorch's object. passes_run: a
 * pass of zbpipe runs on another thread. */
PyObject *zbp_references_of(PyObject *thing, const zbp_group *group, bool passes_run,
                            zbp_error *error);

ZBP_END_C
