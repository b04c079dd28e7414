/* zbp_explore.h - who holds whom of all that lives: a search breadth first through the things of zbp_things.h.
 *
 * Linear in the things and references that it meets. All functions: with the GIL; no Python code may run from
 * the first to the last. Those that return a status return ZBP_OK, ZBP_ENOMEM, ZBP_EOVERFLOW (more than the heap
 * counts), or ZBP_ETORCH, what was raised in *error; after an error nothing but _fini is legal.
 */
#ifndef ZBP_EXPLORE_H
#define ZBP_EXPLORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_alloc.h"
#include "core/holders/zbp_heap.h"
#include "shim/holders/zbp_things.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zbp_vertices {
    uint32_t *item;
    uint32_t count, capacity;
} zbp_vertices;

/* Held by the caller; all fields are for reading alone. */
typedef struct zbp_explore {
    zbp_heap heap;
    zbp_vertices works; /* of torch.distributed, in the order of discovery */
    zbp_things *things; /* borrowed; outlives this */
    zbp_alloc alloc;
} zbp_explore;

/* alloc is copied; NULL is libc. */
void zbp_explore_init(zbp_explore *self, zbp_things *things, const zbp_alloc *alloc);
void zbp_explore_fini(zbp_explore *self);

/* The Python object will not be looked at. */
ZBP_MUST_USE int zbp_explore_ignore(zbp_explore *self, const void *object);

/* As zbp_things_list; the list itself will not be looked at. */
ZBP_MUST_USE int zbp_explore_list(zbp_explore *self, const void *const **object_out,
                                  size_t *count_out, zbp_error *error);

/* A Python object without holder. *v_out: its vertex, new or old; ZBP_NO_VERTEX if it is of no interest. */
ZBP_MUST_USE int zbp_explore_root(zbp_explore *self, const void *object, uint32_t *v_out);

/* A Python object that is a tensor, a storage, a node or a ParamGroup, or the TorchScript object of a
 * torch.jit.ScriptModule, without holder; others are passed over. */
ZBP_MUST_USE int zbp_explore_root_of_torch(zbp_explore *self, const void *object, zbp_error *error);

/* Looks at all that has been met and not been looked at. */
ZBP_MUST_USE int zbp_explore_all(zbp_explore *self, zbp_error *error);
/* Likewise, but only through tensors, nodes and TorchScript objects. */
ZBP_MUST_USE int zbp_explore_autograd(zbp_explore *self, zbp_error *error);

/* The vertex of what a reference leads to, or ZBP_NO_VERTEX. */
ZBP_MUST_USE int zbp_explore_find(const zbp_explore *self, const zbp_reference *reference,
                                  uint32_t *v_out);

/* As zbp_heap_unexplained. listed: one reference to the Python object is the caller's. */
int64_t zbp_explore_unexplained(const zbp_explore *self, uint32_t v, bool listed, bool native_only);

/* ZBP_ENOMEM: as before. */
ZBP_MUST_USE int zbp_vertices_add(zbp_vertices *vertices, uint32_t v, const zbp_alloc *alloc);
void zbp_vertices_fini(zbp_vertices *vertices, const zbp_alloc *alloc);

#ifdef __cplusplus
}
#endif

#endif
