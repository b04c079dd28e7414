// A search through the heap: see Note [How holders are searched] in zbp_holders.h.
#pragma once

#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/util/ArrayRef.h>

#include "shim/holders/heap.h"
#include "shim/holders/storages.h"

namespace zbp {

/// A storage that is searched for, and its tensors.
struct Sought {
  uint32_t storage;
  uint64_t address;
  std::vector<uint32_t> tensors;
};

enum class Rank : uint8_t { root, hidden, cycle, none };

class Search {
 public:
  explicit Search(const zbp_search& search) : search_(search), heap_(search.groups, search.work) {}

  /// Throws python_error, std::bad_alloc. The rest may be called afterwards.
  void run();

  Heap& heap() { return heap_; }
  const std::vector<Sought>& sought() const { return sought_; }
  /// Those that `sought` does not explain have `found` unset.
  const Blocks& blocks() const { return blocks_; }
  bool is_reached_by_roots(uint32_t v) const { return v < reached_; }
  bool is_listed(uint32_t v) const { return v < listed_.size() && listed_[v]; }
  bool wraps() const { return search_.wraps != 0; }
  /// As Heap's, where the references of the search's own callers to its target count as explained.
  int64_t unexplained(uint32_t v) const { return heap_.unexplained(v, is_listed(v), is_target(v)); }
  Rank rank(uint32_t v) const { return way_[v].rank; }
  uint32_t depth(uint32_t v) const { return way_[v].depth; }
  /// Of garbage in a cycle.
  uint32_t component(uint32_t v) const { return component_[v]; }

  /// From the outermost holder to `v`, which is the last one; Heap::none stands for a middle that is left out.
  std::vector<uint32_t> chain_to(uint32_t v) const;
  /// A shortest way from `v` back to it, `v` first, not repeated; against the edges.
  std::vector<uint32_t> cycle_through(uint32_t v) const;

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
  bool is_target(uint32_t v) const;

  uint32_t blame(uint32_t v) const;

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
};

}  // namespace zbp
