/* zbp_storages.h - the storages of a moment, each watched: its identity is no other's until they are let go of, the
 * memory itself is not kept. With the GIL.
 */
#ifndef ZBP_STORAGES_H
#define ZBP_STORAGES_H

#include <stdbool.h>
#include <stdint.h>

#include "core/base/zbp_map.h"
#include "core/memory/zbp_blocks.h"
#include "holders/zbp_explore.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Held by the caller; all fields are for reading alone. Zeroed is a legal moment without storages. */
typedef struct zbp_storages {
    uint32_t count;
    const void **storage; /* [count] */

    uint32_t capacity;
    zbp_map places; /* by storage */
    zbp_alloc alloc;
} zbp_storages;

/* Those among what has been explored; *storages is overwritten. Errors, with nothing watched: ZBP_ENOMEM. */
ZBP_MUST_USE int zbp_storages_take(zbp_storages *storages, const zbp_explore *explored,
                                   const zbp_alloc *alloc);
void zbp_storages_fini(zbp_storages *storages);

#define ZBP_NO_BLOCK UINT32_MAX

/* CPU blocks, by address: those that were handed out from one serial on and before another one, and all others. */
typedef struct zbp_born {
    uint32_t count;
    zbp_block *block; /* [count], in the order of their serials */

    zbp_map places; /* by address: place in block, or ZBP_NO_BLOCK for another one */
} zbp_born;

/* *born is overwritten. alloc is copied; NULL is libc. Errors, born zeroed: ZBP_ENOMEM, ZBP_EOVERFLOW. */
ZBP_MUST_USE int zbp_born_take(zbp_born *born, uint64_t since, uint64_t until,
                               const zbp_alloc *alloc);
void zbp_born_fini(zbp_born *born);

/* Its place in block, or ZBP_NO_BLOCK. O(1). */
uint32_t zbp_born_find(const zbp_born *born, uint64_t address);

/* Whether a storage that lives has memory of which neither the storages of `older` nor the tap knows. O(1). */
bool zbp_storages_lack(const zbp_storages *older, const zbp_born *born, const void *storage,
                       const zbp_memory *memory);

#ifdef __cplusplus
}
#endif

#endif
