#include "shim/holders/zbp_holders.h"

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "shim/torch/python.h"
#include "shim/holders/search.h"
#include "shim/torch/nodes.h"

// What a search has found, as Python objects.

namespace {

using namespace zbp;

// By ZBP_RANK_*.
constexpr const char* RANKS[] = {"none", "root", "hidden", "cycle"};

class Description {
 public:
  explicit Description(Search& search)
      : search_(search), heap_(search.heap()), ways_(search.ways()) {}

  PyObject* all();

 private:
  PyObject* step(uint32_t v, uint32_t before);
  PyObject* make_step(uint32_t v, uint32_t before);
  PyObject* text(const std::string& text);
  std::vector<uint32_t> chain_to(uint32_t v) const;
  PyObject* steps(c10::ArrayRef<uint32_t> chain);
  PyObject* describe_tensor(uint32_t v) const;
  PyObject* describe(const Sought& sought);
  PyObject* describe_lost(uint64_t address, const Block& block) const;

  Search& search_;
  Heap& heap_;
  zbp_ways& ways_;
  // By component: where the chains out of a cycle begin, and the storages at their ends.
  std::unordered_map<uint32_t, std::pair<uint32_t, std::vector<const void*>>> cycles_;
  // Many chains go the same way: what comes before a vertex on a shortest way is always the same.
  std::unordered_map<uint64_t, THPObjectPtr> steps_;
  std::unordered_map<std::string, THPObjectPtr> texts_;
};

void set_item(PyObject* dict, const char* key, PyObject* value) {
  THPObjectPtr owned(value);
  if (!owned || PyDict_SetItemString(dict, key, owned.get()) < 0) {
    throw python_error();
  }
}

/// False for a tensor whose shape is Python's to tell, or that has none.
bool has_plain_shape(const c10::TensorImpl& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) && tensor.layout() == c10::kStrided &&
         !tensor.is_nested();
}

/// As torch.float32 without the module.
std::string dtype_name(const c10::TensorImpl& tensor) {
  return torch::getTHPDtype(c10::typeMetaToScalarType(tensor.dtype()))->name;
}

std::string describe_briefly(const c10::TensorImpl& tensor) {
  if (!has_plain_shape(tensor)) {
    return "";
  }
  std::string sizes;
  for (const auto& size : tensor.sym_sizes()) {
    sizes += (sizes.empty() ? "" : ", ") + std::to_string(size.maybe_as_int().value_or(-1));
  }
  return dtype_name(tensor) + " [" + sizes + "]";
}

/// How `from` holds `to`, where C++ knows.
std::string edge_between(Heap& heap, uint32_t from, uint32_t to) {
  std::string label;
  if (heap.thing(from) == Thing::python && !heap.is_torchs(heap.object_of(from))) {
    return label;
  }
  heap.for_each_reference(from, [&](const Reference& reference) {
    if (label.empty() && reference.label && heap.find(reference) == to) {
      label = reference.label;
      if (reference.index >= 0) {
        label += " " + std::to_string(reference.index);
      }
    }
  });
  return label;
}

/// New reference to the one string that says it.
PyObject* Description::text(const std::string& text) {
  THPObjectPtr& known = texts_[text];
  if (!known) {
    known = THPObjectPtr(
        PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size())));
    if (!known) {
      throw python_error();
    }
  }
  Py_INCREF(known.get());
  return known.get();
}

PyObject* Description::step(uint32_t v, uint32_t before) {
  THPObjectPtr& known = steps_[(static_cast<uint64_t>(before) << 32) | v];
  if (!known) {
    known = THPObjectPtr(make_step(v, before));
  }
  Py_XINCREF(known.get());
  return known.get();
}

PyObject* Description::make_step(uint32_t v, uint32_t before) {
  const char* kind = "python";
  std::string name;
  PyObject* object = heap_.object_of(v);
  THPObjectPtr of_node;
  switch (heap_.thing(v)) {
    case Thing::python:
      break;
    case Thing::group:
      kind = "group";
      break;
    case Thing::tensor:
      kind = "tensor";
      name = describe_briefly(tensor_at(heap_, v));
      break;
    case Thing::storage:
      kind = "storage";
      break;
    case Thing::node: {
      Node& node = *static_cast<Node*>(const_cast<void*>(heap_.key(v)));
      kind = "node";
      name = node.name();
      object = python_object_of(node);
      if (!object && is_python_function(node)) {  // torch 2.11 does not note it
        of_node = torch::autograd::functionToPyObject(ref_of(node));
        object = of_node.get();
      }
      break;
    }
  }
  const std::string edge = before == Heap::none ? "" : edge_between(heap_, before, v);
  return Py_BuildValue("(NONN)", text(kind), object ? object : Py_None, text(name),
                       edge.empty() ? Py_NewRef(Py_None) : text(edge));
}

std::vector<uint32_t> Description::chain_to(uint32_t v) const {
  std::vector<uint32_t> chain(ZBP_CHAIN_LONGEST);
  chain.resize(zbp_ways_chain(&ways_, v, chain.data()));
  return chain;
}

PyObject* Description::steps(c10::ArrayRef<uint32_t> chain) {
  THPObjectPtr list = new_list();
  uint32_t before = Heap::none;
  for (size_t i = 0; i < chain.size(); ++i) {
    const uint32_t v = chain[i];
    if (v == Heap::none) {
      const uint32_t count = ways_.way[chain[i + 1]].depth - ways_.way[chain[i - 1]].depth - 1;
      append(list,
             Py_BuildValue("(sOsO)", "more", Py_None, std::to_string(count).c_str(), Py_None));
    } else {
      append(list, step(v, before));
    }
    before = v;
  }
  return list.release();
}

PyObject* Description::describe_tensor(uint32_t v) const {
  const c10::TensorImpl& tensor = tensor_at(heap_, v);
  THPObjectPtr shape = new_list();
  if (has_plain_shape(tensor)) {
    for (const auto& size : tensor.sym_sizes()) {
      append(shape, PyLong_FromLongLong(size.maybe_as_int().value_or(-1)));
    }
  }
  PyObject* dtype =
      reinterpret_cast<PyObject*>(torch::getTHPDtype(c10::typeMetaToScalarType(tensor.dtype())));
  PyObject* object = heap_.object_of(v);
  THPObjectPtr wrapper;
  if (!object && search_.wraps()) {
    wrapper = THPVariable_Wrap(
        at::Tensor(TensorRef::reclaim_copy(const_cast<c10::TensorImpl*>(&tensor))));
    object = wrapper;
  }
  const auto bytes =
      has_plain_shape(tensor) ? tensor.numel() * static_cast<int64_t>(tensor.itemsize()) : 0;
  return Py_BuildValue("(NOOL)", PyList_AsTuple(shape), dtype, object ? object : Py_None,
                       static_cast<long long>(bytes));
}

PyObject* Description::describe(const Sought& sought) {
  const c10::StorageImpl& storage = storage_at(heap_, sought.storage);
  const uint8_t rank = ways_.way[sought.storage].rank;
  std::vector<uint32_t> chain;
  if (rank != ZBP_RANK_NONE) {
    chain = chain_to(sought.storage);
    if (chain.size() < 2 || heap_.thing(chain[chain.size() - 2]) == Thing::tensor) {
      chain.pop_back();
    }
  }
  if (rank == ZBP_RANK_CYCLE && !chain.empty()) {
    const uint32_t start = chain.front();
    cycles_.try_emplace(zbp_ways_component(&ways_, start), start, std::vector<const void*>())
        .first->second.second.push_back(&storage);
  }
  int64_t others = -1;
  int64_t unseen = std::max<int64_t>(heap_.unexplained(sought.storage, false), 0);
  THPObjectPtr tensors = new_list();
  if (!chain.empty() && heap_.thing(chain.back()) == Thing::tensor) {
    append(tensors, describe_tensor(chain.back()));
  }
  for (const uint32_t v : sought.tensors) {
    if (chain.empty() || v != chain.back()) {
      append(tensors, describe_tensor(v));
    }
    others += heap_.graph().vertex[v].python_refs + heap_.graph().vertex[v].native_refs;
    unseen += std::max<int64_t>(search_.unexplained(v), 0);
  }
  THPObjectPtr way(steps(chain));
  return Py_BuildValue("(NnNKNNNLL)", PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(&storage)),
                       static_cast<Py_ssize_t>(bytes_of(storage)), text(storage.device().str()),
                       static_cast<unsigned long long>(sought.address), tensors.release(),
                       way.release(), text(RANKS[rank]),
                       static_cast<long long>(std::max<int64_t>(others, 0)),
                       static_cast<long long>(unseen));
}

PyObject* Description::describe_lost(uint64_t address, const Block& block) const {
  return Py_BuildValue("(insK[][]siL)", 0, static_cast<Py_ssize_t>(block.bytes), "cpu",
                       static_cast<unsigned long long>(address), "none", 0, 1LL);
}

PyObject* Description::all() {
  THPObjectPtr result(PyDict_New());
  if (!result) {
    throw python_error();
  }
  THPObjectPtr leaks = new_list();
  for (const Sought& sought : search_.sought()) {
    append(leaks, describe(sought));
  }
  for (const auto& [address, block] : search_.blocks()) {
    if (!block.found) {
      append(leaks, describe_lost(address, block));
    }
  }
  THPObjectPtr cycles = new_list();
  for (const auto& [component, cycle] : cycles_) {
    const uint32_t* members = nullptr;
    const uint32_t count = zbp_ways_cycle(&ways_, cycle.first, &members);
    THPObjectPtr storages = new_list();
    for (const void* storage : cycle.second) {
      append(storages, PyLong_FromVoidPtr(const_cast<void*>(storage)));
    }
    THPObjectPtr way(steps({members, count}));
    append(cycles, Py_BuildValue("(NN)", way.release(), storages.release()));
  }
  THPObjectPtr works = new_list();
  for (const uint32_t v : heap_.works()) {
    if (v < heap_.reached()) {
      append(works, steps(chain_to(v)));
    }
  }
  THPObjectPtr unseen(PyDict_New());
  for (const auto& [what, count] : heap_.unseen()) {
    set_item(unseen, what.c_str(), PyLong_FromSize_t(count));
  }
  set_item(result, "leaks", leaks.release());
  set_item(result, "cycles", cycles.release());
  set_item(result, "works", works.release());
  set_item(result, "unseen", unseen.release());
  set_item(result, "visited", PyLong_FromUnsignedLong(heap_.size()));
  return result.release();
}

}  // namespace

PyObject* zbp_search_holders(const zbp_search* search, zbp_error* error) {
  return guarded_object(error, [&] {
    const NoCollection no_collection;
    Search found(*search);
    found.run();
    return Description(found).all();
  });
}
