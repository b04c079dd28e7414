/* searching.h - what the searches through all that lives share: csrc/holders needs its roots, and no collection.
 *
 * roots: a list of tuples (object, None or a list of what it holds besides its referents).
 */
#ifndef ZBP_SEARCHING_H
#define ZBP_SEARCHING_H

#include <Python.h>

#include "holders/zbp_search.h"
#include "holders/zbp_storages.h"
#include "shim/holders/zbp_looks.h"

/* Returns 0, or -1 with a TypeError set. */
int zbp_check_roots(PyObject *roots);

/* The roots, and what they hold; the list itself is not looked at. A status. */
ZBP_MUST_USE int zbp_add_roots(zbp_explore *explore, PyObject *roots);

/* Raises what a function of csrc/holders returned: what is in *error, or that memory has run out. Always NULL. */
PyObject *zbp_raise_status(int status, zbp_error *error);

zbp_group_access zbp_access_of(PyObject *module);

/* New dict: see search_holders(). NULL with an error set. */
PyObject *zbp_describe_search(zbp_search *search, bool wraps);

/* The storages in what storages_now() returned, or NULL with an error set. Borrowed. */
zbp_storages *zbp_storages_in(PyObject *capsule);

#endif
