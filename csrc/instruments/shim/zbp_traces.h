/* zbp_traces.h - where blocks of memory come from: by number, the Python stacks that asked for
 * them.
 *
 * Threads: any. What is kept is touched with the GIL alone.
 */
#pragma once

#include <Python.h>
#include <stdint.h>

#include "core/base/zbp_c.h"
#include "shim/torch/zbp_error.h"

ZBP_BEGIN_C

/* From start to stop (they nest) each stack that asks for a block is kept once, to the last stop.
 * With the GIL. */
void zbp_trace_start(void);
void zbp_trace_stop(void);

/* The number of this thread's stack. 0 while nobody traces, without memory, and on a thread that
 * Python does not know. Takes the GIL while somebody traces: whoever waits for this thread may not
 * have it. */
uint64_t zbp_trace_here(void);

/* New list of (file, function, line), innermost first; empty for 0, and after the last stop. With
 * the GIL. */
PyObject *zbp_trace_of(uint64_t number, zbp_error *error);

ZBP_END_C
