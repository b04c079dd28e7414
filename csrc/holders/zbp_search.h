/* zbp_search.h - who holds the memory that was born, or a tensor's: see Note [How holders are searched].
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
 * Nothing is unpacked, no hook is run, no node is wrapped, no Python code runs once the search has begun: it sees one
 * moment, as far as threads that need the GIL go. Others (a backward, another pass of zbpipe's) may free and change
 * what is libtorch's meanwhile: what is met is owned until the search ends, a node's saved tensors and a leaf's
 * gradient are read under the locks that the engine takes, edges and hooks under our own passes'. What is locked is
 * said to be unseen.
 *
 * Here it is conducted: what has been met is numbers (core/holders), what a thing is and holds the shim tells
 * (shim/holders/zbp_things.h), and bindings/description.c puts it into Python's objects.
 *
 * Linear in the objects, references and nodes that live. With the GIL.
 */
#ifndef ZBP_SEARCH_H
#define ZBP_SEARCH_H

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_map.h"
#include "core/holders/zbp_ways.h"
#include "holders/zbp_explore.h"
#include "holders/zbp_storages.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A storage that is searched for. */
typedef struct zbp_sought {
    uint32_t storage;
    zbp_memory memory;
    uint32_t tensors_begin, tensors_end; /* its tensors, places in zbp_search.tensor */
} zbp_sought;

/* Held by the caller, who sets the fields before `explore` after zbp_search_init; all others are for reading alone. */
typedef struct zbp_search {
    /* A tensor whose storage alone is searched for; or NULL: all that were born. References to its Python object are
     * the caller's, and no holders. */
    const void *target;
    uint64_t since; /* without a target: CPU blocks from this serial on, zbp_tap_serial() */
    uint64_t until; /* and before this one: what other threads have made since is nobody's leak */
    const zbp_storages *older; /* or NULL. Others' memory was born since if it is not among these */
    zbp_map allowed;           /* storages that are not searched for; given back by _fini */

    zbp_explore explore;
    const void *const
        *listed; /* [listed_count], from _begin to _run: what Python's collector lists */
    size_t listed_count;
    zbp_ways ways;
    zbp_sought *sought; /* [sought_count] */
    uint32_t sought_count, sought_capacity;
    uint32_t *tensor;
    uint32_t tensor_count;
    zbp_born born;  /* without a target: blocks that were born, */
    bool *is_found; /* [born.count], and which of them are a storage's that is known */
} zbp_search;

void zbp_search_init(zbp_search *search, zbp_things *things, const zbp_alloc *alloc);
void zbp_search_fini(zbp_search *search);

/* Takes the collector's list, before search->explore is given anything but what it is to ignore: Python's audit hooks
 * hear of it, and may free what they like. Errors as zbp_explore_list's; then nothing but _fini is legal. */
ZBP_MUST_USE int zbp_search_begin(zbp_search *search, zbp_error *error);

/* Searches from the roots that search->explore has been given. Errors as zbp_explore_all's; then nothing but
 * _fini is legal. */
ZBP_MUST_USE int zbp_search_run(zbp_search *search, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
