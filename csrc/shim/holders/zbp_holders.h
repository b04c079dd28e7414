/* zbp_holders.h - who holds a tensor's memory: a search through all that lives, Python objects and
 * libtorch's alike.
 *
 * Note [How holders are searched]
 *
 * The search looks at one graph: Python objects (by their types' tp_traverse), tensors, storages,
 * autograd nodes and parameter groups, with an edge for each reference. A tensor, a node or a storage
 * is one vertex, whatever stands for it in Python. It goes breadth first from the roots (modules, the
 * frames of all threads), so the way back from a vertex is a shortest chain of holders.
 *
 * What the roots do not reach is looked at as Python's collector does: a reference that is counted and
 * that no edge explains comes from where nobody can look (a C++ variable, a C stack, a library's
 * table), and makes its vertex a root of the second rank. What these do not reach either is garbage,
 * and the cycle that keeps it is searched.
 *
 * Nothing is unpacked, no hook is run, no node is wrapped, no Python code runs during the search: it
 * sees one moment, as far as threads that need the GIL go. Others (a backward, another pass of zbpipe's) may free
 * and change what is libtorch's meanwhile: what is met is owned until the search ends, a node's saved tensors and a
 * leaf's gradient are read under the locks that the engine takes, edges and hooks under our own passes'. What is
 * locked is said to be unseen.
 *
 * Linear in the objects, references and nodes that live. All functions: with the GIL.
 */
#ifndef ZBP_HOLDERS_H
#define ZBP_HOLDERS_H

#include <Python.h>
#include <stdint.h>

#include "shim/pass/zbp_shim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What of the bindings the search must know. */
typedef struct zbp_group_access {
    PyTypeObject *type; /* of ParamGroup; borrowed, alive as long as the call */
    const zbp_group *(*get)(PyObject *group);
} zbp_group_access;

/* The storages of a moment, each referred to weakly: the memory itself is not kept. */
typedef struct zbp_storages zbp_storages;

/* Also sees to it that the growth of these storages is seen (zbp_tap_adopt).
 * The storages of all tensors that the collector lists, and of what these reach through autograd. With
 * roots (a list as zbp_search's, else empty) of all that the roots reach, too: where an application
 * has frozen what lived, the collector's list lacks it.
 * *storages_out: new. */
ZBP_MUST_USE int zbp_storages_new(zbp_group_access groups, PyObject *roots,
                                  zbp_storages **storages_out, zbp_error *error);
void zbp_storages_free(zbp_storages *storages);

/* New set of the identities (ints) of those that have been freed since. */
PyObject *zbp_storages_gone(const zbp_storages *storages, zbp_error *error);

/* New list of (device, address, bytes, identity) of those that still live. */
PyObject *zbp_storages_spans(const zbp_storages *storages, zbp_error *error);

/* *count_out: how many storages with memory there are now that are not among `older` and that the
 * tap (zbp_tap.h) does not know. */
ZBP_MUST_USE int zbp_storages_since(zbp_group_access groups, PyObject *roots,
                                    const zbp_storages *older, size_t *count_out, zbp_error *error);

/* New set of the identities (ints) of the storages of `tensors`, a sequence, and of the tensors that sparse, nested
 * and quantized ones are made of; what is no tensor adds nothing. */
PyObject *zbp_storages_of(PyObject *tensors, zbp_error *error);

/* Likewise, the addresses of their memory. */
PyObject *zbp_addresses_of(PyObject *tensors, zbp_error *error);

typedef struct zbp_search {
    zbp_group_access groups;
    PyObject *roots; /* list of (object, None or a list of what it holds besides its referents) */
    PyObject
        *ignored; /* list of objects that are not looked at; the list and the roots are not, too */
    PyObject *call; /* the caller's arguments, which refer to the target; not looked at */
    PyObject
        *target; /* a tensor whose storage alone is searched for; or NULL: all that were born */
    PyTypeObject *work;  /* torch.distributed's Work, or NULL */
    PyTypeObject *array; /* numpy.ndarray, or NULL */
    PyObject *allowed;   /* set of identities of storages that are not searched for */
    int wraps;           /* make a Python object for each tensor that is found and has none */
    uint64_t since;      /* without a target: CPU blocks from this serial on, zbp_tap_serial() */
    uint64_t until; /* and before this one: what other threads have made since is nobody's leak */
    const zbp_storages *older; /* or NULL. Others' memory was born since if it is not among these */
} zbp_search;

/* New dict:
 *
 *   "leaks": list of (storage, bytes, device, address, tensors, chain, rank, others, unseen)
 *       storage: its identity, 0 for a block that nothing visible holds. tensors: list of (shape,
 *       dtype, object or None, bytes that it uses, 0 where unknown) with a tuple per tensor on it, that of the chain
 *       first. chain: list of steps from the outermost holder to a tensor. rank: "root", "hidden" (the chain begins
 *       with something that is held from where nobody can look), "cycle" (garbage) or "none". others: references to
 *       its tensors besides the chain's. unseen: references to the storage and its tensors that no edge explains.
 *   "cycles": list of (steps, list of storages): each cycle that garbage hangs on.
 *   "works": list of chains (as above) to the works that the roots reach: what these hold they do not tell.
 *   "unseen": dict of what could not be looked at, and how often.
 *   "visited": number of vertices.
 *
 * A step is (kind, object or None, name, edge): kind is "python", "tensor", "node", "storage", "group", or
 * "more" for the left out middle of a long chain (name: how many steps);
 * name says what it is, for what is not Python's; edge says how the step before holds it, where C++
 * knows, else None. The steps hold their objects: whoever describes them must let them go.
 */
PyObject *zbp_search_holders(const zbp_search *search, zbp_error *error);

/* What would be freed if nobody held `groups` any more, a tuple of ParamGroups, each once: found by letting go of one
 * reference after the other, as Python and libtorch do; nothing is let go of. New tuple of
 *
 *   a list of the storages: (identity, bytes, role, shape, dtype, device, node, groups). role: "packed" for what
 *       saved-tensor hooks or a checkpointed region keep, else "saved". shape, dtype: of a tensor on it. node: the name
 *       of the last node on the way, or None. groups: places of those that hold it.
 *   a list with a tuple of the weights of each group.
 *   a dict of what could not be looked at, and how often.
 *
 * Linear in what goes and in what that refers to; what several groups share counts for each. */
PyObject *zbp_freed_with(zbp_group_access access, PyObject *groups, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
