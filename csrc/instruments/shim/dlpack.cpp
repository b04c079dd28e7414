// The tensors in DLPack capsules.
#include "instruments/shim/handle.h"

#include <array>

#include <ATen/DLConvertor.h>
#include <ATen/Functions.h>

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

/// One of torch's own of no elements, to know its deleter by. Never destroyed.
template <class Managed>
const Managed* example() {
  static const Managed* const managed = at::DLPackTraits<Managed>::toDLPack(at::empty({0}));
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

}  // namespace

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
