/* fake_things.h - in the place of the shim's things: a small world of things that hold each other, drawn from numbers.
 *
 * A thing has a Python object, one of libtorch's, or both, at two addresses. What holds it is edges; hidden references
 * come from where nobody can look. Each touch of the world can be made to fail, and all that is taken is counted.
 */
#ifndef FAKE_THINGS_H
#define FAKE_THINGS_H

#include <stdbool.h>
#include <stdint.h>

#include "core/memory/zbp_blocks.h"
#include "shim/holders/zbp_things.h"

enum { WORLD_MOST = 24, WORLD_EDGES = 96 };

typedef struct fake_thing {
    uint8_t thing, type;
    bool is_of_no_interest; /* Python's: a number, say */
    bool is_dying;          /* libtorch's */
    bool is_listed;         /* by Python's collector */
    bool has_object;        /* libtorch's: a Python object refers to it */
    uint8_t hidden;         /* references to it */
    uint8_t blame;
    int storage; /* a tensor's; -1 for none */
    zbp_memory memory;
    bool is_freed; /* a storage, since it was watched */

    int owned, watched; /* so often */
} fake_thing;

typedef struct fake_world {
    uint32_t things, edges;
    fake_thing of[WORLD_MOST];
    struct {
        uint8_t from, to;
        bool counts_python, is_scripts; /* scripts: told by zbp_things_visit_scripts alone */
    } edge[WORLD_EDGES];
    zbp_block block[WORLD_MOST];
    uint32_t blocks;

    long touches, fail_at; /* -1: none fails */
    bool is_listing;
    const void *listed[WORLD_MOST + 1];
} fake_world;

extern fake_world world;

/* What zbp_error.raised points to. */
extern const char WORLD_FAILED[];

/* Keys. */
const void *object_at(uint32_t i);
const void *native_at(uint32_t i);
const void *key_at(uint32_t i); /* of the vertex */
const void *list_at(void);

bool is_of_torch(uint32_t i);

#endif
