#include "shim/torch/error.h"

#include <memory>
#include <utility>

namespace zbp {

int keep_exception(zbp_error* error) noexcept {
  try {
    try {
      throw;
    } catch (python_error& python) {
      python.persist();
      throw;
    }
  } catch (...) {
    if (!error->raised) {
      error->raised = new (std::nothrow) std::exception_ptr(std::current_exception());
    }
  }
  return error->raised ? ZBP_ETORCH : ZBP_ENOMEM;
}

void rethrow(zbp_error& error, int status) {
  const std::unique_ptr<std::exception_ptr> raised(
      static_cast<std::exception_ptr*>(std::exchange(error.raised, nullptr)));
  if (raised) {
    std::rethrow_exception(*raised);
  }
  check_status(status);
  TORCH_INTERNAL_ASSERT(false, "nothing was raised");
}

}  // namespace zbp

void zbp_error_clear(zbp_error* error) {
  delete static_cast<std::exception_ptr*>(std::exchange(error->raised, nullptr));
}
