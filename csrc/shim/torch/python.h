// Between Python objects and libtorch, for the files that implement the shim's C interfaces.
#pragma once

#include <initializer_list>
#include <optional>

#include <torch/csrc/autograd/saved_variable.h>

#include "shim/torch/compat.h"
#include "shim/torch/error.h"

namespace zbp {

inline const char* type_name(PyObject* object) {
  return Py_TYPE(object)->tp_name;
}

/// Throws the Python error that is set as a python_error, which outlives the thread's state: that
/// of one of the engine's threads ends with the GIL.
[[noreturn]] void throw_error();
/// Takes over `object`. Throws python_error for NULL.
THPObjectPtr checked(PyObject* object);
/// Forgets the Python error that is set, if one is: what could not be asked is not so. But nobody's
/// Ctrl-C is lost: that is thrown.
void forget_error();
/// Takes over `value`, which may be null with an error set. Throws python_error.
void append(PyObject* list, PyObject* value);
/// New; None for what is undefined. Throws python_error.
PyObject* wrap_tensor(const at::Tensor& tensor);
/// New tuple of such.
PyObject* wrap_tensors(const variable_list& tensors);
/// The tensors of a list; undefined for what is none.
variable_list tensors_in(PyObject* list);
/// New tuple of ints, -1 for a size that is not known as a number.
PyObject* wrap_sizes(c10::SymIntArrayRef sizes);

/// What a function of one of zbpipe's modules returns; arguments are borrowed. Throws python_error.
THPObjectPtr call_python(const char* module, const char* function,
                         std::initializer_list<PyObject*> arguments);

/// The int in `number`; the highest or the lowest Py_ssize_t for a huge one. Throws python_error.
Py_ssize_t as_position(PyObject* number);

/// The tensor in `object`, or nothing if it holds none. Borrowed from `object`.
const at::Tensor* as_tensor(PyObject* object);

/// The edge in `object`, or nothing if it is no torch.autograd.graph.GradientEdge.
std::optional<Edge> as_gradient_edge(PyObject* object);

using torch::autograd::SavedVariable;

/// Calls `visit` with everything that a node which libtorch generated has saved, its name, and its
/// place in a list or -1; nothing is unpacked, and no Python object is made for the node. None of
/// the lists that a backward has released. False if libtorch does not tell what nodes of this type
/// save. Called with the GIL held.
bool for_each_saved(Node& node,
                    c10::function_ref<void(SavedVariable&, const char* name, int32_t index)> visit);

/// The context of a Python Function's node. Called with the GIL held. Throws python_error.
THPObjectPtr context_of(Node& node);

/// Everything that `node` has saved, also a Python Function's. Borrowed from the node. Called with
/// the GIL held.
std::vector<SavedVariable*> saved_by(Node& node);

/// A tensor, or the gradient that an edge takes, as "float32[2, 3] on cpu", for messages.
std::string described(c10::ScalarType type, c10::SymIntArrayRef shape, c10::Device device);
std::string describe(const at::Tensor& tensor);
std::string describe(const Edge& edge);

/// True if `grad` has the shape, dtype and device that the engine expects at `edge`.
bool fits(const at::Tensor& grad, const Edge& edge);

}  // namespace zbp
