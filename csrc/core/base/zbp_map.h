/* zbp_map.h - from opaque pointers to 32-bit numbers, for look-up alone.
 *
 * Invariant: open addressing with linear probing, a power of two of slots, at most 5/8 of them
 * taken, nothing is ever removed. There is no iteration, on purpose: the order of the slots
 * depends on addresses, and results must be the same on every run.
 * Allocation: one block, replaced when it is full. Threads: one at a time, or many that only read.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/base/zbp_c.h"

ZBP_BEGIN_C

typedef struct zbp_map_slot {
    const void *key; /* NULL: the slot is free */
    uint32_t value;
} zbp_map_slot;

/* Held by the caller; all fields are for reading alone. Zeroed is a legal empty map. */
typedef struct zbp_map {
    uint32_t count;
    size_t capacity; /* slots: 0 or a power of two */
    zbp_map_slot *slot;
} zbp_map;

/* Frees what the map holds and zeroes it. A zeroed map is legal. */
void zbp_map_fini(zbp_map *map);

/* Adds key, which is not NULL, with *value, or with 0 if value is NULL. A key that is there keeps
 * its value, and *value becomes that. key is never read through, and value is not in the map.
 * ZBP_ENOMEM, map and *value unchanged; a key that is there cannot fail. Amortised O(1). */
ZBP_MUST_USE int zbp_map_add(zbp_map *map, const void *key, uint32_t *value);

/* Whether key is there; then *value_out (may be NULL) is its value, else it is left alone. O(1). */
bool zbp_map_find(const zbp_map *map, const void *key, uint32_t *value_out);

ZBP_END_C
