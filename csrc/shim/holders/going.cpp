// What goes with parameter groups: see zbp_freed_with in zbp_holders.h.

#include <vector>

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include "shim/holders/heap.h"
#include "shim/holders/storages.h"
#include "shim/torch/python.h"

namespace {

using namespace zbp;

class Going {
 public:
  /// Throws python_error, std::bad_alloc.
  Going(zbp_group_access access, PyObject* groups);

  PyObject* storages();
  PyObject* unseen() const;

 private:
  std::vector<std::vector<size_t>> groups_by_storage() const;
  PyObject* describe(uint32_t storage, const std::vector<size_t>& groups) const;

  Heap heap_;
  std::vector<uint32_t> groups_;
  std::vector<bool> goes_;
  std::vector<uint32_t> storages_;
};

Going::Going(zbp_group_access access, PyObject* groups) : heap_(access) {
  heap_.end_roots();  // from here on the heap keeps who holds whom
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(groups); ++i) {
    groups_.push_back(heap_.add_root(PyTuple_GET_ITEM(groups, i)));
  }
  heap_.let_go(groups_, [this](uint32_t v) {
    goes_.resize(heap_.size());
    goes_[v] = true;
    // Wrappers of tensors, and meta tensors, have storages without memory.
    if (heap_.thing(v) == Thing::storage && address_of(storage_at(heap_, v)) != 0) {
      storages_.push_back(v);
    }
  });
  goes_.resize(heap_.size());
}

/// By vertex.
std::vector<std::vector<size_t>> Going::groups_by_storage() const {
  const zbp_heap& graph = heap_.graph();
  std::vector<std::vector<uint32_t>> held(graph.count);
  for (uint32_t e = 0; e < graph.edge_count; ++e) {
    if (goes_[graph.edge[e].to]) {
      held[graph.edge[e].from].push_back(graph.edge[e].to);
    }
  }
  std::vector<std::vector<size_t>> groups(graph.count);
  std::vector<size_t> seen_by(graph.count, groups_.size());
  std::vector<uint32_t> queue;
  for (size_t g = 0; g < groups_.size(); ++g) {
    queue.assign(1, groups_[g]);
    while (!queue.empty()) {
      const uint32_t v = queue.back();
      queue.pop_back();
      if (seen_by[v] == g) {
        continue;
      }
      seen_by[v] = g;
      if (heap_.thing(v) == Thing::storage) {
        groups[v].push_back(g);
      }
      queue.insert(queue.end(), held[v].begin(), held[v].end());
    }
  }
  return groups;
}

PyObject* Going::describe(uint32_t v, const std::vector<size_t>& groups) const {
  const c10::StorageImpl& storage = storage_at(heap_, v);
  const char* role = "saved";
  const Node* node = nullptr;
  const c10::TensorImpl* tensor = nullptr;
  for (uint32_t at = heap_.graph().vertex[v].parent; at != Heap::none;
       at = heap_.graph().vertex[at].parent) {
    if (heap_.thing(at) == Thing::python) {
      role = "packed";
    } else if (heap_.thing(at) == Thing::node && !node) {
      node = static_cast<const Node*>(heap_.key(at));
    } else if (heap_.thing(at) == Thing::tensor && !tensor) {
      tensor = &tensor_at(heap_, at);
    }
  }
  THPObjectPtr shape = new_list();
  if (tensor && !tensor->key_set().has(c10::DispatchKey::Python) &&
      tensor->layout() == c10::kStrided && !tensor->is_nested()) {
    for (const auto& size : tensor->sym_sizes()) {
      append(shape, PyLong_FromLongLong(size.maybe_as_int().value_or(-1)));
    }
  }
  const c10::ScalarType type = tensor ? c10::typeMetaToScalarType(tensor->dtype()) : c10::kByte;
  THPObjectPtr places = new_list();
  for (const size_t g : groups) {
    append(places, PyLong_FromSize_t(g));
  }
  const std::string name = node ? node->name() : "";
  return Py_BuildValue("(NnsNONzN)", PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(&storage)),
                       static_cast<Py_ssize_t>(bytes_of(storage)), role, PyList_AsTuple(shape),
                       reinterpret_cast<PyObject*>(torch::getTHPDtype(type)),
                       THPDevice_New(storage.device()), node ? name.c_str() : nullptr,
                       places.release());
}

PyObject* Going::storages() {
  const auto groups = groups_by_storage();
  THPObjectPtr list = new_list();
  for (const uint32_t v : storages_) {
    append(list, describe(v, groups[v]));
  }
  return list.release();
}

PyObject* Going::unseen() const {
  THPObjectPtr unseen(PyDict_New());
  for (const auto& [what, count] : heap_.unseen()) {
    THPObjectPtr number(unseen ? PyLong_FromSize_t(count) : nullptr);
    if (!number || PyDict_SetItemString(unseen, what.c_str(), number) < 0) {
      throw python_error();
    }
  }
  return unseen.release();
}

PyObject* weights_of_each(zbp_group_access access, PyObject* groups) {
  THPObjectPtr list = new_list();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(groups); ++i) {
    variable_list weights;
    for (const Weight& weight : access.get(PyTuple_GET_ITEM(groups, i))->group->weights) {
      weights.push_back(weight.accumulator->variable);
    }
    append(list, wrap_tensors(weights));
  }
  return list.release();
}

}  // namespace

PyObject* zbp_freed_with(zbp_group_access access, PyObject* groups, zbp_error* error) {
  return guarded_object(error, [&] {
    const NoCollection no_collection;
    THPObjectPtr storages, unseen;
    {
      Going going(access, groups);
      storages = THPObjectPtr(going.storages());
      unseen = THPObjectPtr(going.unseen());
    }
    THPObjectPtr weights(weights_of_each(access, groups));
    return Py_BuildValue("(NNN)", storages.release(), weights.release(), unseen.release());
  });
}
