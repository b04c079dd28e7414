#include "core/base/zbp_map.h"

#include <string.h>

#include "core/base/zbpi_alloc.h"
#include "core/base/zbpi_hash.h"

enum { FIRST_CAPACITY = 1024 };

/* The slot that holds key, or the free one where it belongs. Ends because one slot is free. */
static zbp_map_slot *probe(zbp_map_slot *slot, size_t capacity, const void *key)
{
    size_t mask = capacity - 1;
    size_t i = zbpi_hash((uintptr_t)key) & mask;

    while (slot[i].key != NULL && slot[i].key != key)
        i = (i + 1) & mask;
    return &slot[i];
}

static bool is_full(const zbp_map *map)
{
    return map->count >= map->capacity / 8 * 5;
}

static int grow(zbp_map *map)
{
    size_t capacity = map->capacity == 0 ? FIRST_CAPACITY : map->capacity * 2;
    zbp_map_slot *slot;

    if (map->capacity > SIZE_MAX / sizeof *slot / 2)
        return ZBP_ENOMEM;
    slot = zbpi_zeroed(capacity * sizeof *slot);
    if (slot == NULL)
        return ZBP_ENOMEM;
    for (size_t i = 0; i < map->capacity; i++)
        if (map->slot[i].key != NULL)
            *probe(slot, capacity, map->slot[i].key) = map->slot[i];
    zbpi_free(map->slot);
    map->slot = slot;
    map->capacity = capacity;
    return ZBP_OK;
}

void zbp_map_fini(zbp_map *map)
{
    zbpi_free(map->slot);
    memset(map, 0, sizeof *map);
}

int zbp_map_add(zbp_map *map, const void *key, uint32_t *value)
{
    zbp_map_slot *slot = map->capacity != 0 ? probe(map->slot, map->capacity, key) : NULL;

    if (slot != NULL && slot->key == key) {
        if (value != NULL)
            *value = slot->value;
        return ZBP_OK;
    }
    if (map->count == UINT32_MAX)
        return ZBP_ENOMEM;
    if (is_full(map)) {
        int status = grow(map);

        if (status != ZBP_OK)
            return status;
        slot = probe(map->slot, map->capacity, key);
    }
    *slot = (zbp_map_slot){key, value != NULL ? *value : 0};
    map->count++;
    return ZBP_OK;
}

bool zbp_map_find(const zbp_map *map, const void *key, uint32_t *value_out)
{
    const zbp_map_slot *found;

    if (map->capacity == 0)
        return false;
    found = probe(map->slot, map->capacity, key);
    if (found->key == NULL)
        return false;
    if (value_out != NULL)
        *value_out = found->value;
    return true;
}
