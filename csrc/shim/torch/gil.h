// The global interpreter lock. See each function's contract for who must hold it.
#pragma once

#include <unistd.h>

#include <mutex>
#include <thread>

#include <Python.h>

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
  ReleaseGil(const ReleaseGil&) = delete;
  ReleaseGil& operator=(const ReleaseGil&) = delete;

 private:
  PyThreadState* state_;
};

class AcquireGil {
 public:
  AcquireGil() : state_(take_gil(PyGILState_Ensure)) {}
  ~AcquireGil() { PyGILState_Release(state_); }
  AcquireGil(const AcquireGil&) = delete;
  AcquireGil& operator=(const AcquireGil&) = delete;

 private:
  PyGILState_STATE state_;
};

/// Locks a node's mutex. Whoever has such a mutex may wait for the GIL (libtorch's accumulators do,
/// for subclasses), so nobody waits for one with the GIL in hand.
inline std::unique_lock<std::mutex> lock_letting_go_of_gil(std::mutex& mutex) {
  std::unique_lock<std::mutex> lock(mutex, std::defer_lock);
  if (!PyGILState_Check()) {
    lock.lock();
  }
  while (!lock && !lock.try_lock()) {
    const ReleaseGil no_gil;
    std::this_thread::yield();
  }
  return lock;
}

}  // namespace zbp
