/* model.h - graphs for tests, and a naive plan to compare with.
 *
 * The model reads the definitions in zbp_plan.h literally: a reachability matrix, and group labels
 * lowered until nothing changes. At most MODEL_NODES nodes.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "core/graph/zbp_plan.h"

enum { MODEL_NODES = 64 };

/* NULL if plan is the plan of graph, else a static string that begins with the wrong field. */
const char *model_differs(const zbp_plan *plan, const zbp_graph *graph);

/* The key of test node i; i < 2^20. */
const void *model_key(uint32_t i);

/* A small, fast, seeded generator; never from the clock. */
uint64_t model_random(uint64_t *state);
uint32_t model_below(uint64_t *state, uint32_t n);

/* Fills an empty graph with a random one of at most `nodes` nodes, of a random temper: with or
 * without cycles, thin or thick, like a stage walked from its roots or not. A status. */
int model_random_graph(zbp_graph *graph, uint64_t *state, uint32_t nodes);
