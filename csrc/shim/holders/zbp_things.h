/* zbp_things.h - what lives, one thing at a time: what it is, what it holds, how often it is referred to. For the
 * search for holders (csrc/holders), which knows neither torch nor Python.
 *
 * A thing is Python's object, or what is libtorch's: a tensor, a node or a storage is one thing, whatever stands for
 * it in Python. Python's objects are borrowed: usable until Python code runs or the GIL is let go of. What is
 * libtorch's is to be owned before it is looked at, for other threads free it without the GIL.
 *
 * All functions: with the GIL. No Python code runs in them, but for zbp_things_list. Those that return a status return
 * ZBP_OK, ZBP_ENOMEM or, where they have an error, ZBP_ETORCH with what has been raised in *error.
 */
#ifndef ZBP_THINGS_H
#define ZBP_THINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_status.h"
#include "core/holders/zbp_heap.h"
#include "shim/torch/zbp_error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a thing is. Its key: the PyObject* of PYTHON and GROUP (a ParamGroup), else libtorch's own object. */
enum {
    ZBP_THING_PYTHON,
    ZBP_THING_TENSOR,
    ZBP_THING_STORAGE,
    ZBP_THING_NODE,
    ZBP_THING_GROUP,
};

/* What a search asks of Python's objects besides. */
enum {
    ZBP_TYPE_OTHER,
    ZBP_TYPE_WORK,          /* torch.distributed's */
    ZBP_TYPE_SCRIPT,        /* torch._C.ScriptObject */
    ZBP_TYPE_SCRIPT_MODULE, /* torch.jit.ScriptModule, which has one */
};

typedef struct zbp_thing {
    uint8_t thing; /* ZBP_THING_* */
    uint8_t type;  /* ZBP_TYPE_* */
    const void *key;
} zbp_thing;

/* How a thing holds another one. label: static, or alive as long as the visit; NULL where Python can tell. */
typedef struct zbp_reference {
    uint8_t thing;
    const void *key;
    const char *label;
    int32_t index;      /* -1, or the place in what the label names */
    bool counts_python; /* it is a reference to the Python object and not to libtorch's */
} zbp_reference;

/* Returns ZBP_OK, or the status that ends the visit. */
typedef int (*zbp_visit)(void *arg, const zbp_reference *reference);

/* What is owned of libtorch's, what is known of types, what could not be looked at. Made by zbp_things_new
 * (zbp_looks.h). */
typedef struct zbp_things zbp_things;

/* Lets go of what is owned. NULL is legal. */
void zbp_things_free(zbp_things *things);

/* What a Python object is or stands for; key is NULL where it is of no interest: numbers and words, what holds
 * nothing. */
ZBP_MUST_USE int zbp_things_resolve(zbp_things *things, const void *object, zbp_thing *thing_out);

/* Sees to it that what is libtorch's lives as long as `things`, if it does so still; *lives_out. To be asked once. */
ZBP_MUST_USE int zbp_things_own(zbp_things *things, zbp_thing thing, bool *lives_out);

/* Calls visit with everything that the thing holds, and what was said to be held besides. */
ZBP_MUST_USE int zbp_things_visit(zbp_things *things, uint8_t thing, const void *key,
                                  zbp_visit visit, void *arg, zbp_error *error);

/* The thing at `key` holds the Python object `held`, too (a frame its variables). */
ZBP_MUST_USE int zbp_things_add_held(zbp_things *things, const void *key, const void *held);

/* Calls visit with the torch._C.ScriptObjects of a torch.jit.ScriptModule. */
ZBP_MUST_USE int zbp_things_visit_scripts(zbp_things *things, const void *module, zbp_visit visit,
                                          void *arg, zbp_error *error);

/* Without the reference by which it is owned. */
zbp_counts zbp_things_count(uint8_t thing, const void *key);

/* How far a member of a cycle is from being what made it, 0 for the most to blame: code and objects come before what
 * they are made of, and that before what autograd makes. */
uint8_t zbp_things_blame(uint8_t thing, const void *key);

/* The objects that Python's collector lists, each referred to once more until zbp_things_unlist. *object_out:
 * borrowed until then. Python's audit hooks hear of it: what has been met before may be gone. */
ZBP_MUST_USE int zbp_things_list(zbp_things *things, const void *const **object_out,
                                 size_t *count_out, const void **list_out, zbp_error *error);
void zbp_things_unlist(zbp_things *things);

/* The storage of a tensor that is owned; NULL if it has none. */
const void *zbp_tensor_storage(const void *tensor);

typedef struct zbp_memory {
    uint64_t address; /* 0: none, as of wrappers of tensors and meta tensors */
    uint64_t bytes;   /* 0 for one without memory whose size is symbolic (a tracer's) */
    int8_t device_type, device_index;
    bool
        is_foreign; /* not the CPU allocator's, whose memory the tap (zbp_tap.h) knows or is older than it; not meta */
} zbp_memory;

/* Of a storage that is owned or watched. False if it has been freed. */
bool zbp_storage_look(const void *storage, zbp_memory *memory_out);

/* A storage that is owned: keeps its identity from being given to another one, not its memory; and sees to it that its
 * growth is seen (zbp_tap_adopt_storage). */
void zbp_storage_watch(const void *storage);
void zbp_storage_unwatch(const void *storage);

#ifdef __cplusplus
}
#endif

#endif
