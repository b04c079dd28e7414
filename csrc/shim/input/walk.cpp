#include "shim/input/scene.h"

#include <torch/csrc/autograd/variable.h>

#include "shim/group/facts.h"

namespace zbp {

Walk::Walk(const InputPassArgs& args, zbp_graph& graph) : graph_(graph) {
  add_inputs(args);
  for (const Edge& root : args.roots) {
    uint32_t& id = roots_.emplace_back();
    check_status(zbp_graph_add_node(&graph_, key_of(root), &id));
    graph_.mark[id] |= ZBP_ROLE_ROOT;
  }
  add_reachable();
  mark_weights(args);
  if (!args.excluded.empty() || args.policy.defer == ZBP_DEFER_NOTHING) {
    for (uint32_t id = 0; id < graph_.node_count; ++id) {
      graph_.mark[id] |= is_layout(node(id)) ? 0 : ZBP_ROLE_COMPUTES;
    }
  }
}

uint32_t Walk::id_of(const Edge& edge) const {
  uint32_t id = ZBP_NONE;
  zbp_map_find(&graph_.id_of, key_of(edge), &id);
  return id;
}

uint32_t Walk::group_that_reads(uint32_t id, const zbp_plan& plan) const {
  const bool is_read = (plan.flag[id] & ZBP_NODE_WEIGHTWARD) != 0 &&
                       std::any_of(graph_.edge, graph_.edge + graph_.edge_count,
                                   [id](const zbp_edge& edge) { return edge.dst == id; });
  return is_read ? plan.group[id] : ZBP_NONE;
}

/// See Note [Other outputs of an input's node], and input_leaves_.
const void* Walk::key_of(const Edge& edge) const {
  Node* const node = edge.function.get();
  if (const auto* accumulator = node ? as_accumulator(*node) : nullptr) {
    const auto leaf = input_leaves_.find(accumulator->variable.unsafeGetTensorImpl());
    return leaf != input_leaves_.end() ? leaf->second : node;
  }
  if (input_outputs_.empty()) {
    return node;
  }
  const auto outputs = input_outputs_.find(node);
  const bool is_other = outputs != input_outputs_.end() &&
                        std::find(outputs->second.begin(), outputs->second.end(), edge.input_nr) ==
                            outputs->second.end();
  return reinterpret_cast<const char*>(node) + (is_other ? 1 : 0);
}

void Walk::add_inputs(const InputPassArgs& args) {
  for (const at::Tensor& input : args.inputs) {
    const Edge& edge = input_edges_.emplace_back(torch::autograd::impl::gradient_edge(input));
    if (!edge.is_valid()) {
      continue;  // a view that was made under no_grad
    }
    uint32_t id = 0;
    check_status(zbp_graph_add_node(&graph_, edge.function.get(), &id));
    graph_.mark[id] |= ZBP_ROLE_INPUT;
    if (input.is_leaf()) {
      input_leaves_.emplace(input.unsafeGetTensorImpl(), edge.function.get());
    } else if (edge.function->num_inputs() > 1) {
      input_outputs_[edge.function.get()].push_back(edge.input_nr);
    }
  }
}

// Ids are dense in the order of discovery, so the list of nodes is the queue of the search.
void Walk::add_reachable() {
  for (uint32_t id = 0; id < graph_.node_count; ++id) {
    if (is_input(id)) {
      continue;
    }
    TORCH_CHECK(!is_consumed(node(id)), ERR_CONSUMED);
    const edge_list& edges = node(id).next_edges();
    for (uint32_t slot = 0; slot < edges.size(); ++slot) {
      if (edges[slot].is_valid()) {
        uint32_t next = 0;
        check_status(zbp_graph_add_node(&graph_, key_of(edges[slot]), &next));
        check_status(zbp_graph_add_edge(&graph_, id, slot, next));
      }
    }
  }
}

void Walk::mark_weights(const InputPassArgs& args) {
  bool is_any_here = args.all_leaves || args.weights.empty() || !args.frozen.empty();
  for (uint32_t id = 0; id < graph_.node_count; ++id) {
    const auto* accumulator = as_accumulator(node(id));
    const void* const leaf = accumulator ? accumulator->variable.unsafeGetTensorImpl() : nullptr;
    if (leaf && (args.all_leaves || args.weights.count(leaf))) {
      TORCH_CHECK(
          !accumulator->variable.grad_fn(),
          "leaf variable has been moved into the graph interior: ", describe(accumulator->variable),
          " was changed in place, since the forward, by something that needs a gradient; "
          "change weights under torch.no_grad(), and run the microbatch again");
      const bool is_excluded = args.policy.defer == ZBP_DEFER_NOTHING || args.excluded.count(leaf);
      graph_.mark[id] |= ZBP_ROLE_WEIGHT | (is_excluded ? ZBP_ROLE_EXCLUDED : 0);
      is_any_here = true;
    }
  }
  if (!is_any_here) {
    warn_of_other_leaves();
  }
}

/// Nobody would notice: there is no group, and W has nothing to do.
void Walk::warn_of_other_leaves() const {
  int count = 0;
  for (uint32_t id = 0; id < graph_.node_count; ++id) {
    count += !is_input(id) && as_accumulator(node(id));
  }
  if (count > 0 &&
      PyErr_WarnFormat(PyExc_UserWarning, 1,
                       "none of the weights that stage_backward_input was given is in the graph, "
                       "so none of the %d leaves that it reaches beside the inputs will get a "
                       "gradient; pass this stage's own weights, in a list (an iterator serves one "
                       "call), or None for all leaves",
                       count) < 0) {
    throw_error();
  }
}

}  // namespace zbp
