// The global interpreter lock. See each function's contract for who must hold it.
#pragma once

#include <unistd.h>

#include <Python.h>

#include <c10/macros/Macros.h>

namespace zbp {

/// What `take` returns, which takes the GIL. Note [A daemon thread at the interpreter's end]
///
/// Up to Python 3.13 a thread that asks for the GIL of an interpreter that is ending is ended: by
/// unwinding it, which is the end of the process in the first function that must not throw, and
/// the engine and every destructor is one. So it stays where it is, as in later Pythons, and the
/// process ends around it.
template <class Take>
auto take_gil(Take take) noexcept -> decltype(take()) {
  try {
    return take();
  } catch (...) {  // not an exception: none can come from Python
    for (;;) {
      pause();
    }
  }
}

class ReleaseGil {
 public:
  ReleaseGil() : state_(PyEval_SaveThread()) {}
  ~ReleaseGil() {
    take_gil([this] { PyEval_RestoreThread(state_); });
  }
  C10_DISABLE_COPY_AND_ASSIGN(ReleaseGil);

 private:
  PyThreadState* state_;
};

class AcquireGil {
 public:
  AcquireGil() : state_(take_gil(PyGILState_Ensure)) {}
  ~AcquireGil() { PyGILState_Release(state_); }
  C10_DISABLE_COPY_AND_ASSIGN(AcquireGil);

 private:
  PyGILState_STATE state_;
};

}  // namespace zbp
