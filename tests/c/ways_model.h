/* ways_model.h - small heaps drawn from bytes, and naive ways to compare with.
 *
 * The model reads the definitions in zbp_ways.h literally: a matrix of distances, lowered until nothing changes.
 */
#ifndef WAYS_MODEL_H
#define WAYS_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "core/holders/zbp_ways.h"

enum { DRAWN_MOST = 40, DRAWN_EDGES = 512 };

typedef struct drawing {
    uint32_t things, roots; /* of which the first ones are roots */
    uint32_t edge_count;
    struct {
        uint8_t from, to; /* to == things: what is ignored */
        bool counts_python;
    } edge[DRAWN_EDGES];
    uint8_t blame[DRAWN_MOST];
} drawing;

/* Any bytes are a drawing: [0] things, [1] roots, [2] how many things are a chain, then blame, one byte a thing, then
 * edges, two bytes each. What is missing is 0. */
void drawing_read(drawing *drawn, const uint8_t *data, size_t size);

/* Fills an empty heap: the roots, what they reach, then the rest. A status. */
int drawing_explore(const drawing *drawn, zbp_heap *heap);

/* For zbp_ways_build. */
void drawing_blame(const drawing *drawn, const zbp_heap *heap, uint8_t blame_out[DRAWN_MOST]);

/* NULL if heap and ways are those of the drawing, else a static string that says what is not. */
const char *drawing_differs(const drawing *drawn, const zbp_heap *heap, zbp_ways *ways);

#endif
