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
#include <torch/csrc/utils/object_ptr.h>

#include "instruments/shim/zbp_holders.h"
#include "shim/torch/compat.h"

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

/// Null if `object` is no handle; borrowed.
Handle* as_handle(PyObject* object);

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
  void add(const Node* node, const char* label, int32_t index = -1);
  void add(const c10::StorageImpl* storage, const char* label);
  void add(PyObject* object, const char* label, int32_t index = -1);
  void add_unseen(const std::string& what);
  PyObject* release() { return list_.release(); }

 private:
  void append(PyObject* held, const char* label, int32_t index, bool is_native);

  THPObjectPtr list_;
};

/// What a group holds for W.
void add_held_by(const zbp_group* group, References& references);

}  // namespace zbp
