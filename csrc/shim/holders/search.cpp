#include "shim/holders/search.h"

#include <algorithm>
#include <unordered_map>

#include <torch/csrc/autograd/python_variable.h>

#include "shim/torch/nodes.h"

namespace zbp {

Search::Adjacency::Adjacency(const Edges& edges, uint32_t count, bool reversed)
    : begin(count + 1), other(edges.size()) {
  for (const auto& [from, to] : edges) {
    ++begin[(reversed ? to : from) + 1];
  }
  for (uint32_t v = 0; v < count; ++v) {
    begin[v + 1] += begin[v];
  }
  std::vector<uint32_t> next(begin.begin(), begin.end() - 1);
  for (const auto& [from, to] : edges) {
    other[next[reversed ? to : from]++] = reversed ? from : to;
  }
}

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
  std::vector<uint32_t> found;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); ++i) {
    const uint32_t v = heap_.add_root(PyList_GET_ITEM(list.get(), i));
    if (v != Heap::none && v >= reached_) {
      found.push_back(v);
    }
  }
  heap_.explore(&edges_);
  listed_.resize(heap_.size());
  for (const uint32_t v : found) {
    listed_[v] = true;
  }
  const Adjacency out(edges_, heap_.size(), false);
  in_ = std::make_unique<Adjacency>(edges_, heap_.size(), true);
  // While the collector's list still holds them once more, as listed_ says.
  measure_ways();
  find_hidden_roots(out);
  find_components(out);
  find_ways_from_cycles(out);
}

void Search::find_hidden_roots(const Adjacency& out) {
  std::vector<uint32_t> queue;
  for (uint32_t v = reached_; v < heap_.size(); ++v) {
    if (heap_.at(v).thing != Thing::storage && unexplained(v) > 0) {
      queue.push_back(v);
    }
  }
  spread(std::move(queue), out, Rank::hidden);
}

/// How far a member of a cycle is from being what made it: code and objects come before what they are made of,
/// and that before what autograd makes.
uint32_t Search::blame(uint32_t v) const {
  const Heap::Vertex& vertex = heap_.at(v);
  if (vertex.thing != Thing::python) {
    PyObject* const object = heap_.object_of(v);
    const bool is_users =
        vertex.thing == Thing::node && is_python_function(*static_cast<const Node*>(vertex.key));
    return is_users ? 0 : object ? 3 : 4;
  }
  PyObject* const object = heap_.object_of(v);
  if (PyTuple_CheckExact(object) || PyCell_Check(object) || PyDict_CheckExact(object)) {
    return 2;
  }
  return PyFunction_Check(object) || PyFrame_Check(object) ||
                 PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_HEAPTYPE)
             ? 0
             : 1;
}

void Search::find_ways_from_cycles(const Adjacency& out) {
  std::vector<uint32_t> least(is_cyclic_.size(), Heap::none);
  const auto is_member = [&](uint32_t v) {
    return component_[v] != Heap::none && is_cyclic_[component_[v]];
  };
  for (uint32_t v = reached_; v < heap_.size(); ++v) {
    if (is_member(v)) {
      least[component_[v]] = std::min(least[component_[v]], blame(v));
    }
  }
  std::vector<uint32_t> queue;
  for (uint32_t v = reached_; v < heap_.size(); ++v) {
    if (is_member(v) && blame(v) == least[component_[v]]) {
      queue.push_back(v);
    }
  }
  spread(std::move(queue), out, Rank::cycle);
}

/// Breadth first from `queue` over what has no way yet.
void Search::spread(std::vector<uint32_t> queue, const Adjacency& out, Rank rank) {
  for (const uint32_t v : queue) {
    way_[v].rank = rank;
    way_[v].head = v;
  }
  for (size_t i = 0; i < queue.size(); ++i) {
    const uint32_t v = queue[i];
    for (const uint32_t to : out.of(v)) {
      if (to >= reached_ && way_[to].rank == Rank::none) {
        const uint32_t depth = way_[v].depth + 1;
        way_[to] = {v, depth, depth < HEAD ? to : way_[v].head, rank};
        queue.push_back(to);
      }
    }
  }
}

/// Of what the roots reach: parents come before their children.
void Search::measure_ways() {
  way_.resize(heap_.size());
  for (uint32_t v = 0; v < reached_; ++v) {
    const uint32_t parent = heap_.at(v).parent;
    const uint32_t depth = parent == Heap::none ? 0 : way_[parent].depth + 1;
    way_[v] = {parent, depth, depth < HEAD ? v : way_[parent].head, Rank::root};
  }
}

/// Tarjan's strongly connected components of what nothing reaches, without recursion.
void Search::find_components(const Adjacency& out) {
  const uint32_t count = heap_.size();
  component_.assign(count, Heap::none);
  std::vector<uint32_t> index(count, Heap::none), low(count), next(count), stack, path;
  uint32_t time = 0;
  uint32_t components = 0;
  for (uint32_t root = reached_; root < count; ++root) {
    if (index[root] != Heap::none || way_[root].rank != Rank::none) {
      continue;
    }
    path.push_back(root);
    while (!path.empty()) {
      const uint32_t v = path.back();
      if (index[v] == Heap::none) {
        index[v] = low[v] = time++;
        stack.push_back(v);
      }
      const auto edges = out.of(v);
      bool descends = false;
      while (next[v] < edges.size() && !descends) {
        const uint32_t to = edges[next[v]++];
        if (to < reached_ || way_[to].rank != Rank::none) {
          continue;
        }
        if (index[to] == Heap::none) {
          path.push_back(to);
          descends = true;
        } else if (component_[to] == Heap::none) {
          low[v] = std::min(low[v], index[to]);
        }
      }
      if (descends) {
        continue;
      }
      path.pop_back();
      if (!path.empty()) {
        low[path.back()] = std::min(low[path.back()], low[v]);
      }
      if (low[v] == index[v]) {
        const auto edges_of_v = out.of(v);
        is_cyclic_.push_back(stack.back() != v || std::find(edges_of_v.begin(), edges_of_v.end(),
                                                            v) != edges_of_v.end());
        uint32_t member = 0;
        do {
          member = stack.back();
          stack.pop_back();
          component_[member] = components;
        } while (member != v);
        ++components;
      }
    }
  }
}

bool Search::is_target(uint32_t v) const {
  return search_.target &&
         THPVariable_Unpack(search_.target).unsafeGetTensorImpl() == heap_.at(v).key;
}

bool Search::is_sought(uint32_t v) const {
  const c10::StorageImpl& storage = storage_at(heap_, v);
  if (search_.target) {
    return storage_key(*THPVariable_Unpack(search_.target).unsafeGetTensorImpl()) == &storage;
  }
  return blocks_.count(address_of(storage)) > 0 ||
         (search_.older && is_foreign(storage, *search_.older, older_blocks_));
}

void Search::find_sought() {
  if (!search_.target) {
    older_blocks_.clear();
    blocks_ = blocks_since(search_.since, older_blocks_);
  }
  std::unordered_map<const void*, size_t> place;
  for (uint32_t v = 0; v < heap_.size(); ++v) {
    if (heap_.at(v).thing == Thing::storage && is_sought(v)) {
      const auto block = blocks_.find(address_of(storage_at(heap_, v)));
      if (block != blocks_.end()) {
        block->second.found = true;
      }
      THPObjectPtr id(PyLong_FromVoidPtr(const_cast<void*>(heap_.at(v).key)));
      const int allowed = id && search_.allowed ? PySet_Contains(search_.allowed, id) : 0;
      if (!id || allowed < 0) {
        throw python_error();
      }
      if (!allowed) {
        place.emplace(heap_.at(v).key, sought_.size());
        sought_.push_back({v, address_of(storage_at(heap_, v)), {}});
      }
    }
  }
  for (uint32_t v = 0; v < heap_.size(); ++v) {
    if (heap_.at(v).thing == Thing::tensor) {
      const auto found = place.find(storage_key(tensor_at(heap_, v)));
      if (found != place.end()) {
        sought_[found->second].tensors.push_back(v);
      }
    }
  }
}

std::vector<uint32_t> Search::chain_to(uint32_t v) const {
  std::vector<uint32_t> chain;
  const Way& end = way_[v];
  const bool is_long = end.depth > HEAD + TAIL;
  for (uint32_t i = 0; v != Heap::none && !(is_long && i == TAIL); v = way_[v].parent, ++i) {
    chain.push_back(v);
  }
  if (is_long) {
    chain.push_back(Heap::none);
    for (v = end.head; v != Heap::none; v = way_[v].parent) {
      chain.push_back(v);
    }
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

std::vector<uint32_t> Search::cycle_through(uint32_t start) const {
  std::unordered_map<uint32_t, uint32_t> towards;
  std::vector<uint32_t> queue{start};
  for (size_t i = 0; i < queue.size(); ++i) {
    for (const uint32_t holder : in_->of(queue[i])) {
      if (component_[holder] != component_[start]) {
        continue;
      }
      if (holder == start) {
        std::vector<uint32_t> cycle{start};
        for (uint32_t v = queue[i]; v != start; v = towards[v]) {
          cycle.push_back(v);
        }
        return cycle;
      }
      if (towards.emplace(holder, queue[i]).second) {
        queue.push_back(holder);
      }
    }
  }
  return {start};
}

void Search::run() {
  add_roots();
  heap_.explore();
  reached_ = heap_.size();
  measure_ways();
  find_sought();
  const bool are_all_found = std::all_of(blocks_.begin(), blocks_.end(),
                                         [](const auto& entry) { return entry.second.found; });
  if (!are_all_found || search_.older || (search_.target && sought_.empty())) {
    sought_.clear();
    explore_the_rest();
    find_sought();
  }
}

}  // namespace zbp
