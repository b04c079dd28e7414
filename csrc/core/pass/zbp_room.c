#include "core/pass/zbp_room.h"

#include <stdlib.h>

void zbp_room_init(zbp_room *room, const zbp_alloc *alloc)
{
    *room = (zbp_room){0};
    zbp_blocks_init(&room->counted, alloc);
}

void zbp_room_fini(zbp_room *room)
{
    zbp_blocks_fini(&room->counted);
    *room = (zbp_room){0};
}

static void set_bytes(zbp_room *room, uint64_t bytes)
{
    __atomic_store_n(&room->bytes, bytes, __ATOMIC_RELAXED);
}

uint64_t zbp_room_bytes(const zbp_room *room)
{
    return __atomic_load_n(&room->bytes, __ATOMIC_RELAXED);
}

int zbp_room_count(zbp_room *room, zbp_place place)
{
    zbp_block block = {.address = place.storage, .bytes = place.bytes, .serial = 1};
    zbp_block known;
    int status;

    if (zbp_blocks_find(&room->counted, place.storage, &known)) {
        block = known;
        block.serial++;
    }
    status = zbp_blocks_add(&room->counted, block, &known);
    if (status == ZBP_OK && block.serial == 1)
        set_bytes(room, room->bytes + block.bytes);
    return status;
}

void zbp_room_forget(zbp_room *room, uint64_t storage)
{
    zbp_block block, none;
    int status;

    if (!zbp_blocks_take(&room->counted, storage, &block))
        return;
    block.serial--;
    if (block.serial == 0) {
        set_bytes(room, room->bytes - block.bytes);
        return;
    }
    status =
        zbp_blocks_add(&room->counted, block, &none); /* cannot fail: into the place that it left */
    (void)status;
}

static int by_storage(const void *a, const void *b)
{
    const uint64_t x = ((const zbp_place *)a)->storage, y = ((const zbp_place *)b)->storage;

    return (x > y) - (x < y);
}

/* The bytes of sorted places that neither are counted nor among `others`, sorted too. */
static uint64_t new_bytes(const zbp_room *room, const zbp_place *place, size_t count,
                          const zbp_place *others, size_t other_count)
{
    zbp_block known;
    uint64_t bytes = 0;

    for (size_t i = 0; i < count; i++) {
        const bool is_again = i > 0 && place[i].storage == place[i - 1].storage;

        if (!is_again && !zbp_blocks_find(&room->counted, place[i].storage, &known) &&
            (other_count == 0 ||
             bsearch(&place[i], others, other_count, sizeof *others, by_storage) == NULL))
            bytes += place[i].bytes;
    }
    return bytes;
}

void zbp_room_weigh(const zbp_room *room, zbp_place *place, size_t always, size_t count,
                    uint64_t *always_out, uint64_t *all_out)
{
    zbp_place *besides = place + always;

    if (always > 1)
        qsort(place, always, sizeof *place, by_storage);
    if (count - always > 1)
        qsort(besides, count - always, sizeof *place, by_storage);
    *always_out = new_bytes(room, place, always, NULL, 0);
    *all_out = *always_out + new_bytes(room, besides, count - always, place, always);
}

void zbp_budget_expect(zbp_budget *budget, uint64_t due)
{
    budget->least += due;
    budget->due += due;
}

void zbp_room_settle(zbp_budget *budget, zbp_share *share, uint64_t *due, uint64_t least)
{
    budget->due -= *due;
    *due = 0;
    share->least += least;
}

static uint64_t less(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

/* Behind Note [Room that is kept free]. */
static uint64_t room_for(const zbp_room *room, const zbp_budget *budget)
{
    const uint64_t to_come = less(zbp_most_of(&room->most), room->waiting + budget->least);

    return less(budget->at_most, room->bytes + budget->due + to_come);
}

uint8_t zbp_room_choose(const zbp_room *room, zbp_budget *budget, zbp_share *share, uint64_t *due,
                        const zbp_demand *demand)
{
    uint64_t least = ZBP_NO_WAY;

    for (uint8_t way = 0; way < ZBP_HOLD_COUNT; way++) {
        if (demand->bytes[way] < least)
            least = demand->bytes[way];
    }
    zbp_room_settle(budget, share, due, least);
    return zbp_hold_within(room_for(room, budget), demand);
}

static void set_waiting(zbp_room *room, uint64_t waiting)
{
    if (waiting != room->waiting) {
        room->waiting = waiting;
        zbp_most_see(&room->most, waiting);
    }
}

void zbp_room_wait(zbp_room *room, zbp_share *share)
{
    share->waits = true;
    set_waiting(room, room->waiting + share->least);
}

void zbp_room_leave(zbp_room *room, zbp_share *share)
{
    if (share->waits) {
        share->waits = false;
        set_waiting(room, room->waiting - share->least);
    }
}

int zbp_room_check(const zbp_room *room, const char **reason_out)
{
    uint64_t bytes = 0;
    int status = zbp_blocks_check(&room->counted, reason_out);

    for (size_t i = 0; status == ZBP_OK && i < room->counted.capacity; i++) {
        bytes += room->counted.slot[i].bytes;
        if (room->counted.slot[i].address != 0 && room->counted.slot[i].serial == 0)
            status = ZBP_EINVAL;
    }
    if (status == ZBP_OK && bytes != room->bytes)
        status = ZBP_EINVAL;
    if (status != ZBP_OK && reason_out != NULL && *reason_out == NULL)
        *reason_out = "room: the bytes are not those of what is counted";
    return status;
}
