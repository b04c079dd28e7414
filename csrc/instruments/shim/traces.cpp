#include "instruments/shim/zbp_traces.h"

#include <atomic>
#include <map>
#include <new>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "shim/torch/gil.h"
#include "shim/torch/python.h"

namespace {

using namespace zbp;

/// Innermost first: each frame's code, which Traces owns, and its instruction. No variable is kept.
using Stack = std::vector<std::pair<PyCodeObject*, int>>;

/// Never destroyed: tensors are made until the process ends.
struct Traces {
  std::map<Stack, uint64_t> numbers;
  std::vector<const Stack*> stacks;         // by their numbers, from `first` on
  uint64_t first = 1;                       // rises: no number is given twice
  std::unordered_set<PyCodeObject*> codes;  // each owned once
  std::atomic<int> tracers{0};              // to be read without the GIL, too
};

Traces& traces() {
  static auto* const all = new Traces;
  return *all;
}

}  // namespace

void zbp_trace_start(void) {
  ++traces().tracers;
}

void zbp_trace_stop(void) {
  Traces& t = traces();
  if (--t.tracers != 0) {
    return;
  }
  t.first += t.stacks.size();
  t.stacks.clear();
  t.numbers.clear();
  decltype(t.codes) mine;
  mine.swap(t.codes);
  for (PyCodeObject* const code : mine) {
    Py_DECREF(code);
  }
}

uint64_t zbp_trace_here(void) {
  Traces& t = traces();
  if (t.tracers.load(std::memory_order_relaxed) == 0 || !Py_IsInitialized() ||
      PyGILState_GetThisThreadState() == nullptr) {
    return 0;
  }
  const AcquireGil gil;
  if (t.tracers == 0) {  // the last one has stopped while this thread waited
    return 0;
  }
  // A collection might run Python code, which may end the tracing.
  const bool collects = PyGC_Disable() != 0;
  const auto put_back = c10::make_scope_exit([collects] {
    if (collects) {
      PyGC_Enable();
    }
  });
  Stack stack;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  try {
    while (frame != nullptr) {
      PyCodeObject* const code = PyFrame_GetCode(frame);
      if (!t.codes.insert(code).second) {
        Py_DECREF(code);
      }
      stack.emplace_back(code, PyFrame_GetLasti(frame));
      PyFrameObject* const back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    auto known = t.numbers.find(stack);
    if (known == t.numbers.end()) {
      t.stacks.push_back(nullptr);  // stays there, and its number unused, if there is no memory now
      known = t.numbers.emplace(std::move(stack), t.first + t.stacks.size() - 1).first;
      t.stacks.back() = &known->first;
    }
    return known->second;
  } catch (const std::bad_alloc&) {
    Py_XDECREF(frame);
    return 0;
  }
}

PyObject* zbp_trace_of(uint64_t number, zbp_error* error) {
  return guarded_object(error, [&] {
    const Traces& t = traces();
    const uint64_t at = number - t.first;  // far beyond the last for an older one
    const Stack stack = at < t.stacks.size() ? *t.stacks[at] : Stack();
    // What is made of them may run Python code, and that end the tracing.
    std::vector<THPObjectPtr> kept;
    for (const auto& frame : stack) {
      kept.emplace_back(Py_NewRef(reinterpret_cast<PyObject*>(frame.first)));
    }
    THPObjectPtr list = checked(PyList_New(0));
    for (const auto& [code, instruction] : stack) {
      append(list, Py_BuildValue("(OOi)", code->co_filename, code->co_name,
                                 PyCode_Addr2Line(code, instruction)));
    }
    return list.release();
  });
}
