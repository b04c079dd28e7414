#include "fake_things.h"

#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "shim/memory/zbp_tapped.h"

fake_world world;
const char WORLD_FAILED[] = "failed";

static const char objects[WORLD_MOST], natives[WORLD_MOST], the_list[1];

const void *object_at(uint32_t i)
{
    return objects + i;
}

const void *native_at(uint32_t i)
{
    return natives + i;
}

const void *key_at(uint32_t i)
{
    return is_of_torch(i) ? native_at(i) : object_at(i);
}

const void *list_at(void)
{
    return the_list;
}

bool is_of_torch(uint32_t i)
{
    return world.of[i].thing != ZBP_THING_PYTHON && world.of[i].thing != ZBP_THING_GROUP;
}

static bool is_among(const char *all, const void *key)
{
    return (const char *)key >= all && (const char *)key < all + WORLD_MOST;
}

static uint32_t number_of(const void *key)
{
    REQUIRE(is_among(objects, key) || is_among(natives, key));
    return (uint32_t)((const char *)key - (is_among(objects, key) ? objects : natives));
}

static bool fails(void)
{
    return world.touches++ == world.fail_at;
}

static int raise(zbp_error *error)
{
    error->raised = (void *)WORLD_FAILED;
    return ZBP_ETORCH;
}

int zbp_things_resolve(zbp_things *things, const void *object, zbp_thing *thing_out)
{
    const uint32_t i = number_of(object);

    (void)things;
    if (fails())
        return ZBP_ENOMEM;
    REQUIRE(is_among(objects, object));
    *thing_out = (zbp_thing){world.of[i].thing, world.of[i].type, key_at(i)};
    if (world.of[i].is_of_no_interest)
        thing_out->key = NULL;
    return ZBP_OK;
}

int zbp_things_own(zbp_things *things, zbp_thing thing, bool *lives_out)
{
    fake_thing *of = &world.of[number_of(thing.key)];

    (void)things;
    if (fails())
        return ZBP_ENOMEM;
    *lives_out = !of->is_dying;
    of->owned += *lives_out;
    REQUIRE(of->owned <= 1);
    return ZBP_OK;
}

static int visit_edges(uint32_t from, bool is_scripts, zbp_visit visit, void *arg)
{
    int status = ZBP_OK;

    for (uint32_t e = 0; status == ZBP_OK && e < world.edges; e++) {
        const uint32_t to = world.edge[e].to;
        const bool counts = world.edge[e].counts_python;
        const zbp_reference reference = {world.of[to].thing, counts ? object_at(to) : native_at(to),
                                         "label", -1, counts};

        if (world.edge[e].from == from && world.edge[e].is_scripts == is_scripts)
            status = visit(arg, &reference);
    }
    return status;
}

int zbp_things_visit(zbp_things *things, uint8_t thing, const void *key, zbp_visit visit, void *arg,
                     zbp_error *error)
{
    const uint32_t i = number_of(key);

    (void)things;
    REQUIRE(thing == world.of[i].thing && (world.of[i].owned == 1) == is_of_torch(i));
    return fails() ? raise(error) : visit_edges(i, false, visit, arg);
}

int zbp_things_visit_scripts(zbp_things *things, const void *module, zbp_visit visit, void *arg,
                             zbp_error *error)
{
    (void)things;
    return fails() ? raise(error) : visit_edges(number_of(module), true, visit, arg);
}

zbp_counts zbp_things_count(uint8_t thing, const void *key)
{
    const uint32_t i = number_of(key);
    zbp_counts counts = {.has_native = is_of_torch(i), .has_python = world.of[i].has_object};

    REQUIRE(thing == world.of[i].thing);
    counts.has_python = counts.has_python || !counts.has_native;
    counts.python_owns = true;
    counts.native = counts.has_native && counts.has_python;
    for (uint32_t e = 0; e < world.edges; e++)
        if (world.edge[e].to == i && !world.edge[e].is_scripts)
            ++*(world.edge[e].counts_python ? &counts.python : &counts.native);
    *(counts.has_native ? &counts.native : &counts.python) += world.of[i].hidden;
    counts.python += world.is_listing && world.of[i].is_listed;
    return counts;
}

uint8_t zbp_things_blame(uint8_t thing, const void *key)
{
    REQUIRE(thing == world.of[number_of(key)].thing);
    return world.of[number_of(key)].blame;
}

int zbp_things_list(zbp_things *things, const void *const **object_out, size_t *count_out,
                    const void **list_out, zbp_error *error)
{
    size_t count = 0;

    (void)things;
    if (fails())
        return raise(error);
    for (uint32_t i = 0; i < world.things; i++)
        if (world.of[i].is_listed)
            world.listed[count++] = object_at(i);
    world.is_listing = true;
    *object_out = world.listed;
    *count_out = count;
    *list_out = the_list;
    return ZBP_OK;
}

void zbp_things_unlist(zbp_things *things)
{
    (void)things;
    world.is_listing = false;
}

const void *zbp_tensor_storage(const void *tensor)
{
    const int storage = world.of[number_of(tensor)].storage;

    return storage < 0 ? NULL : native_at((uint32_t)storage);
}

bool zbp_storage_look(const void *storage, zbp_memory *memory_out)
{
    const fake_thing *of = &world.of[number_of(storage)];

    *memory_out = of->memory;
    return !of->is_freed;
}

void zbp_storage_watch(const void *storage)
{
    world.of[number_of(storage)].watched++;
}

void zbp_storage_unwatch(const void *storage)
{
    world.of[number_of(storage)].watched--;
}

int zbp_tap_blocks(uint64_t since, zbp_block **blocks_out, size_t *count_out)
{
    REQUIRE(since == 0);
    *blocks_out = fails() ? NULL : malloc(sizeof world.block);
    if (*blocks_out == NULL)
        return ZBP_ENOMEM;
    memcpy(*blocks_out, world.block, sizeof world.block);
    *count_out = world.blocks;
    return ZBP_OK;
}
