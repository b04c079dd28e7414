// What TorchScript's modules and objects refer to.
#pragma once

#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

namespace zbp {

/// torch._C.ScriptObject, borrowed.
PyTypeObject* script_object_type();
/// torch.jit.ScriptModule, which has one of these as its attribute _c; borrowed. Null where torch has none.
PyTypeObject* script_module_type();

/// Visits the tensors in the slots of a torch._C.ScriptObject and of all objects in them, each slot once.
void visit_script(PyObject* object, c10::function_ref<void(const at::Tensor&)> visit);

}  // namespace zbp
