// Step 1 and 2 of I: libtorch's nodes become integers in a zbp_graph, and the core plans on those.
#pragma once

#include <vector>

#include "core/zbp_plan.h"
#include "shim/group.h"

namespace zbp {

/// The graph between the stage's outputs and its inputs, and the plan for it.
/// Borrows the nodes: whoever holds the roots keeps them alive.
class Walk {
 public:
  explicit Walk(const InputPassArgs& args);
  ~Walk();
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  const zbp_graph& graph() const { return graph_; }
  const zbp_plan& plan() const { return plan_; }
  Node& node(uint32_t id) const { return *static_cast<Node*>(const_cast<void*>(graph_.key[id])); }
  bool has(uint32_t id, uint8_t node_flag) const { return (plan_.flag[id] & node_flag) != 0; }
  bool is_input(uint32_t id) const { return (graph_.mark[id] & ZBP_MARK_INPUT) != 0; }
  bool is_input_node(const Node& node) const {
    uint32_t id = 0;
    return zbp_graph_find(&graph_, &node, &id) && is_input(id);
  }
  uint32_t id_of(const Node& node) const;
  /// True if gradients from several sides arrive at `node`: from nodes, or where the backward starts.
  bool adds_up(const Node& node) const {
    const uint32_t id = id_of(node);
    return consumers_[id] + starts_[id] > 1;
  }
  /// The group whose W may still read what `node` gave to other nodes: that of a node outside the
  /// closure with consumers in the graph; -1 for all others.
  int32_t group_that_reads(const Node& node) const;

  /// The edges behind the inputs, in the order of InputPassArgs::inputs; invalid for a leaf that is
  /// in no graph.
  const edge_list& input_edges() const { return input_edges_; }

 private:
  void add_inputs(const InputPassArgs& args);
  void add_reachable();
  void mark_weights(const InputPassArgs& args);
  void count_consumers(const InputPassArgs& args);

  edge_list input_edges_;
  std::vector<uint32_t> consumers_;  // per node: how many edges of the graph lead to it
  std::vector<uint32_t> starts_;     // per node: how many roots are there
  zbp_graph graph_{};
  zbp_plan plan_{};
};

}  // namespace zbp
