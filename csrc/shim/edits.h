// Changes of edges that can be undone.
//
// Ownership: an edit owns the edge that it replaced. The edited nodes are borrowed: whoever holds the
// EdgeEdits keeps them alive (in practice: through the roots of the graph that is edited).
// An EdgeEdits that goes out of scope puts every edge back, the last one first.
#pragma once

#include <vector>

#include "shim/compat.h"

namespace zbp {

class EdgeEdits {
 public:
  EdgeEdits() = default;
  EdgeEdits(const EdgeEdits&) = delete;
  EdgeEdits& operator=(const EdgeEdits&) = delete;
  ~EdgeEdits() {
    undo();
  }

  /// Makes the edge invalid: the engine and the node's should_compute_output() skip it.
  void cut(Node& node, size_t slot) {
    replace(node, slot, Edge());
  }

  // set_next_edge() would assert that the node has no parent yet, hence next_edges().
  void replace(Node& node, size_t slot, Edge edge) {
    Edge& place = node.next_edges()[slot];
    edits_.push_back({&node, slot, std::move(place)});
    place = std::move(edge);
  }

  void undo() noexcept {
    while (!edits_.empty()) {
      Edit& edit = edits_.back();
      edit.node->next_edges()[edit.slot] = std::move(edit.old);
      edits_.pop_back();
    }
  }

  /// Keeps the changes and lets go of the replaced edges.
  void commit() noexcept {
    edits_.clear();
  }

 private:
  struct Edit {
    Node* node;
    size_t slot;
    Edge old;
  };
  std::vector<Edit> edits_;
};

}  // namespace zbp
