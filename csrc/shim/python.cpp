#include "shim/python.h"

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "shim/kinds.h"

namespace zbp {

const at::Tensor* as_tensor(PyObject* object) {
  return THPVariable_Check(object) ? &THPVariable_Unpack(object) : nullptr;
}

namespace {

NodePtr as_node(PyObject* object) {
  if (THPFunction_Check(object)) {
    return lock_py_node(reinterpret_cast<THPFunction*>(object)->cdata);
  }
  if (torch::autograd::THPCppFunction_Check(object)) {
    return reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata;
  }
  return nullptr;
}

std::string describe(c10::ScalarType type, c10::SymIntArrayRef shape, c10::Device device) {
  return c10::str(type, " ", shape, " on ", device);
}

}  // namespace

std::optional<Edge> as_gradient_edge(PyObject* object) {
  const int is_edge = PyObject_IsInstance(object, THPGradientEdgeClass);
  if (is_edge < 0) {
    throw python_error();
  }
  if (!is_edge) {
    return std::nullopt;
  }
  THPObjectPtr node(PyObject_GetAttrString(object, "node"));
  THPObjectPtr output_nr(PyObject_GetAttrString(object, "output_nr"));
  if (!node || !output_nr) {
    throw python_error();
  }
  int overflow = 0;
  const long nr = PyLong_AsLongAndOverflow(output_nr, &overflow);
  if (nr == -1 && PyErr_Occurred()) {
    throw python_error();
  }
  Edge edge(as_node(node), 0);
  if (!edge.is_valid()) {
    refuse(PyExc_TypeError, "a GradientEdge's node is a ", Py_TYPE(node.get())->tp_name,
           "; expected a node of an autograd graph that still exists");
  }
  if (overflow || nr < 0 || static_cast<unsigned long>(nr) >= edge.function->num_inputs()) {
    refuse(PyExc_ValueError, "a GradientEdge names output ",
           overflow ? "beyond any" : std::to_string(nr), " of ", edge.function->name(),
           ", which has ", edge.function->num_inputs());
  }
  edge.input_nr = static_cast<uint32_t>(nr);
  return edge;
}

std::string describe(const at::Tensor& tensor) {
  if (tensor.is_nested() && !is_subclass(tensor)) {
    return "a nested tensor";
  }
  return describe(tensor.scalar_type(), tensor.sym_sizes(), tensor.device());
}

std::string describe(const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  if (metadata.is_cpp_nested_tensor()) {
    return "a nested tensor";
  }
  return describe(c10::typeMetaToScalarType(metadata.dtype()), metadata.shape_as_dim_vector(),
                  metadata.device());
}

bool fits(const at::Tensor& grad, const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  return metadata.is_cpp_nested_tensor() == (grad.is_nested() && !is_subclass(grad)) &&
         metadata.is_same_shape(grad) && grad.dtype() == metadata.dtype() &&
         grad.device() == metadata.device();
}

}  // namespace zbp
