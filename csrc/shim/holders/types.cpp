#include "shim/holders/types.h"

#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "shim/holders/scripts.h"

namespace zbp {

namespace {

PyTypeObject* as_type(PyObject* object) {
  return reinterpret_cast<PyTypeObject*>(object);
}

}  // namespace

Types::Types(PyTypeObject* group, PyTypeObject* work, PyTypeObject* array)
    : group_(group),
      work_(work),
      array_(array),
      saved_(as_type(
          py::detail::get_type_handle(typeid(torch::autograd::SavedVariable), false).ptr())),
      script_(script_object_type()),
      script_module_(script_module_type()) {}

Type Types::of(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  constexpr unsigned long atoms =
      Py_TPFLAGS_UNICODE_SUBCLASS | Py_TPFLAGS_LONG_SUBCLASS | Py_TPFLAGS_BYTES_SUBCLASS;
  if ((type->tp_flags & atoms) && !(type->tp_flags & Py_TPFLAGS_HAVE_GC)) {
    return Type::skipped;
  }
  const auto known = known_.find(type);
  if (known != known_.end()) {
    return known->second;
  }
  const auto is = [&](PyTypeObject* base) { return base && PyType_IsSubtype(type, base); };
  Type result = type->tp_flags & Py_TPFLAGS_HAVE_GC ? Type::plain : Type::skipped;
  if (is(as_type(THPVariableClass))) {
    result = Type::tensor;
  } else if (is(THPStorageClass)) {
    result = Type::storage;
  } else if (is(&THPFunctionType)) {
    result = Type::py_node;
  } else if (torch::autograd::THPCppFunction_Check(object)) {
    result = Type::cpp_node;
  } else if (type == group_) {
    result = Type::group;
  } else if (is(work_)) {
    result = Type::work;
  } else if (is(saved_)) {
    result = Type::saved;
  } else if (is(array_)) {
    result = Type::array;
  } else if (PyCapsule_CheckExact(object)) {
    result = Type::capsule;
  } else if (is(script_)) {
    result = Type::script;
  } else if (is(script_module_)) {
    result = Type::script_module;
  }
  known_.emplace(type, result);
  return result;
}

}  // namespace zbp
