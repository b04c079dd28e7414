/* zbp_group.h - a parameter group, what I leaves for W, as C sees it. */
#pragma once

#include "core/pass/zbp_book.h"
#include "core/pass/zbp_layout.h"

/* The shim's own begins with it: tensors, nodes and accumulators come behind. */
typedef struct zbp_group {
    zbp_layout layout; /* what leads where */
    zbp_book book;     /* what has been added */
} zbp_group;
