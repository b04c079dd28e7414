// Exceptions on their way through C: from the shim, through csrc/pass and the bindings, to where
// they become Python's.
#pragma once

#include <Python.h>

#include <new>
#include <string>

#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/torch/zbp_error.h"

namespace zbp {

/// Thrown when an argument is refused. `type` is borrowed (a static exception type).
struct Refused {
  PyObject* type;
  std::string message;
};

template <class... Parts>
[[noreturn]] void refuse(PyObject* type, const Parts&... parts) {
  throw Refused{type, c10::str(parts...)};
}

/// Keeps the exception that is being handled in `error`, unless one is there already; gives the
/// status. Python's errors are taken off the thread.
int keep_exception(zbp_error* error) noexcept;

/// The barrier: runs `body`; an exception ends up in `error`.
template <class Body>
int kept_in(zbp_error* error, const Body& body) noexcept {
  try {
    body();
    return ZBP_OK;
  } catch (...) {
    return keep_exception(error);
  }
}

/// The barrier of a call that has the GIL: what libtorch warns of in `body` becomes Python's
/// warnings at its end. One that is an error ends up in `error`; if the body has thrown, or unless
/// it `raises_warnings`, it is printed.
int guarded(zbp_error* error, c10::function_ref<void()> body, bool raises_warnings = true) noexcept;

/// The same for a body that gives a new reference: NULL if `error` has something.
template <class Body>
PyObject* guarded_object(zbp_error* error, const Body& body) noexcept {
  THPObjectPtr result;
  const int status = guarded(error, [&] { result = THPObjectPtr(body()); });
  return status == ZBP_OK ? result.release() : nullptr;
}

/// Throws unless the status is ZBP_OK: what `error` keeps, which is cleared, or what stands for it.
void check_status(int status, zbp_error& error);

/// The same for the core's status. Asked per node and edge.
C10_ALWAYS_INLINE void check_status(int status) {
  TORCH_CHECK_WITH(OutOfMemoryError, status != ZBP_ENOMEM, "zbpipe: out of memory");
  TORCH_CHECK(status == ZBP_OK, "zbpipe: a status of ", status, " without an error");
}

}  // namespace zbp
