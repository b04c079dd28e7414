#include "holders/zbp_storages.h"

#include <stdlib.h>

#include "core/base/zbpi_alloc.h"
#include "shim/memory/zbp_tapped.h"

static int add(zbp_storages *storages, const void *storage)
{
    if (storages->count == storages->capacity) {
        const void **grown = zbpi_grow(&storages->alloc, storages->storage, &storages->capacity,
                                       sizeof *storages->storage);

        if (grown == NULL)
            return ZBP_ENOMEM;
        storages->storage = grown;
    }
    if (zbp_map_add(&storages->places, storage, storages->count, NULL, NULL) != ZBP_OK)
        return ZBP_ENOMEM;
    zbp_storage_watch(storage);
    storages->storage[storages->count++] = storage;
    return ZBP_OK;
}

int zbp_storages_take(zbp_storages *storages, const zbp_explore *explored, const zbp_alloc *alloc)
{
    const zbp_heap *heap = &explored->heap;
    int status = ZBP_OK;

    *storages = (zbp_storages){.alloc = zbpi_alloc_copy(alloc)};
    zbp_map_init(&storages->places, alloc);
    for (uint32_t v = 0; status == ZBP_OK && v < heap->count; v++)
        if (heap->vertex[v].thing == ZBP_THING_STORAGE)
            status = add(storages, heap->vertex[v].key);
    if (status != ZBP_OK)
        zbp_storages_fini(storages);
    return status;
}

void zbp_storages_fini(zbp_storages *storages)
{
    for (uint32_t i = 0; i < storages->count; i++)
        zbp_storage_unwatch(storages->storage[i]);
    zbpi_free(&storages->alloc, storages->storage, storages->capacity * sizeof *storages->storage);
    zbp_map_fini(&storages->places);
    *storages = (zbp_storages){0};
}

/* A key that is never read through. */
static const void *at(uint64_t address)
{
    return (const void *)(uintptr_t)address;
}

int zbp_born_take(zbp_born *born, uint64_t since, uint64_t until, const zbp_alloc *alloc)
{
    size_t count = 0;
    int status;

    *born = (zbp_born){0};
    zbp_map_init(&born->places, alloc);
    status = zbp_tap_blocks(0, &born->block, &count);
    for (size_t i = 0; status == ZBP_OK && i < count; i++) {
        const zbp_block block = born->block[i];
        const bool is_born = block.serial >= since && block.serial < until;

        status = zbp_map_add(&born->places, at(block.address), is_born ? born->count : ZBP_NO_BLOCK,
                             NULL, NULL);
        if (status == ZBP_OK && is_born)
            born->block[born->count++] = block;
    }
    if (status != ZBP_OK)
        zbp_born_fini(born);
    return status;
}

void zbp_born_fini(zbp_born *born)
{
    free(born->block);
    zbp_map_fini(&born->places);
    *born = (zbp_born){0};
}

uint32_t zbp_born_find(const zbp_born *born, uint64_t address)
{
    uint32_t place = ZBP_NO_BLOCK;

    (void)zbp_map_find(&born->places, at(address), &place);
    return place;
}

bool zbp_storages_lack(const zbp_storages *older, const zbp_born *born, const void *storage,
                       const zbp_memory *memory)
{
    return memory->bytes > 0 && memory->is_foreign &&
           !zbp_map_find(&older->places, storage, NULL) &&
           !zbp_map_find(&born->places, at(memory->address), NULL);
}
