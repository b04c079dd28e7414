// Changes of edges that can be undone.
//
// Ownership: an edit owns the edge that it replaced. The edited nodes are borrowed: whoever holds the
// EdgeEdits keeps them alive (in practice: through the roots of the graph that is edited).
// An EdgeEdits that goes out of scope puts every edge back, the last one first.
//
// Threads: a search for holders (csrc/holders) may read the edges of any node meanwhile: whoever edits those of a
// node that others can reach does so under edges_mutex(). Nothing is freed under it, and the GIL is not asked for.
#pragma once

#include <mutex>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/functions/tensor.h>

#include "shim/torch/compat.h"

namespace zbp {

std::mutex& edges_mutex();

/// Puts `edge` in the place of the node's, which goes when the lock is no longer held.
inline void exchange_edge(Node& node, size_t slot, Edge edge) {
  const std::lock_guard<std::mutex> lock(edges_mutex());
  std::swap(node.next_edges()[slot], edge);
}

/// Likewise, all of them.
inline void exchange_edges(Node& node, edge_list edges) {
  const std::lock_guard<std::mutex> lock(edges_mutex());
  node.next_edges().swap(edges);
}

/// All hooks but those that run after the node. Likewise: they may be Python's.
inline void drop_hooks(Node& node) {
  std::remove_reference_t<decltype(node.retains_grad_hooks())> retains_grad;
  std::remove_reference_t<decltype(node.tensor_pre_hooks())> tensor_pre;
  std::remove_reference_t<decltype(node.pre_hooks())> pre;
  const std::lock_guard<std::mutex> lock(edges_mutex());
  node.retains_grad_hooks().swap(retains_grad);
  node.tensor_pre_hooks().swap(tensor_pre);
  node.pre_hooks().swap(pre);
}

class EdgeEdits {
 public:
  EdgeEdits() = default;
  EdgeEdits(const EdgeEdits&) = delete;
  EdgeEdits& operator=(const EdgeEdits&) = delete;
  ~EdgeEdits() { undo(); }

  /// Makes the edge invalid: the engine and the node's should_compute_output() skip it.
  void cut(Node& node, size_t slot) { replace(node, slot, Edge()); }

  void replace(Node& node, size_t slot, Edge edge) {
    edits_.push_back({&node, slot, node.next_edge(slot)});
    assign(node, slot, std::move(edge));
  }

  void undo() noexcept {
    while (!edits_.empty()) {
      Edit& edit = edits_.back();
      assign(*edit.node, edit.slot, std::move(edit.old));
      edits_.pop_back();
    }
  }

  /// Keeps the changes and lets go of the replaced edges.
  void commit() noexcept { edits_.clear(); }

 private:
  struct Edit {
    Node* node;
    size_t slot;
    Edge old;
  };

  // set_next_edge() would assert that the node has no parent yet, hence next_edges().
  static void assign(Node& node, size_t slot, Edge edge) {
    Edge inner_edge = edge;  // like the old ones, freed behind the lock
    const std::lock_guard<std::mutex> lock(edges_mutex());
    // The node of an in-place write to a view asserts that the node within it has the same edges,
    // but for the first; that one is gone once it has run.
    if (typeid(node) == typeid(torch::autograd::CopySlices) && slot > 0) {
      if (const auto& inner = static_cast<torch::autograd::CopySlices&>(node).fn) {
        std::swap(inner->next_edges()[slot], inner_edge);
      }
    }
    std::swap(node.next_edges()[slot], edge);
  }

  std::vector<Edit> edits_;
};

}  // namespace zbp
