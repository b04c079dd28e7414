/* zbp_traces.h - where blocks of memory come from: the Python stack that asked for each, while
 * somebody wants to know.
 *
 * Threads: any. Its lock is a leaf.
 */
#pragma once

#include <Python.h>
#include <stdint.h>

#include "core/base/zbp_c.h"
#include "shim/torch/zbp_error.h"

ZBP_BEGIN_C

/* From start to stop (they nest) the stack that asks for a block is kept with it, at some
 * microseconds a block, until the block is freed or the last stop. With the GIL. */
void zbp_trace_start(void);
void zbp_trace_stop(void);

/* The stack of this thread is that of the block at `address`, until that is forgotten. Takes the
 * GIL while somebody traces: whoever waits for this thread may not have it. On a thread that
 * Python does not know, or without memory, the block has none. */
void zbp_trace_keep(uint64_t address);
void zbp_trace_forget(uint64_t address);

/* New list of (file, function, line), innermost first; empty for a block without a trace. With the
 * GIL. */
PyObject *zbp_trace_of(uint64_t address, zbp_error *error);

/* For the time of a fork. */
void zbp_trace_lock(void);
void zbp_trace_unlock(void);

ZBP_END_C
