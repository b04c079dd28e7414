#include "shim/memory/traces.h"

#include <new>
#include <unordered_set>

#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "shim/torch/gil.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

/// Of all traces, each owned once. Touched with the GIL alone.
std::unordered_set<PyCodeObject*>& codes() {
  static auto* const all = new std::unordered_set<PyCodeObject*>;
  return *all;
}

}  // namespace

Trace trace_now() noexcept {
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) {
    return {};
  }
  const AcquireGil gil;
  Trace trace;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  try {
    while (frame != nullptr) {
      PyCodeObject* const code = PyFrame_GetCode(frame);
      if (!codes().insert(code).second) {
        Py_DECREF(code);
      }
      trace.push_back({code, PyFrame_GetLasti(frame)});
      PyFrameObject* const back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
  } catch (const std::bad_alloc&) {
    Py_XDECREF(frame);
    trace.clear();
  }
  return trace;
}

PyObject* described(const Trace& trace) {
  THPObjectPtr list = new_list();
  for (const auto& [code, instruction] : trace) {
    append(list, Py_BuildValue("(OOi)", code->co_filename, code->co_name,
                               PyCode_Addr2Line(code, instruction)));
  }
  return list.release();
}

void forget_codes() {
  std::unordered_set<PyCodeObject*> mine;
  mine.swap(codes());
  for (PyCodeObject* const code : mine) {
    Py_DECREF(code);
  }
}

}  // namespace zbp
