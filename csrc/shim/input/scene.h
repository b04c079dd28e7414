// What one call of I works on: its arguments, and what it has put into the graph.
//
// Ownership: a scene owns its groups, stand-ins and captures, and the edges that it has replaced,
// until they are handed over. When it ends before that, every edge is put back, as far as the nodes
// have not run.
#pragma once

#include <unordered_set>

#include "shim/engine/hooked_node.h"
#include "shim/engine/stand_in.h"
#include "shim/input/zbp_input.h"
#include "shim/torch/edits.h"
#include "shim/torch/python.h"

namespace zbp {

class Walk;

/// As checked and converted; see zbp_input.h.
struct InputPassArgs {
  std::vector<Edge> roots;                   // where the backward starts
  variable_list root_grads;                  // one per root, defined
  std::vector<at::Tensor> inputs;            // those that require a gradient
  std::vector<at::Tensor> weights;           // ignored when `all_leaves`
  std::vector<at::Tensor> frozen;            // weights that require no gradient
  std::unordered_set<const void*> excluded;  // identities of weights whose gradients I computes
  variable_list outputs;  // the output tensors that have a history, to be detached
  bool all_leaves = false;
  zbp_policy policy{};
};

using Captures = std::unordered_map<uint32_t, NodeRef<Capture>>;  // by the id of an input's node

/// The gradient of each input, detached, in memory of its own: the caller may add to it in place
/// while other inputs' gradients, the caller's output gradients or a task share the storage.
variable_list input_grads(const InputPassArgs& args, const Walk& walk, const Captures& captures,
                          const std::vector<GroupPtr>& groups);

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
  std::vector<NodeRef<StandIn>> stand_ins;  // of the split nodes, by id
  std::vector<std::unique_ptr<HookedNode>> hooked;
  EdgeEdits detours;  // to stand-ins: for good, once I has succeeded
  EdgeEdits cuts;     // all others: for the time of the run

  variable_list input_grads;  // one per args.inputs, undefined where nothing reached it
};

/// Plans I and runs it: afterwards the scene has the groups and the inputs' gradients.
void run_input_pass(Scene& scene);

}  // namespace zbp
