// Step 1 and 2 of I: libtorch's nodes become integers in a zbp_graph, and the core plans on those.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/graph/zbp_plan.h"
#include "shim/pass/group.h"

namespace zbp {

/// The graph between the stage's outputs and its inputs, and the plan for it.
/// Borrows the nodes: whoever holds the roots keeps them alive.
///
/// Note [Other outputs of an input's node]
/// An input may be one of several outputs of a node (of an unbind, a split), and the stage may use others of them,
/// which are no inputs. What arrives at the input ends there; what arrives at the others goes on through the node,
/// with no gradient for the input. So the graph has such a node twice: where inputs are, under its own address, and,
/// if the stage uses other outputs, like any other node, under the address behind it.
class Walk {
 public:
  explicit Walk(const InputPassArgs& args);
  ~Walk();
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  const zbp_graph& graph() const { return graph_; }
  const zbp_plan& plan() const { return plan_; }
  Node& node(uint32_t id) const {
    return *reinterpret_cast<Node*>(reinterpret_cast<uintptr_t>(graph_.key[id]) & ~uintptr_t{1});
  }
  bool has(uint32_t id, uint8_t node_flag) const { return (plan_.flag[id] & node_flag) != 0; }
  bool is_input(uint32_t id) const { return (graph_.mark[id] & ZBP_MARK_INPUT) != 0; }
  bool is_input(const Edge& edge) const {
    uint32_t id = 0;
    return zbp_graph_find(&graph_, key_of(edge), &id) && is_input(id);
  }
  uint32_t id_of(const Edge& edge) const;
  /// True if gradients from several sides arrive at the node of `edge`: from nodes, or where the backward starts.
  bool adds_up(const Edge& edge) const {
    const uint32_t id = id_of(edge);
    return consumers_[id] + starts_[id] > 1;
  }
  /// The group whose W may still read what the node of `edge` gave to other nodes: that of a node outside the
  /// closure with consumers in the graph; -1 for all others.
  int32_t group_that_reads(const Edge& edge) const;
  /// True for a node that the graph has, or may have, twice.
  bool has_other_outputs(const Node& node) const { return input_outputs_.count(&node) != 0; }

  /// The edges behind the inputs, in the order of InputPassArgs::inputs; invalid for a leaf that is
  /// in no graph.
  const edge_list& input_edges() const { return input_edges_; }

 private:
  const void* key_of(const Edge& edge) const;
  void add_inputs(const InputPassArgs& args);
  void add_reachable();
  void mark_weights(const InputPassArgs& args);
  void count_consumers(const InputPassArgs& args);

  edge_list input_edges_;
  // Of the inputs' nodes with several outputs: which of them are inputs.
  std::unordered_map<const Node*, SmallVector<uint32_t, 2>> input_outputs_;
  std::vector<uint32_t> consumers_;  // per node: how many edges of the graph lead to it
  std::vector<uint32_t> starts_;     // per node: how many roots are there
  zbp_graph graph_{};
  zbp_plan plan_{};
};

}  // namespace zbp
