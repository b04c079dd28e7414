#include "instruments/shim/zbp_traces.h"

#include <atomic>
#include <mutex>
#include <new>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "shim/torch/gil.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

/// No variable of a frame is kept, only its code.
struct TracedFrame {
  PyCodeObject* code;  // alive until the last zbp_trace_stop()
  int instruction;
};

/// Never destroyed: tensors are freed until the process ends.
struct Traces {
  std::mutex mutex;
  std::unordered_map<uint64_t, std::vector<TracedFrame>> of_block;  // innermost first
  std::unordered_set<PyCodeObject*> codes;  // each owned once; touched with the GIL alone
  // To be read without the lock:
  std::atomic<size_t> count{0};
  std::atomic<int> tracers{0};  // written with the GIL
};

Traces& traces() {
  static auto* const all = new Traces;
  return *all;
}

}  // namespace

}  // namespace zbp

using namespace zbp;

void zbp_trace_start(void) {
  ++traces().tracers;
}

void zbp_trace_stop(void) {
  Traces& t = traces();
  if (--t.tracers != 0) {
    return;
  }
  decltype(t.of_block) dead;
  {
    const std::lock_guard<std::mutex> lock(t.mutex);
    dead.swap(t.of_block);
    t.count = 0;
  }
  decltype(t.codes) mine;
  mine.swap(t.codes);
  for (PyCodeObject* const code : mine) {
    Py_DECREF(code);
  }
}

void zbp_trace_keep(uint64_t address) {
  Traces& t = traces();
  if (t.tracers.load(std::memory_order_relaxed) == 0 || !Py_IsInitialized() ||
      PyGILState_GetThisThreadState() == nullptr) {
    return;
  }
  const AcquireGil gil;
  if (t.tracers == 0) {  // the last one has stopped while this thread waited
    return;
  }
  std::vector<TracedFrame> frames;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  try {
    while (frame != nullptr) {
      PyCodeObject* const code = PyFrame_GetCode(frame);
      if (!t.codes.insert(code).second) {
        Py_DECREF(code);
      }
      frames.push_back({code, PyFrame_GetLasti(frame)});
      PyFrameObject* const back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    const std::lock_guard<std::mutex> lock(t.mutex);
    t.of_block.insert_or_assign(address, std::move(frames));
    t.count = t.of_block.size();
  } catch (const std::bad_alloc&) {
    Py_XDECREF(frame);
  }
}

void zbp_trace_forget(uint64_t address) {
  Traces& t = traces();
  if (t.count.load(std::memory_order_relaxed) == 0) {
    return;
  }
  decltype(t.of_block)::node_type dead;  // goes when the lock is given back
  const std::lock_guard<std::mutex> lock(t.mutex);
  dead = t.of_block.extract(address);
  t.count = t.of_block.size();
}

void zbp_trace_lock(void) {
  traces().mutex.lock();
}

void zbp_trace_unlock(void) {
  traces().mutex.unlock();
}

PyObject* zbp_trace_of(uint64_t address, zbp_error* error) {
  return guarded_object(error, [&] {
    Traces& t = traces();
    std::vector<TracedFrame> frames;
    {
      const std::lock_guard<std::mutex> lock(t.mutex);
      if (const auto found = t.of_block.find(address); found != t.of_block.end()) {
        frames = found->second;
      }
    }
    // What is made of them may run Python code, and that end the tracing.
    std::vector<THPObjectPtr> kept;
    for (const TracedFrame& frame : frames) {
      kept.emplace_back(Py_NewRef(reinterpret_cast<PyObject*>(frame.code)));
    }
    THPObjectPtr list = checked(PyList_New(0));
    for (const auto& [code, instruction] : frames) {
      append(list, Py_BuildValue("(OOi)", code->co_filename, code->co_name,
                                 PyCode_Addr2Line(code, instruction)));
    }
    return list.release();
  });
}
