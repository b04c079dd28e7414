// Between Python objects and libtorch, for the files that implement zbp_shim.h.
#pragma once

#include <Python.h>

#include <optional>
#include <string>

#include <c10/util/FunctionRef.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "core/base/zbp_status.h"
#include "shim/pass/group.h"

struct zbp_group {
  zbp::GroupPtr group;
};

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

/// Runs `body`; an exception becomes the Python error. ZBP_OK or ZBP_EPYTHON.
int run_for_python(torch::PyWarningHandler& warnings, c10::function_ref<void()> body) noexcept;

/// What the end of a handler of warnings has thrown becomes the Python error. ZBP_EPYTHON.
int warning_became_error() noexcept;

/// The exception barrier: runs `body`; on an exception sets the Python error.
template <class Body>
int guarded(const Body& body) noexcept {
  try {
    torch::PyWarningHandler warnings;
    const int status = run_for_python(warnings, body);
    return status;
  } catch (...) {
    return warning_became_error();
  }
}

/// The barrier of a call that is spread over several functions: from begin() to end() its warnings are collected.
class Barrier {
 public:
  Barrier() = default;
  ~Barrier() { delete warnings_; }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;

  /// Not within another barrier's body: handlers end in the opposite order. ZBP_OK or ZBP_EPYTHON.
  int begin() noexcept;
  /// Runs `body`, as guarded() does, and raises the warnings.
  int end(c10::function_ref<void()> body) noexcept;

 private:
  torch::PyWarningHandler* warnings_ = nullptr;  // not by value: its end may throw
};

/// The same for a body that gives a new reference: NULL if the Python error is set. A warning that is an error raises
/// when the body is through; then the result goes.
template <class Body>
PyObject* guarded_object(const Body& body) noexcept {
  THPObjectPtr result;
  const int status = guarded([&] { result = THPObjectPtr(body()); });
  return status == ZBP_OK ? result.release() : nullptr;
}

/// Of a borrowed result of PySequence_Fast().
inline Py_ssize_t size_of(PyObject* seq) {
  return PySequence_Fast_GET_SIZE(seq);
}

inline PyObject* item(PyObject* seq, Py_ssize_t i) {
  return PySequence_Fast_GET_ITEM(seq, i);
}

inline const char* type_name(PyObject* object) {
  return Py_TYPE(object)->tp_name;
}

/// Python objects in the making; both throw python_error. append() takes over `value`, which may be null with an
/// error set.
THPObjectPtr new_list();
void append(PyObject* list, PyObject* value);
/// New tuple; None for what is undefined.
PyObject* wrap_tensors(const variable_list& tensors);

/// The tensor in `object`, or nothing if it holds none. Borrowed from `object`.
const at::Tensor* as_tensor(PyObject* object);

/// The edge in `object`, or nothing if it is no torch.autograd.graph.GradientEdge.
std::optional<Edge> as_gradient_edge(PyObject* object);

using torch::autograd::SavedVariable;

/// Calls `visit` with everything that a node which libtorch generated has saved, its name, and its place in a list
/// or -1; nothing is unpacked, and no Python object is made for the node. None of the lists that a backward has
/// released. False if libtorch does not tell what nodes of this type save. Called with the GIL held.
bool for_each_saved(Node& node,
                    c10::function_ref<void(SavedVariable&, const char* name, int32_t index)> visit);

/// Everything that `node` has saved, also a Python Function's. Borrowed from the node. Called with the GIL held.
std::vector<SavedVariable*> saved_by(Node& node);

/// `function(parameter)`, an int.
int ask(PyObject* function, const at::Tensor& parameter);

/// A tensor, or the gradient that an edge takes, as "Float [2, 3] on cpu", for messages.
std::string describe(const at::Tensor& tensor);
std::string describe(const Edge& edge);

/// True if `grad` has the shape, dtype and device that the engine expects at `edge`.
bool fits(const at::Tensor& grad, const Edge& edge);

}  // namespace zbp
