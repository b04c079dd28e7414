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

#include "core/base/zbp_map.h"
#include "shim/torch/compat.h"
#include "shim/holders/zbp_holders.h"

namespace zbp {

using torch::autograd::SavedVariable;

/// What a vertex is. Its key is the PyObject* of python, work and group, else libtorch's own object.
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
  static constexpr uint32_t none = UINT32_MAX;

  struct Vertex {
    const void* key;
    uint32_t parent;       // from which it was discovered, none for a root
    uint32_t python_refs;  // edges to its Python object
    uint32_t native_refs;  // edges to libtorch's object
    Thing thing;
  };

  explicit Heap(zbp_group_access groups, PyTypeObject* work = nullptr);
  ~Heap() { zbp_map_fini(&map_); }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// `object` will not be looked at.
  void ignore(PyObject* object);
  /// A vertex without parent, new or old; none if the object is of no interest.
  uint32_t add_root(PyObject* object);
  /// What `vertex` holds besides what its type tells; borrowed.
  void add_held(uint32_t vertex, PyObject* held);
  /// Looks at all that has been added and not been looked at, breadth first. With `edges`, appends what
  /// it meets.
  void explore(std::vector<std::pair<uint32_t, uint32_t>>* edges = nullptr);
  /// Likewise, but only through tensors and nodes.
  void explore_autograd();

  uint32_t size() const { return static_cast<uint32_t>(vertex_.size()); }
  const Vertex& at(uint32_t v) const { return vertex_[v]; }
  uint32_t find(Thing thing, const void* key) const;
  uint32_t find(PyObject* object) const;

  /// True for a tensor, a storage or a node.
  bool is_torchs(PyObject* object) const;
  bool is_group(PyObject* object) const { return Py_TYPE(object) == groups_.type; }

  /// Calls `visit` for everything that the vertex holds.
  void for_each_reference(uint32_t v, Visit visit);

  /// The Python object of a vertex, if it has one; borrowed.
  PyObject* object_of(uint32_t v) const;
  /// The works of torch.distributed, in the order of discovery.
  const std::vector<uint32_t>& works() const { return works_; }
  /// What could not be looked at, and how often.
  const std::map<std::string, size_t>& unseen() const { return unseen_; }
  /// References that are counted and that no edge explains; `listed`: one of them is the caller's. With
  /// `native_only`, to libtorch's object alone.
  int64_t unexplained(uint32_t v, bool listed, bool native_only = false) const;

 private:
  enum class Type : uint8_t {
    skipped,
    plain,
    tensor,
    storage,
    cpp_node,
    py_node,
    group,
    work,
    saved,
    array  // of numpy
  };

  Type type_of(PyObject* object) const;
  bool resolve(PyObject* object, Thing* thing, const void** key) const;
  uint32_t meet(const Reference& reference, uint32_t parent);
  bool own(Thing thing, const void* key);
  void python_references(PyObject* object, Visit visit);
  void tensor_references(const c10::TensorImpl& tensor, Visit visit);
  void node_references(Node& node, Visit visit);
  void group_references(PyObject* object, Visit visit);
  void saved_reference(const SavedVariable& saved, const char* name, int32_t index, Visit visit);
  void note_unseen(const std::string& what) { ++unseen_[what]; }

  zbp_group_access groups_;
  PyTypeObject* work_;
  PyTypeObject*
      saved_;  // of a saved variable that Python holds; null before torch has made one known
  std::vector<uint32_t> works_;
  zbp_map map_{};
  std::vector<Vertex> vertex_;
  std::vector<TensorRef> tensors_;
  std::vector<StorageRef> storages_;
  std::vector<NodePtr> nodes_;
  uint32_t explored_ = 0;
  std::unordered_map<uint32_t, std::vector<PyObject*>> held_;
  mutable std::unordered_map<PyTypeObject*, Type> types_;
  std::map<std::string, size_t> unseen_;
};

}  // namespace zbp
