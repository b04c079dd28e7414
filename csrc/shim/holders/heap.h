// All that lives, as a graph: see Note [How holders are searched] in zbp_holders.h.
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

#include "core/holders/zbp_heap.h"
#include "shim/torch/compat.h"
#include "shim/holders/types.h"
#include "shim/holders/zbp_holders.h"

namespace zbp {

using torch::autograd::SavedVariable;

/// What a vertex is. Its key is the PyObject* of python and group, else libtorch's own object.
enum class Thing : uint8_t { python, tensor, storage, node, group };

/// How a vertex holds another one. `label` is static or lives as long as the visit; null where Python
/// can tell. `index` is -1 or the place in what the label names.
struct Reference {
  Thing thing;
  const void* key;
  const char* label;
  int32_t index;
  bool counts_python;  // it is a reference to the Python object and not to libtorch's
};

using Visit = c10::function_ref<void(const Reference&)>;

using TensorRef = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using StorageRef = c10::intrusive_ptr<c10::StorageImpl>;

/// Calls `visit` with the tensors that one which has no storage of its own, or more than that, is made of: a sparse
/// one's indices and values, a nested one's sizes, a quantized one's scales.
void for_each_component(const c10::TensorImpl& tensor,
                        c10::function_ref<void(const at::Tensor&, const char* label)> visit);

/// Python's objects are borrowed: usable until Python code runs or the GIL is let go of. What is libtorch's is owned:
/// other threads free it without the GIL.
class Heap {
 public:
  static constexpr uint32_t none = ZBP_NO_VERTEX;

  explicit Heap(zbp_group_access groups, PyTypeObject* work = nullptr,
                PyTypeObject* array = nullptr);
  ~Heap() { zbp_heap_fini(&graph_); }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// `object` will not be looked at.
  void ignore(PyObject* object);
  /// A vertex without parent, new or old; none if the object is of no interest.
  uint32_t add_root(PyObject* object);
  /// The TorchScript object of a torch.jit.ScriptModule, as a vertex without parent.
  void add_script_of(PyObject* module);
  /// What `vertex` holds besides what its type tells; borrowed.
  void add_held(uint32_t vertex, PyObject* held);
  /// Looks at all that has been added and not been looked at, breadth first.
  void explore();
  /// Likewise, but only through tensors, nodes and TorchScript objects.
  void explore_autograd();
  /// To be called instead of explore(). Looks at what would be freed if nobody held the vertices of `dying` any more,
  /// and no further: whatever has no reference left goes, too. Calls `visit` with each vertex that goes. A cycle stays.
  void let_go(std::vector<uint32_t> dying, c10::function_ref<void(uint32_t)> visit);
  /// All that the roots reach has been explored.
  void end_roots() { zbp_heap_end_roots(&graph_); }

  const zbp_heap& graph() const { return graph_; }
  uint32_t size() const { return graph_.count; }
  uint32_t reached() const { return zbp_heap_reached(&graph_); }
  Thing thing(uint32_t v) const { return static_cast<Thing>(graph_.vertex[v].thing); }
  const void* key(uint32_t v) const { return graph_.vertex[v].key; }
  /// The vertex of what a reference leads to, or none.
  uint32_t find(const Reference& reference) const;

  /// True for a tensor, a storage or a node.
  bool is_torchs(PyObject* object) const;
  bool is_script_module(PyObject* object) const { return types_.of(object) == Type::script_module; }
  bool is_group(PyObject* object) const { return Py_TYPE(object) == groups_.type; }

  /// Calls `visit` for everything that the vertex holds.
  void for_each_reference(uint32_t v, Visit visit);

  /// The Python object of a vertex, if it has one; borrowed.
  PyObject* object_of(uint32_t v) const;
  /// The works of torch.distributed, in the order of discovery.
  const std::vector<uint32_t>& works() const { return works_; }
  /// What could not be looked at, and how often.
  const std::map<std::string, size_t>& unseen() const { return unseen_; }
  /// As zbp_heap_unexplained; `listed`: one reference to the Python object is the caller's.
  int64_t unexplained(uint32_t v, bool listed, bool native_only = false) const;

 private:
  bool resolve(PyObject* object, Thing* thing, const void** key) const;
  bool resolve(const Reference& reference, Thing* thing, const void** key) const;
  uint32_t meet(const Reference& reference, uint32_t parent);
  bool own(Thing thing, const void* key);
  zbp_counts counts(uint32_t v) const;
  void python_references(PyObject* object, Visit visit);
  void tensor_references(const c10::TensorImpl& tensor, Visit visit);
  void node_references(Node& node, Visit visit);
  void group_references(PyObject* object, Visit visit);
  void note_opaque(PyObject* object);
  void saved_reference(const SavedVariable& saved, const char* name, int32_t index, Visit visit);
  void note_unseen(const std::string& what) { ++unseen_[what]; }

  zbp_group_access groups_;
  std::vector<uint32_t> works_;
  zbp_heap graph_{};
  std::vector<TensorRef> tensors_;
  std::vector<StorageRef> storages_;
  std::vector<NodePtr> nodes_;
  std::unordered_map<uint32_t, std::vector<PyObject*>> held_;
  PyTypeObject* array_;  // numpy's, or null
  mutable Types types_;  // learns
  std::map<std::string, size_t> unseen_;
};

}  // namespace zbp
