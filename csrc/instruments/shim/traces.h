// Where blocks of memory come from: the Python stack that asked for each, while somebody wants to
// know.
//
// Threads: any. Its lock is a leaf.
#pragma once

#include <Python.h>

#include <cstdint>

namespace zbp {

/// They nest. The second forgets all, and takes the GIL for granted: it lets go of the codes of all
/// traces.
void start_tracing();
void stop_tracing();

/// The stack of this thread is that of the block at `address`, until that is forgotten. Takes the
/// GIL while somebody traces: whoever waits for this thread may not have it. On a thread that
/// Python does not know, or without memory, the block has none.
void keep_trace(uint64_t address) noexcept;
void forget_trace(uint64_t address) noexcept;

/// For the time of a fork.
void lock_traces();
void unlock_traces();

/// New list of (file, function, line), innermost first; empty for a block without a trace. With the
/// GIL. Throws python_error.
PyObject* describe_trace(uint64_t address);

}  // namespace zbp
