// A search through the heap: see Note [How holders are searched] in zbp_holders.h.
#pragma once

#include <unordered_set>
#include <vector>

#include "core/holders/zbp_ways.h"
#include "shim/holders/heap.h"
#include "shim/holders/storages.h"

namespace zbp {

/// A storage that is searched for, and its tensors.
struct Sought {
  uint32_t storage;
  uint64_t address;
  std::vector<uint32_t> tensors;
};

class Search {
 public:
  explicit Search(const zbp_search& search)
      : search_(search), heap_(search.groups, search.work, search.array) {}
  ~Search() { zbp_ways_fini(&ways_); }
  Search(const Search&) = delete;
  Search& operator=(const Search&) = delete;

  /// Throws python_error, std::bad_alloc. The rest may be called afterwards.
  void run();

  Heap& heap() { return heap_; }
  zbp_ways& ways() { return ways_; }
  const std::vector<Sought>& sought() const { return sought_; }
  /// Those that `sought` does not explain have `found` unset.
  const Blocks& blocks() const { return blocks_; }
  bool wraps() const { return search_.wraps != 0; }
  /// As Heap's, where the references of the search's own callers to its target count as explained.
  int64_t unexplained(uint32_t v) const { return heap_.unexplained(v, is_listed(v), is_target(v)); }

 private:
  void add_roots();
  void explore_the_rest();
  void find_ways(const uint8_t* blame);
  void find_sought();
  bool is_sought(uint32_t v) const;
  bool is_target(uint32_t v) const;
  bool is_listed(uint32_t v) const { return v < listed_.size() && listed_[v]; }
  uint8_t blame(uint32_t v) const;

  const zbp_search& search_;
  Heap heap_;
  zbp_ways ways_{};
  std::vector<bool> listed_;
  std::vector<Sought> sought_;
  Blocks blocks_;
  std::unordered_set<uint64_t> other_blocks_;
};

}  // namespace zbp
