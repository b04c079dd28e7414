// What is behind zbp_holders.h.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <string>
#include <variant>

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "instruments/shim/zbp_holders.h"
#include "shim/torch/compat.h"
#include "shim/torch/error.h"

namespace zbp {

using TensorRef = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using StorageRef = c10::intrusive_ptr<c10::StorageImpl>;

struct Handle {
  PyObject_HEAD std::variant<TensorRef, StorageRef, NodePtr> thing;

  const void* address() const;
  /// Null unless it is one.
  c10::TensorImpl* tensor() const;
  c10::StorageImpl* storage() const;
  Node* node() const;
};

/// What a function that Python has called returns: a new reference from `body`, or NULL with what
/// that threw as the Python error.
template <class Body>
PyObject* answer_of(const Body& body) {
  zbp_error error = {};
  PyObject* const answer = guarded_object(&error, body);
  return answer ? answer : zbp_error_raise(&error);
}

/// Null if `object` is no handle; borrowed.
Handle* as_handle(PyObject* object);

/// By its type alone: isinstance() would run the code of whoever fakes __class__.
template <class Class>
bool is_one(PyObject* object, Class* base) {
  return base && PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(base));
}

/// The tensor or storage that `object` is, null for others and for empty ones; borrowed.
inline c10::TensorImpl* tensor_in(PyObject* object) {
  return is_one(object, THPVariableClass) && THPVariable_Unpack(object).defined()
             ? THPVariable_Unpack(object).unsafeGetTensorImpl()
             : nullptr;
}
inline c10::StorageImpl* storage_in(PyObject* object) {
  return is_one(object, THPStorageClass) && THPStorage_Unpack(object)
             ? THPStorage_Unpack(object).unsafeGetStorageImpl()
             : nullptr;
}
/// Null if it has none.
inline c10::StorageImpl* storage_in(const c10::TensorImpl& tensor) {
  return tensor.has_storage() ? tensor.unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

/// The tensor that a DLPack capsule of torch's holds, whoever has it now; null for any other
/// object.
const at::Tensor* tensor_of_capsule(PyObject* capsule);

/// The numpy array whose memory a storage has; null for others; borrowed.
PyObject* numpy_array_of(c10::StorageImpl& storage);

/// New; null for what is being destroyed: its last reference has gone.
THPObjectPtr handle_of(const c10::TensorImpl* tensor);
THPObjectPtr handle_of(const c10::StorageImpl* storage);
THPObjectPtr handle_of(const Node* node);

/// Whether there is a handle that owns what lies there.
bool is_owned(const void* address);

/// The opcodes that set and that delete an attribute, in this Python.
const std::array<int, 2>& attribute_opcodes();

/// Calls `visit` with the tensors that one which has no storage of its own, or more than that, is
/// made of: a sparse one's indices and values, a nested one's sizes, a quantized one's scales.
void for_each_component(const c10::TensorImpl& tensor,
                        c10::function_ref<void(const at::Tensor&, const char* label)> visit);

/// (address, bytes, device, is_foreign): see Handle.memory.
PyObject* memory_of(c10::StorageImpl& storage);

/// The list that zbp_references_of() gives, in the making. Throws python_error.
class References {
 public:
  References();
  void add(const at::Tensor& tensor, const char* label, int32_t index = -1);
  void add(PyObject* object, const char* label, int32_t index = -1);
  /// A node or a storage, which may be null.
  template <class Object>
  void add(const Object* object, const char* label, int32_t index = -1) {
    if (auto handle = object ? handle_of(object) : THPObjectPtr()) {
      append(handle, label, index, true);
    }
  }
  void add_unseen(const std::string& what);
  PyObject* release() { return list_.release(); }

 private:
  void append(PyObject* held, const char* label, int32_t index, bool is_native);

  THPObjectPtr list_;
};

/// What a group holds for W.
void add_held_by(const zbp_group* group, References& references);

}  // namespace zbp
