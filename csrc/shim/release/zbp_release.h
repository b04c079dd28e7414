/* zbp_release.h - giving tensors' memory back: what zbpipe's release helpers need of libtorch.
 *
 * Conventions as in zbp_input.h. All run with the GIL held throughout, so no Python code can take a
 * reference between a check and what it allows. Tensors are borrowed. What is refused (TypeError,
 * ValueError or RuntimeError) has changed nothing.
 *
 * Bytes: of whole storages, those of which the allocator got its memory back before the call returned.
 */
#ifndef ZBP_RELEASE_H
#define ZBP_RELEASE_H

#include <Python.h>

#include "core/base/zbp_status.h"
#include "shim/torch/zbp_error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The holders of a tensor's memory that C++ counts. */
typedef struct zbp_other_holders {
    size_t bytes;       /* of the storage */
    size_t storage;     /* holders of the storage besides this tensor: tensors, a Python storage */
    int python_storage; /* 1 if one of these is an UntypedStorage that is held in Python */
    size_t tensor;      /* holders of this tensor besides its Python object: nodes, views, C++ */
} zbp_other_holders;

/* How an object holds the memory of a tensor; bits. */
enum {
    ZBP_HOLDS_STORAGE = 1, /* the same storage, through another tensor */
    ZBP_HOLDS_TENSOR = 2,  /* the very tensor */
    ZBP_HOLDS_AS_BASE = 4, /* is a view whose base is the very tensor */
    ZBP_HOLDS_UNKNOWN = 8, /* a saved tensor that hooks have packed: cannot be told */
};

/* The Python object lets go of its storage and keeps all else: shape, dtype, device, history. Others
 * that hold the storage, or in C++ the very tensor, keep it. Reading the tensor raises a
 * RuntimeError that says `why` (UTF-8, copied) from then on.
 * Refused: what is no plain tensor, views, leaves that require a gradient. */
ZBP_MUST_USE int zbp_deallocate_output(PyObject *tensor, const char *why, size_t *freed_out,
                                       zbp_error *error);

/* New tensor, the same values and gradient edge, no base and no storage larger than
 * itself; or `tensor` itself (a new reference) if it is so already. */
PyObject *zbp_make_viewless(PyObject *tensor, zbp_error *error);

/* Frees the storage if nobody else holds it: *released_out = 1, and the bytes in holders_out->bytes;
 * the tensor is left with one of no bytes, and reading it raises, saying `why` (copied). So too if it
 * has no bytes before.
 * Otherwise *released_out = 0, nothing has changed, and *holders_out says how many others there are.
 * Refused: what is no plain tensor, memory that is not an allocator's of torch. */
ZBP_MUST_USE int zbp_release_storage(PyObject *tensor, const char *why,
                                     zbp_other_holders *holders_out, int *released_out,
                                     zbp_error *error);

/* How `other` (a tensor, a torch._C._autograd.SavedTensor, or anything, which holds nothing) holds
 * the memory of `tensor`: ZBP_HOLDS_* bits. Runs no hook and takes no reference that outlives the call. */
ZBP_MUST_USE int zbp_find_hold(PyObject *tensor, PyObject *other, int *hold_out, zbp_error *error);

#ifdef __cplusplus
}
#endif

#endif
