// Step 1 of I: libtorch's nodes become integers in a zbp_graph.
#pragma once

#include "core/pass/zbp_split.h"
#include "shim/input/scene.h"

namespace zbp {

/// The graph between the stage's outputs and its inputs. Borrows the graph, and the nodes: whoever
/// holds the roots keeps them alive.
///
/// Note [Other outputs of an input's node]
/// An input may be one of several outputs of a node (of an unbind, a split), and the stage may use
/// others of them, which are no inputs. What arrives at the input ends there; what arrives at the
/// others goes on through the node, with no gradient for the input. So the graph has such a node
/// twice: where inputs are, under its own address, and, if the stage uses other outputs, like any
/// other node, under the address behind it.
class Walk {
 public:
  /// Fills `graph`, which is empty.
  Walk(const InputPassArgs& args, zbp_graph& graph);
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  Node& node(uint32_t id) const {
    return *reinterpret_cast<Node*>(reinterpret_cast<uintptr_t>(graph_.key[id]) & ~uintptr_t{1});
  }
  bool is_input(uint32_t id) const { return (graph_.mark[id] & ZBP_ROLE_INPUT) != 0; }
  /// The node that the edge leads to; ZBP_NONE if the graph does not have it.
  uint32_t id_of(const Edge& edge) const;
  /// The group whose W may still read what the node gave to other nodes: that of a node outside the
  /// closure with consumers in the graph; ZBP_NONE for all others.
  uint32_t group_that_reads(uint32_t id, const zbp_plan& plan) const;
  /// True for a node that the graph has, or may have, twice.
  bool has_other_outputs(const Node& node) const { return input_outputs_.count(&node) != 0; }

  /// The edges behind the inputs, in the order of InputPassArgs::inputs; invalid for a leaf that is
  /// in no graph.
  const edge_list& input_edges() const { return input_edges_; }
  /// The nodes of InputPassArgs::roots, in their order.
  const std::vector<uint32_t>& roots() const { return roots_; }

 private:
  const void* key_of(const Edge& edge) const;
  void add_inputs(const InputPassArgs& args);
  void add_reachable();
  void mark_weights(const InputPassArgs& args);
  void warn_of_other_leaves() const;
  void mark_weight(const InputPassArgs& args, uint32_t id, const at::Tensor& weight);

  edge_list input_edges_;
  // Of the inputs' nodes with several outputs: which of them are inputs.
  std::unordered_map<const Node*, SmallVector<uint32_t, 2>> input_outputs_;
  std::vector<uint32_t> roots_;
  zbp_graph& graph_;
};

}  // namespace zbp
