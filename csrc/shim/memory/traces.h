// Where blocks of memory come from: the Python stack that asked for each, as pairs of code and instruction, while
// somebody wants to know.
//
// Threads: any. Its lock is a leaf.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace zbp {

struct TracedFrame {
  PyCodeObject* code;  // alive until the last stop_tracing()
  int instruction;
};

/// A stack, innermost first; and for which tracing it was taken.
struct Trace {
  std::vector<TracedFrame> frames;
  uint64_t tracing = 0;
};

/// They nest. The second takes the GIL for granted: it lets go of the codes of all traces.
void start_tracing();
void stop_tracing();

/// The stack of this thread, empty while nobody traces. Takes the GIL, so empty on a thread that Python does not know:
/// whoever waits for that one may have it. No variable of a frame is kept, only its code. Throws nothing: empty
/// without memory.
Trace trace_now() noexcept;

/// It is that of the block at `address`, until that is forgotten. Throws std::bad_alloc.
void keep_trace(uint64_t address, Trace&& trace);
void forget_trace(uint64_t address) noexcept;

/// For the time of a fork.
void lock_traces();
void unlock_traces();

/// New list of (file, function, line); empty for a block without a trace. With the GIL. Throws python_error.
PyObject* describe_trace(uint64_t address);

}  // namespace zbp
