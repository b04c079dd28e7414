#include "shim/zbp_holders.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/heap.h"
#include "shim/kinds.h"
#include "shim/python.h"
#include "shim/zbp_tap.h"

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct zbp_storages {
  // The weak reference keeps the identity from being given to another storage.
  std::unordered_map<const c10::StorageImpl*, WeakStorage> storage;
};

namespace {

using namespace zbp;

// ---- storages

/// While it lives, Python's collector does not run by itself, and so frees nothing that was seen.
class NoCollection {
 public:
  NoCollection() : was_enabled_(PyGC_Disable()) {}
  ~NoCollection() {
    if (was_enabled_) {
      PyGC_Enable();
    }
  }
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;

 private:
  bool was_enabled_;
};

const c10::StorageImpl* storage_key(const c10::TensorImpl& tensor) {
  return tensor.has_storage() ? tensor.unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

const c10::TensorImpl& tensor_at(const Heap& heap, uint32_t v) {
  return *static_cast<const c10::TensorImpl*>(heap.at(v).key);
}

const c10::StorageImpl& storage_at(const Heap& heap, uint32_t v) {
  return *static_cast<const c10::StorageImpl*>(heap.at(v).key);
}

uint64_t address_of(const c10::StorageImpl& storage) {
  const void* data = const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks().get();
  return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(data));
}

THPObjectPtr collectors_list() {
  THPObjectPtr gc(PyImport_ImportModule("gc"));
  THPObjectPtr list(gc ? PyObject_CallMethod(gc, "get_objects", nullptr) : nullptr);
  if (!list) {
    throw python_error();
  }
  return list;
}

/// As zbp_search's roots: adds them to `heap`.
void add_roots_to(Heap& heap, PyObject* roots) {
  heap.ignore(roots);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(roots); ++i) {
    heap.ignore(PyList_GET_ITEM(roots, i));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(roots); ++i) {
    PyObject* const root = PyList_GET_ITEM(roots, i);
    PyObject* const held = PyTuple_GET_ITEM(root, 1);
    const uint32_t v = heap.add_root(PyTuple_GET_ITEM(root, 0));
    if (held == Py_None || v == Heap::none) {
      continue;
    }
    heap.ignore(held);
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(held); ++k) {
      heap.add_held(v, PyList_GET_ITEM(held, k));
    }
  }
}

std::unique_ptr<zbp_storages> storages_now(zbp_group_access groups, PyObject* roots) {
  const NoCollection no_collection;
  auto storages = std::make_unique<zbp_storages>();
  THPObjectPtr list = collectors_list();
  Heap heap(groups);
  heap.ignore(list);
  const bool is_whole = PyList_GET_SIZE(roots) > 0;
  add_roots_to(heap, roots);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); ++i) {
    PyObject* object = PyList_GET_ITEM(list.get(), i);
    if (is_whole || heap.is_torchs(object)) {
      heap.add_root(object);
    }
  }
  if (is_whole) {
    heap.explore();
  } else {
    heap.explore_autograd();
  }
  for (uint32_t v = 0; v < heap.size(); ++v) {
    if (heap.at(v).thing == Thing::storage) {
      auto* storage = const_cast<c10::StorageImpl*>(&storage_at(heap, v));
      storages->storage.emplace(
          storage, WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)));
    }
  }
  return storages;
}

// ---- what is searched

struct Block {
  uint64_t bytes;
  bool found = false;
};

using Blocks = std::unordered_map<uint64_t, Block>;

/// Blocks by their addresses; of older ones the addresses alone.
Blocks blocks_since(uint64_t since, std::unordered_set<uint64_t>& older_out) {
  zbp_block* blocks = nullptr;
  size_t count = 0;
  if (zbp_tap_blocks(0, &blocks, &count) != ZBP_OK) {
    throw std::bad_alloc();
  }
  const std::unique_ptr<zbp_block, decltype(&std::free)> owned(blocks, &std::free);
  Blocks result;
  for (size_t i = 0; i < count; ++i) {
    if (blocks[i].serial >= since) {
      result.emplace(blocks[i].address, Block{blocks[i].bytes});
    } else {
      older_out.insert(blocks[i].address);
    }
  }
  return result;
}

/// True for memory that is not among `older` and that the tap does not know.
bool is_foreign(const c10::StorageImpl& storage, const zbp_storages& older,
                const std::unordered_set<uint64_t>& tapped) {
  return storage.nbytes() > 0 && storage.device_type() != c10::kMeta &&
         older.storage.count(&storage) == 0 && tapped.count(address_of(storage)) == 0;
}

/// A storage that is searched for, and its tensors.
struct Sought {
  uint32_t storage;
  uint64_t address;
  std::vector<uint32_t> tensors;
};

enum class Rank : uint8_t { root, hidden, cycle, none };

const char* name_of(Rank rank) {
  switch (rank) {
    case Rank::root:
      return "root";
    case Rank::hidden:
      return "hidden";
    case Rank::cycle:
      return "cycle";
    case Rank::none:
      break;
  }
  return "none";
}

/// One search: see Note [How holders are searched].
class Search {
 public:
  explicit Search(const zbp_search& search) : search_(search), heap_(search.groups, search.work) {}

  PyObject* run();

 private:
  /// How a vertex is reached: a shortest way, from outside.
  struct Way {
    uint32_t parent = Heap::none;
    uint32_t depth = 0;
    uint32_t head = Heap::none;  // on the way, the vertex where what is shown of its beginning ends
    Rank rank = Rank::none;
  };

  /// Of a long chain, so many steps at its ends are described.
  static constexpr uint32_t HEAD = 12;
  static constexpr uint32_t TAIL = 6;

  using Edges = std::vector<std::pair<uint32_t, uint32_t>>;

  /// Edges by the vertex that they lead from, or to.
  struct Adjacency {
    std::vector<uint32_t> begin, other;
    Adjacency(const Edges& edges, uint32_t count, bool reversed);
    c10::ArrayRef<uint32_t> of(uint32_t v) const {
      return {other.data() + begin[v], other.data() + begin[v + 1]};
    }
  };

  void add_roots();
  void explore_the_rest();
  void find_hidden_roots(const Adjacency& out);
  void find_components(const Adjacency& out);
  void find_ways_from_cycles(const Adjacency& out);
  void spread(std::vector<uint32_t> queue, const Adjacency& out, Rank rank);
  void measure_ways();
  void find_sought();
  bool is_sought(uint32_t v) const;

  std::vector<uint32_t> chain_to(uint32_t v) const;
  bool is_part(uint32_t v) const;
  std::vector<uint32_t> cycle_through(uint32_t v) const;

  PyObject* step(uint32_t v, uint32_t before);
  PyObject* steps(const std::vector<uint32_t>& chain);
  PyObject* describe_tensor(uint32_t v) const;
  PyObject* describe(const Sought& sought);
  PyObject* describe_lost(uint64_t address, const Block& block) const;

  const zbp_search& search_;
  Heap heap_;
  uint32_t reached_ = 0;  // vertices that the roots reach come first
  Edges edges_;           // between the others
  std::vector<bool> listed_;
  std::vector<Way> way_;
  std::vector<uint32_t> component_;  // of garbage: the number of its cycle; Heap::none for none
  std::vector<bool> is_cyclic_;      // by component
  std::unique_ptr<Adjacency> in_;
  std::vector<Sought> sought_;
  Blocks blocks_;
  std::unordered_set<uint64_t> older_blocks_;
  std::unordered_map<uint32_t, std::pair<uint32_t, std::vector<const void*>>> cycles_;
};

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
    if (heap_.at(v).thing != Thing::storage && heap_.unexplained(v, listed_[v]) > 0) {
      queue.push_back(v);
    }
  }
  spread(std::move(queue), out, Rank::hidden);
}

void Search::find_ways_from_cycles(const Adjacency& out) {
  std::vector<uint32_t> queue;
  for (uint32_t v = reached_; v < heap_.size(); ++v) {
    if (component_[v] != Heap::none && is_cyclic_[component_[v]] && !is_part(v)) {
      queue.push_back(v);
    }
  }
  spread(std::move(queue), out, Rank::cycle);
  queue.clear();
  for (uint32_t v = reached_; v < heap_.size(); ++v) {  // cycles of nothing but parts
    if (component_[v] != Heap::none && is_cyclic_[component_[v]] && way_[v].rank == Rank::none) {
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

// ---- chains

/// From the outermost holder to `v`, which is the last one; Heap::none stands for a middle that is left out.
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

bool Search::is_part(uint32_t v) const {
  PyObject* const object = heap_.at(v).thing == Thing::python ? heap_.object_of(v) : nullptr;
  return object &&
         (PyTuple_CheckExact(object) || PyCell_Check(object) || PyDict_CheckExact(object));
}

/// A shortest way from `v` back to it, `v` first, not repeated; against the edges.
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

// ---- the result

THPObjectPtr new_list() {
  THPObjectPtr list(PyList_New(0));
  if (!list) {
    throw python_error();
  }
  return list;
}

void append(PyObject* list, PyObject* value) {
  THPObjectPtr owned(value);
  if (!owned || PyList_Append(list, owned.get()) < 0) {
    throw python_error();
  }
}

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
  if (heap.at(from).thing == Thing::python && !heap.is_torchs(heap.object_of(from))) {
    return label;
  }
  heap.for_each_reference(from, [&](const Reference& reference) {
    if (label.empty() && reference.label &&
        (reference.counts_python
             ? heap.find(static_cast<PyObject*>(const_cast<void*>(reference.key)))
             : heap.find(reference.thing, reference.key)) == to) {
      label = reference.label;
      if (reference.index >= 0) {
        label += " " + std::to_string(reference.index);
      }
    }
  });
  return label;
}

PyObject* Search::step(uint32_t v, uint32_t before) {
  const Heap::Vertex& vertex = heap_.at(v);
  const char* kind = "python";
  std::string name;
  PyObject* object = heap_.object_of(v);
  THPObjectPtr of_node;
  switch (vertex.thing) {
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
      Node& node = *static_cast<Node*>(const_cast<void*>(vertex.key));
      kind = "node";
      name = node.name();
      object = python_object_of(node);
      break;
    }
  }
  const std::string edge = before == Heap::none ? "" : edge_between(heap_, before, v);
  return Py_BuildValue("(sOsz)", kind, object ? object : Py_None, name.c_str(),
                       edge.empty() ? nullptr : edge.c_str());
}

PyObject* Search::steps(const std::vector<uint32_t>& chain) {
  THPObjectPtr list = new_list();
  uint32_t before = Heap::none;
  for (size_t i = 0; i < chain.size(); ++i) {
    const uint32_t v = chain[i];
    if (v == Heap::none) {
      const uint32_t count = way_[chain[i + 1]].depth - way_[chain[i - 1]].depth - 1;
      append(list,
             Py_BuildValue("(sOsO)", "more", Py_None, std::to_string(count).c_str(), Py_None));
    } else {
      append(list, step(v, before));
    }
    before = v;
  }
  return list.release();
}

PyObject* Search::describe_tensor(uint32_t v) const {
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
  const auto bytes =
      has_plain_shape(tensor) ? tensor.numel() * static_cast<int64_t>(tensor.itemsize()) : 0;
  return Py_BuildValue("(NOOL)", PyList_AsTuple(shape), dtype, object ? object : Py_None,
                       static_cast<long long>(bytes));
}

PyObject* Search::describe(const Sought& sought) {
  const c10::StorageImpl& storage = storage_at(heap_, sought.storage);
  const Way& way = way_[sought.storage];
  std::vector<uint32_t> chain;
  if (way.rank != Rank::none) {
    chain = chain_to(sought.storage);
    chain.pop_back();
  }
  if (way.rank == Rank::cycle && !chain.empty()) {
    const uint32_t start = chain.front();
    auto& cycle =
        cycles_.try_emplace(component_[start], start, std::vector<const void*>()).first->second;
    cycle.second.push_back(&storage);
  }
  int64_t others = -1;
  int64_t unseen = std::max<int64_t>(heap_.unexplained(sought.storage, false), 0);
  THPObjectPtr tensors = new_list();
  if (!chain.empty() && heap_.at(chain.back()).thing == Thing::tensor) {
    append(tensors, describe_tensor(chain.back()));
  }
  for (const uint32_t v : sought.tensors) {
    if (chain.empty() || v != chain.back()) {
      append(tensors, describe_tensor(v));
    }
    others += heap_.at(v).python_refs + heap_.at(v).native_refs;
    const bool listed = v < listed_.size() && listed_[v];
    unseen += std::max<int64_t>(heap_.unexplained(v, listed), 0);
  }
  return Py_BuildValue("(NnsKNNsLL)", PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(&storage)),
                       static_cast<Py_ssize_t>(storage.nbytes()), storage.device().str().c_str(),
                       static_cast<unsigned long long>(sought.address), tensors.release(),
                       steps(chain), name_of(way.rank),
                       static_cast<long long>(std::max<int64_t>(others, 0)),
                       static_cast<long long>(unseen));
}

PyObject* Search::describe_lost(uint64_t address, const Block& block) const {
  return Py_BuildValue("(insK[][]siL)", 0, static_cast<Py_ssize_t>(block.bytes), "cpu",
                       static_cast<unsigned long long>(address), "none", 0, 1LL);
}

PyObject* Search::run() {
  const NoCollection no_collection;
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
  THPObjectPtr result(PyDict_New());
  if (!result) {
    throw python_error();
  }
  THPObjectPtr leaks = new_list();
  for (const Sought& sought : sought_) {
    append(leaks, describe(sought));
  }
  for (const auto& [address, block] : blocks_) {
    if (!block.found) {
      append(leaks, describe_lost(address, block));
    }
  }
  THPObjectPtr cycles = new_list();
  for (const auto& [component, cycle] : cycles_) {
    THPObjectPtr storages = new_list();
    for (const void* storage : cycle.second) {
      append(storages, PyLong_FromVoidPtr(const_cast<void*>(storage)));
    }
    append(cycles, Py_BuildValue("(NN)", steps(cycle_through(cycle.first)), storages.release()));
  }
  THPObjectPtr works = new_list();
  for (const uint32_t v : heap_.works()) {
    if (v < reached_) {
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

/// New set of `number` of each tensor's storage; NULL with an error set.
template <class Number>
PyObject* set_of(PyObject* tensors, const Number& number) {
  PyObject* result = nullptr;
  const int status = guarded([&] {
    THPObjectPtr set(PySet_New(nullptr));
    THPObjectPtr sequence(PySequence_Fast(tensors, "expected a list of tensors"));
    if (!set || !sequence) {
      throw python_error();
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.get()); ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(sequence.get(), i);
      if (!PyType_IsSubtype(Py_TYPE(item), reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
        continue;
      }
      const at::Tensor& tensor = THPVariable_Unpack(item);
      const auto* storage = tensor.defined() ? storage_key(*tensor.unsafeGetTensorImpl()) : nullptr;
      if (storage) {
        THPObjectPtr value(number(*storage));
        if (!value || PySet_Add(set, value) < 0) {
          throw python_error();
        }
      }
    }
    result = set.release();
  });
  return status == ZBP_OK ? result : nullptr;
}

}  // namespace

int zbp_storages_new(zbp_group_access groups, PyObject* roots, zbp_storages** storages_out) {
  return guarded([&] { *storages_out = storages_now(groups, roots).release(); });
}

void zbp_storages_free(zbp_storages* storages) {
  delete storages;
}

int zbp_storages_since(zbp_group_access groups, PyObject* roots, const zbp_storages* older,
                       size_t* count_out) {
  return guarded([&] {
    std::unordered_set<uint64_t> tapped;
    blocks_since(UINT64_MAX, tapped);
    const auto now = storages_now(groups, roots);
    *count_out = static_cast<size_t>(
        std::count_if(now->storage.begin(), now->storage.end(), [&](const auto& entry) {
          return !entry.second.expired() && is_foreign(*entry.first, *older, tapped);
        }));
  });
}

PyObject* zbp_storages_gone(const zbp_storages* storages) {
  PyObject* result = nullptr;
  const int status = guarded([&] {
    THPObjectPtr set(PySet_New(nullptr));
    for (const auto& [storage, weak] : storages->storage) {
      THPObjectPtr id(weak.expired() ? PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(storage))
                                     : Py_NewRef(Py_None));
      if (!set || !id || (id != Py_None && PySet_Add(set, id) < 0)) {
        throw python_error();
      }
    }
    result = set.release();
  });
  return status == ZBP_OK ? result : nullptr;
}

PyObject* zbp_storages_spans(const zbp_storages* storages) {
  PyObject* result = nullptr;
  const int status = guarded([&] {
    THPObjectPtr list = new_list();
    for (const auto& [storage, weak] : storages->storage) {
      if (const auto living = weak.lock()) {
        append(list, Py_BuildValue("(sKK)", living->device().str().c_str(),
                                   static_cast<unsigned long long>(address_of(*living)),
                                   static_cast<unsigned long long>(living->nbytes())));
      }
    }
    result = list.release();
  });
  return status == ZBP_OK ? result : nullptr;
}

PyObject* zbp_storages_of(PyObject* tensors) {
  return set_of(tensors, [](const c10::StorageImpl& storage) {
    return PyLong_FromVoidPtr(const_cast<c10::StorageImpl*>(&storage));
  });
}

PyObject* zbp_addresses_of(PyObject* tensors) {
  return set_of(tensors, [](const c10::StorageImpl& storage) {
    return PyLong_FromUnsignedLongLong(address_of(storage));
  });
}

PyObject* zbp_search_holders(const zbp_search* search) {
  PyObject* result = nullptr;
  const int status = guarded([&] { result = Search(*search).run(); });
  return status == ZBP_OK ? result : nullptr;
}

PyObject* zbp_live_blocks(uint64_t since) {
  PyObject* result = nullptr;
  const int status = guarded([&] {
    const NoCollection no_collection;
    zbp_block* blocks = nullptr;
    size_t count = 0;
    if (zbp_tap_blocks(since, &blocks, &count) != ZBP_OK) {
      throw std::bad_alloc();
    }
    const std::unique_ptr<zbp_block, decltype(&std::free)> owned(blocks, &std::free);
    THPObjectPtr list = new_list();
    for (size_t i = 0; i < count; ++i) {
      append(list, Py_BuildValue("(KKK)", static_cast<unsigned long long>(blocks[i].address),
                                 static_cast<unsigned long long>(blocks[i].bytes),
                                 static_cast<unsigned long long>(blocks[i].serial)));
    }
    result = list.release();
  });
  return status == ZBP_OK ? result : nullptr;
}
