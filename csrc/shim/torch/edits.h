// Changes of edges that can be undone.
//
// Ownership: an edit owns the edge that it replaced. The edited nodes are borrowed: whoever holds
// the EdgeEdits keeps them alive (in practice: through the roots of the graph that is edited). An
// EdgeEdits that goes out of scope puts every edge back, the last one first.
#pragma once

#include <vector>

#include <torch/csrc/autograd/functions/tensor.h>

#include "shim/torch/nodes.h"

namespace zbp {

class EdgeEdits {
 public:
  EdgeEdits() = default;
  C10_DISABLE_COPY_AND_ASSIGN(EdgeEdits);
  ~EdgeEdits() { undo(); }

  /// With an invalid edge: the engine and the node's should_compute_output() skip it.
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
    // The node of an in-place write to a view asserts that the node within it has the same edges,
    // but for the first; that one is gone once it has run.
    const auto* slices = as<torch::autograd::CopySlices>(node);
    if (slices && slices->fn && slot > 0) {
      slices->fn->next_edges()[slot] = edge;
    }
    std::swap(node.next_edges()[slot], edge);
  }

  std::vector<Edit> edits_;
};

}  // namespace zbp
