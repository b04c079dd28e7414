// The tensors in DLPack capsules, and the numpy arrays behind storages.
#include "instruments/shim/handle.h"

#include <array>
#include <cstring>

#include <ATen/DLConvertor.h>
#include <ATen/Functions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/utils/tensor_numpy.h>

#include "shim/torch/python.h"

namespace zbp {

namespace {

/// As at::toDLPack makes it: the tensor comes first in what manager_ctx points to
/// (ATen/DLConvertor.cpp).
template <class Managed>
const at::Tensor* tensor_in(const Managed* managed, const Managed* made_here) {
  return managed && managed->deleter == made_here->deleter
             ? static_cast<const at::Tensor*>(managed->manager_ctx)
             : nullptr;
}

/// While it lives, the caller's modes and transforms (functorch's, fake tensors) see no operation.
struct Plainly {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKeySet(
      {c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
       c10::DispatchKey::FuncTorchDynamicLayerBackMode, c10::DispatchKey::Functionalize,
       c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
};

/// One of torch's own of no elements, to know its deleter by. Never destroyed.
template <class Managed>
const Managed* example() {
  static const Managed* const managed = [] {
    const Plainly plainly;
    return at::DLPackTraits<Managed>::toDLPack(at::empty({0}));
  }();
  return managed;
}

template <class Managed>
const at::Tensor* tensor_named(PyObject* capsule, std::array<const char*, 2> names) {
  for (const char* name : names) {
    if (PyCapsule_IsValid(capsule, name)) {
      return tensor_in(static_cast<const Managed*>(PyCapsule_GetPointer(capsule, name)),
                       example<Managed>());
    }
  }
  return nullptr;
}

using FunctionContext = c10::InefficientStdFunctionContext;

const FunctionContext* function_behind(c10::StorageImpl& storage) {
  static const c10::DeleterFnPtr deleter =
      FunctionContext::makeDataPtr(nullptr, [](void*) {}, c10::kCPU).get_deleter();
  return storage._mutable_data_ptr_no_checks().cast_context<const FunctionContext>(deleter);
}

PyObject* captured_by(const FunctionContext* context) {
  PyObject* object = nullptr;
  std::memcpy(&object, &context->deleter_, sizeof object);
  return object;
}

}  // namespace

// torch's function that lets go of an array has captured it, and nothing else
// (torch/csrc/utils/tensor_numpy.cpp). It is known by an example, which must have captured its own.
PyObject* numpy_array_of(c10::StorageImpl& storage) {
  static const FunctionContext* known = nullptr;
  static bool is_tried = false;
  const FunctionContext* const its = function_behind(storage);
  PyObject* const numpy =
      its && !is_tried ? PyDict_GetItemString(PyImport_GetModuleDict(), "numpy") : nullptr;
  if (numpy) {
    is_tried = true;
    try {
      const Plainly plainly;
      THPObjectPtr array = checked(PyObject_CallMethod(numpy, "ndarray", "i", 1));
      static at::Tensor& example = *new at::Tensor(torch::utils::tensor_from_numpy(array));
      auto* const made = storage_in(*example.unsafeGetTensorImpl());
      const auto* const found = made ? function_behind(*made) : nullptr;
      known = found && captured_by(found) == array.get() ? found : nullptr;
    } catch (const std::exception&) {  // torch cannot use this numpy
      PyErr_Clear();
    }
  }
  return known && its && its->deleter_.target_type() == known->deleter_.target_type()
             ? captured_by(its)
             : nullptr;
}

const at::Tensor* tensor_of_capsule(PyObject* capsule) {
  if (!PyCapsule_CheckExact(capsule)) {
    return nullptr;
  }
  // numpy names those that it has taken over anew.
  if (const auto* tensor = tensor_named<DLManagedTensor>(capsule, {"dltensor", "numpy_dltensor"})) {
    return tensor;
  }
  return tensor_named<DLManagedTensorVersioned>(capsule,
                                                {"dltensor_versioned", "numpy_dltensor_versioned"});
}

}  // namespace zbp
