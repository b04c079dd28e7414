// What one call of I works on: its arguments, and what it has put into the graph.
//
// Ownership: a scene owns its groups, stand-ins and captures, and the edges that it has replaced,
// until they are handed over. When it ends before that, every edge is put back, as far as the nodes
// have not run.
#pragma once

#include <unordered_set>

#include "core/pass/zbp_split.h"
#include "shim/engine/stand_in.h"
#include "shim/input/zbp_input.h"
#include "shim/torch/edits.h"
#include "shim/torch/python.h"

namespace zbp {

/// As checked and converted; see zbp_input.h.
struct InputPassArgs {
  std::vector<Edge> roots;                   // where the backward starts
  variable_list root_grads;                  // one per root, defined
  std::vector<at::Tensor> inputs;            // those that require a gradient
  std::unordered_set<const void*> weights;   // their identities; ignored when `all_leaves`
  std::vector<at::Tensor> frozen;            // weights that require no gradient
  std::unordered_set<const void*> excluded;  // identities of weights whose gradients I computes
  variable_list outputs;  // the output tensors that have a history, to be detached
  bool all_leaves = false;
  zbp_policy policy{};
};

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
  C10_DISABLE_COPY_AND_ASSIGN(Walk);

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

  /// The edges behind the inputs, in the order of InputPassArgs::inputs; invalid for a
  /// view that was made under no_grad.
  const edge_list& input_edges() const { return input_edges_; }
  /// The nodes of InputPassArgs::roots, in their order.
  const std::vector<uint32_t>& roots() const { return roots_; }

 private:
  const void* key_of(const Edge& edge) const;
  void add_inputs(const InputPassArgs& args);
  void add_reachable();
  void mark_weights(const InputPassArgs& args);
  void warn_of_other_leaves() const;

  edge_list input_edges_;
  // Of the inputs' nodes with several outputs: which of them are inputs.
  std::unordered_map<const Node*, SmallVector<uint32_t, 2>> input_outputs_;
  // Of the inputs that are leaves: the accumulator that they have now. A graph may lead to another,
  // if the memory was taken away since (.data on another device) and brought back.
  std::unordered_map<const void*, const Node*> input_leaves_;
  std::vector<uint32_t> roots_;
  zbp_graph& graph_;
};

using Captures = std::unordered_map<uint32_t, NodeRef<Capture>>;  // by the id of an input's node

/// The gradient of each input, detached, in memory of its own: the caller may add to it in place
/// while other inputs' gradients, the caller's output gradients or a task share the storage.
variable_list input_grads(const InputPassArgs& args, const Walk& walk, const Captures& captures,
                          const std::vector<GroupPtr>& groups);

/// Adds these to the inputs' .grad, as torch's module has it: what is not there becomes the
/// gradient itself. Runs the hooks that an ordinary backward would run behind the addition.
void add_input_grads(const InputPassArgs& args, const Walk& walk, const Captures& captures,
                     const variable_list& grads);

struct Scene {
  /// However I ends, every edge is put back that has not been handed over, no stand-in keeps what
  /// its node has lent it, and if I has failed, none leaves its node half used.
  ~Scene() {
    cuts.undo();
    detours.undo();
    for (const auto& stand_in : stand_ins) {
      if (stand_in) {
        stand_in->give_up();
      }
    }
  }

  InputPassArgs args;
  std::vector<size_t> position;  // of args.inputs, among all values that the caller has listed

  std::vector<GroupPtr> groups;
  Captures captures;
  std::vector<NodeRef<StandIn>> stand_ins;                // of the split nodes, by id
  std::unordered_map<uint32_t, NodeRef<Runner>> runners;  // of nodes with hooks, by id
  bool runs_others_code = false;                          // a Function's, a hook's
  EdgeEdits detours;  // to stand-ins: for good, once I has succeeded
  EdgeEdits cuts;     // all others: for the time of the run

  variable_list input_grads;  // one per args.inputs, undefined where nothing reached it
};

/// Plans I and runs it: afterwards the scene has the groups and the inputs' gradients.
void run_input_pass(Scene& scene);

}  // namespace zbp
