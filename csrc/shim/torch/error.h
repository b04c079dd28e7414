// Exceptions on their way through C: from the shim, through csrc/pass, to where they become Python's.
#pragma once

#include <exception>
#include <new>

#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include "core/base/zbp_status.h"
#include "shim/torch/zbp_error.h"

namespace zbp {

/// Keeps the exception that is being handled in `error`, unless one is there already; gives the status. Python's
/// errors are taken off the thread.
int keep_exception(zbp_error* error) noexcept;

/// The barrier of functions that report to a zbp_error: runs `body`; an exception ends up in `error`.
template <class Body>
int kept_in(zbp_error* error, const Body& body) noexcept {
  try {
    body();
    return ZBP_OK;
  } catch (...) {
    return keep_exception(error);
  }
}

/// Throws what `error` keeps, which is cleared; for a status that keeps nothing, what stands for it.
[[noreturn]] void rethrow(zbp_error& error, int status);

/// Throws unless the core's status is ZBP_OK.
inline void check_status(int status) {
  TORCH_CHECK_WITH(OutOfMemoryError, status != ZBP_ENOMEM, "zbpipe: out of memory");
  TORCH_CHECK(status == ZBP_OK, "zbpipe: the core refused with ", zbp_status_name(status));
}

}  // namespace zbp
