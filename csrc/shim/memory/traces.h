// Where blocks of memory come from: the Python stack that asked for each, as pairs of code and instruction.
#pragma once

#include <Python.h>

#include <vector>

namespace zbp {

struct TracedFrame {
  PyCodeObject* code;  // alive until the last forget_codes()
  int instruction;
};

/// Innermost first.
using Trace = std::vector<TracedFrame>;

/// The stack of this thread. Takes the GIL, so empty on a thread that Python does not know: whoever waits for that
/// one may have it. No variable of a frame is kept, only its code. Throws nothing: empty without memory.
Trace trace_now() noexcept;

/// New list of (file, function, line). With the GIL.
PyObject* described(const Trace& trace);

/// Lets go of the codes of all traces, which are not to be described any more. With the GIL.
void forget_codes();

}  // namespace zbp
