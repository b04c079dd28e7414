// What is behind zbp_things.h.
#pragma once

#include <Python.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/holders/types.h"
#include "shim/holders/zbp_looks.h"
#include "shim/torch/compat.h"

namespace zbp {

using torch::autograd::SavedVariable;

using Visit = c10::function_ref<void(const zbp_reference&)>;

/// Calls `visit` with the tensors that one which has no storage of its own, or more than that, is made of: a sparse
/// one's indices and values, a nested one's sizes, a quantized one's scales.
void for_each_component(const c10::TensorImpl& tensor,
                        c10::function_ref<void(const at::Tensor&, const char* label)> visit);

/// The Python object of a thing, if it has one that does not have to be made; borrowed. Not of a node.
PyObject* object_of(uint8_t thing, const void* key);

}  // namespace zbp

struct zbp_things {
 public:
  explicit zbp_things(zbp_group_access groups, PyTypeObject* work, PyTypeObject* array)
      : array_(array), groups_(groups), types_(groups.type, work, array) {}

  zbp_thing resolve(PyObject* object);
  /// False if it is dying.
  bool own(const zbp_thing& thing);
  void visit(uint8_t thing, const void* key, zbp::Visit visit);
  void visit_scripts(PyObject* module, zbp::Visit visit);
  void add_held(const void* key, PyObject* held) { held_[key].push_back(held); }
  /// What could not be looked at, and how often.
  const std::map<std::string, size_t>& unseen() const { return unseen_; }

  THPObjectPtr collected;  // what Python's collector lists, while it is looked at

 private:
  void python_references(PyObject* object, zbp::Visit visit);
  void tensor_references(const c10::TensorImpl& tensor, zbp::Visit visit);
  void node_references(zbp::Node& node, zbp::Visit visit);
  void group_references(PyObject* object, zbp::Visit visit);
  void saved_reference(const zbp::SavedVariable& saved, const char* name, int32_t index,
                       zbp::Visit visit);
  void note_unseen(const std::string& what) { ++unseen_[what]; }

  PyTypeObject* array_;  // numpy's, or null
  zbp_group_access groups_;
  std::vector<c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> tensors_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;
  std::vector<zbp::NodePtr> nodes_;
  std::unordered_map<const void*, std::vector<PyObject*>> held_;
  zbp::Types types_;
  std::map<std::string, size_t> unseen_;
};
