#include "shim/torch/error.h"

#include <exception>
#include <memory>
#include <utility>

#include "shim/torch/gil.h"

namespace zbp {

namespace {

std::unique_ptr<std::exception_ptr> take(zbp_error& error) noexcept {
  return std::unique_ptr<std::exception_ptr>(
      static_cast<std::exception_ptr*>(std::exchange(error.raised, nullptr)));
}

}  // namespace

int keep_exception(zbp_error* error) noexcept {
  try {
    try {
      throw;
    } catch (python_error& python) {
      python.persist();
      // The engine sets what it throws as the thread's error, too.
      const AcquireGil gil;
      PyErr_Clear();
      throw;
    }
  } catch (...) {
    if (!error->raised) {
      error->raised = new (std::nothrow) std::exception_ptr(std::current_exception());
    }
  }
  return error->raised ? ZBP_ETORCH : ZBP_ENOMEM;
}

int guarded(zbp_error* error, c10::function_ref<void()> body, bool raises_warnings) noexcept {
  return kept_in(error, [&] {
    torch::PyWarningHandler warnings;
    if (!raises_warnings) {
      warnings.set_in_exception();
    }
    try {
      body();
    } catch (...) {
      warnings.set_in_exception();  // lest its own end throws another
      throw;
    }
  });
}

void check_status(int status, zbp_error& error) {
  const auto raised = status != ZBP_OK ? take(error) : nullptr;
  if (raised) {
    std::rethrow_exception(*raised);
  }
  check_status(status);
}

}  // namespace zbp

void zbp_error_clear(zbp_error* error) {
  zbp::take(*error);
}

PyObject* zbp_error_raise(zbp_error* error) {
  const auto raised = zbp::take(*error);
  if (!raised) {
    return PyErr_NoMemory();  // not even for an exception there was any
  }
  try {
    std::rethrow_exception(*raised);
  } catch (const zbp::Refused& refused) {
    PyErr_SetString(refused.type, refused.message.c_str());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception&) {
    torch::translate_exception_to_python(std::current_exception());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "zbpipe: something was thrown that is no exception");
  }
  return nullptr;
}
