#include "shim/holders/scripts.h"

#include <typeinfo>
#include <unordered_set>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/csrc/jit/api/object.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

namespace zbp {

PyTypeObject* script_object_type() {
  return reinterpret_cast<PyTypeObject*>(
      py::detail::get_type_handle(typeid(torch::jit::Object), false).ptr());
}

PyTypeObject* script_module_type() {
  THPObjectPtr name(PyUnicode_FromString("torch.jit"));
  THPObjectPtr module(name ? PyImport_GetModule(name) : nullptr);
  THPObjectPtr type(module ? PyObject_GetAttrString(module, "ScriptModule") : nullptr);
  PyErr_Clear();
  // The module has it.
  return type && PyType_Check(type.get()) ? reinterpret_cast<PyTypeObject*>(type.get()) : nullptr;
}

void visit_script(PyObject* object, c10::function_ref<void(const at::Tensor&)> visit) {
  std::vector<c10::IValue> values;
  try {
    values.emplace_back(py::cast<const torch::jit::Object*>(py::handle(object))->_ivalue());
  } catch (const c10::Error&) {  // not initialised
    return;
  }
  std::unordered_set<const void*> seen;  // objects may refer to each other
  while (!values.empty()) {
    const c10::IValue value = std::move(values.back());
    values.pop_back();
    if (value.isTensor()) {
      visit(value.toTensor());
    } else if (value.isObject()) {
      const auto& slots = value.toObjectRef().slots();
      if (seen.insert(&value.toObjectRef()).second) {
        values.insert(values.end(), slots.begin(), slots.end());
      }
    } else if (value.isList()) {
      const auto items = value.toListRef();
      values.insert(values.end(), items.begin(), items.end());
    } else if (value.isTuple()) {
      const auto& items = value.toTupleRef().elements();
      values.insert(values.end(), items.begin(), items.end());
    } else if (value.isGenericDict()) {
      for (const auto& entry : value.toGenericDict()) {
        values.push_back(entry.value());
      }
    }
  }
}

}  // namespace zbp
