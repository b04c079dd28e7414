#include "shim/holders/search.h"

#include <algorithm>
#include <new>
#include <unordered_map>

#include <torch/csrc/autograd/python_variable.h>

#include "shim/torch/nodes.h"

namespace zbp {

void Search::add_roots() {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(search_.ignored); ++i) {
    heap_.ignore(PyList_GET_ITEM(search_.ignored, i));
  }
  heap_.ignore(search_.ignored);
  heap_.ignore(search_.call);
  heap_.ignore(search_.allowed);
  add_roots_to(heap_, search_.roots);
}

void Search::explore_the_rest() {
  THPObjectPtr list = collectors_list();
  heap_.ignore(list);
  heap_.end_roots();
  std::vector<uint32_t> found;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); ++i) {
    const uint32_t v = heap_.add_root(PyList_GET_ITEM(list.get(), i));
    if (v != Heap::none && v >= heap_.reached()) {
      found.push_back(v);
    }
  }
  heap_.explore();
  listed_.resize(heap_.size());
  for (const uint32_t v : found) {
    listed_[v] = true;
  }
  // While the collector's list still holds them once more, as listed_ says.
  std::vector<uint8_t> blames;
  blames.reserve(heap_.size() - heap_.reached());
  for (uint32_t v = heap_.reached(); v < heap_.size(); ++v) {
    blames.push_back(heap_.thing(v) != Thing::storage && unexplained(v) > 0 ? ZBP_HELD_UNSEEN
                                                                            : blame(v));
  }
  find_ways(blames.data());
}

void Search::find_ways(const uint8_t* blame) {
  if (zbp_ways_build(&ways_, &heap_.graph(), blame, nullptr) != ZBP_OK) {
    throw std::bad_alloc();
  }
}

/// How far a member of a cycle is from being what made it: code and objects come before what they are made of,
/// and that before what autograd makes.
uint8_t Search::blame(uint32_t v) const {
  const Thing thing = heap_.thing(v);
  PyObject* const object = heap_.object_of(v);
  if (thing == Thing::node && is_python_function(*static_cast<const Node*>(heap_.key(v)))) {
    return 0;
  }
  if (thing != Thing::python) {
    return object ? 3 : 4;
  }
  if (PyTuple_CheckExact(object) || PyCell_Check(object) || PyDict_CheckExact(object)) {
    return 2;
  }
  return PyFunction_Check(object) || PyFrame_Check(object) ||
                 PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_HEAPTYPE)
             ? 0
             : 1;
}

bool Search::is_target(uint32_t v) const {
  return search_.target && THPVariable_Unpack(search_.target).unsafeGetTensorImpl() == heap_.key(v);
}

bool Search::is_sought(uint32_t v) const {
  const c10::StorageImpl& storage = storage_at(heap_, v);
  if (search_.target) {
    return storage_key(*THPVariable_Unpack(search_.target).unsafeGetTensorImpl()) == &storage;
  }
  return blocks_.count(address_of(storage)) > 0 ||
         (search_.older && is_foreign(storage, *search_.older, other_blocks_));
}

void Search::find_sought() {
  if (!search_.target) {
    other_blocks_.clear();
    blocks_ = blocks_between(search_.since, search_.until, other_blocks_);
  }
  std::unordered_map<const void*, size_t> place;
  for (uint32_t v = 0; v < heap_.size(); ++v) {
    if (heap_.thing(v) == Thing::storage && is_sought(v)) {
      const auto block = blocks_.find(address_of(storage_at(heap_, v)));
      if (block != blocks_.end()) {
        block->second.found = true;
      }
      THPObjectPtr id(PyLong_FromVoidPtr(const_cast<void*>(heap_.key(v))));
      const int allowed = id && search_.allowed ? PySet_Contains(search_.allowed, id) : 0;
      if (!id || allowed < 0) {
        throw python_error();
      }
      if (!allowed) {
        place.emplace(heap_.key(v), sought_.size());
        sought_.push_back({v, address_of(storage_at(heap_, v)), {}});
      }
    }
  }
  for (uint32_t v = 0; v < heap_.size(); ++v) {
    if (heap_.thing(v) == Thing::tensor) {
      const auto found = place.find(storage_key(tensor_at(heap_, v)));
      if (found != place.end()) {
        sought_[found->second].tensors.push_back(v);
      }
    }
  }
}

void Search::run() {
  add_roots();
  heap_.explore();
  find_sought();
  const bool are_all_found = std::all_of(blocks_.begin(), blocks_.end(),
                                         [](const auto& entry) { return entry.second.found; });
  if (are_all_found && !search_.older && (!search_.target || !sought_.empty())) {
    find_ways(nullptr);
    return;
  }
  sought_.clear();
  explore_the_rest();
  find_sought();
}

}  // namespace zbp
