#include "shim/work/targets.h"

#include <algorithm>
#include <unordered_set>
#include <vector>

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/torch/batched.h"
#include "shim/pass/kinds.h"
#include "shim/torch/python.h"
#include "shim/pass/weight_nodes.h"

namespace zbp {

bool Running::asks_for(size_t slot) const {
  if (stand_in) {
    return stand_in->next_edge(slot).is_valid() ||
           face_at(stand_in->task(), static_cast<uint32_t>(slot)).has_value();
  }
  return proxy ? proxy->next_edge(slot).is_valid() : node->task_should_compute_output(slot);
}

Node& original_of(Node& node) {
  if (auto* stand_in = as<StandIn>(node)) {
    return stand_in->is_retired() ? node : stand_in->original();
  }
  if (auto* capture = as<Capture>(node)) {
    return capture->original();
  }
  auto* proxy = as<Proxy>(node);
  return proxy ? proxy->original() : node;
}

Running running_here() {
  const NodePtr current = torch::autograd::get_current_node();
  if (!current) {
    return {};
  }
  Running running{ref_of(original_of(*current)), nullptr, nullptr};
  if (!is_python_function(*running.node)) {
    return {};
  }
  // What a vmap within the backward computes on ends with it, before W.
  const bool is_transformed =
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  running.stand_in = is_transformed ? nullptr : as<StandIn>(*current);
  running.proxy = as<Proxy>(*current);
  return running;
}

namespace {

/// The arguments of a Function's forward, as its context knows them.
class Arguments {
 public:
  explicit Arguments(const Node& node) : node_(node), context_(context_of(node)) {}

  size_t count() const { return is_tensor().size(); }

  /// The node's edge for an argument, which is a tensor if there is one; else -1.
  int32_t slot_of(size_t position) const {
    const auto begin = is_tensor().begin();
    return is_tensor()[position] ? static_cast<int32_t>(std::count(begin, begin + position, true))
                                 : -1;
  }

  /// The edge that leads where the gradient of `tensor` goes, or -1.
  int32_t find(const at::Tensor& tensor) const;

  /// True if one that takes no gradient may be `tensor`: it is frozen, or I has cut its edge for the time of
  /// the run, as that of a weight which is not its own.
  bool may_be_left_out(const at::Tensor& tensor) const;

 private:
  static PyObject* context_of(const Node& node) {
    PyObject* context = torch::autograd::functionToPyObject(ref_of(const_cast<Node&>(node)));
    if (!context) {
      throw python_error();
    }
    return context;
  }

  const THPFunction& function() const {
    return *reinterpret_cast<const THPFunction*>(context_.get());
  }
  const std::vector<bool>& is_tensor() const { return function().is_variable_input; }
  bool looks_like(size_t slot, const at::Tensor& tensor) const;

  const Node& node_;
  mutable THPObjectPtr context_;  // which yields no pointer where it is const
};

int32_t Arguments::find(const at::Tensor& tensor) const {
  const Edge edge = tensor.is_leaf()
                        ? Edge(torch::autograd::impl::try_get_grad_accumulator(tensor), 0)
                        : torch::autograd::impl::gradient_edge(tensor);
  for (size_t slot = 0; edge.is_valid() && slot < node_.num_outputs(); ++slot) {
    const Edge& there = node_.next_edge(slot);
    // While I runs, a stand-in or a capture may have the place of the node behind an argument.
    if (there.is_valid() && there.input_nr == edge.input_nr &&
        &original_of(*there.function) == edge.function.get()) {
      return static_cast<int32_t>(slot);
    }
  }
  return -1;
}

bool Arguments::looks_like(size_t slot, const at::Tensor& tensor) const {
  const auto& known = function().input_info;
  if (slot >= known.size() || known[slot].the_var || tensor.is_nested()) {
    return true;
  }
  return known[slot].scalar_type == tensor.scalar_type() && known[slot].device == tensor.device() &&
         tensor.sym_sizes().equals(known[slot].size);
}

bool Arguments::may_be_left_out(const at::Tensor& tensor) const {
  THPObjectPtr needed(PyObject_GetAttrString(context_.get(), "needs_input_grad"));
  if (!needed) {
    throw python_error();
  }
  for (size_t i = 0; i < count(); ++i) {
    const int32_t slot = slot_of(i);
    if (slot < 0 || node_.next_edge(slot).is_valid() || !looks_like(slot, tensor)) {
      continue;
    }
    const bool was_needed = PyTuple_GetItem(needed, static_cast<Py_ssize_t>(i)) == Py_True;
    // A leaf may have been frozen, or the reverse, since.
    if (tensor.is_leaf() || was_needed == tensor.requires_grad()) {
      return true;
    }
  }
  return false;
}

PyObject* item(PyObject* weights, size_t i, bool is_single) {
  return is_single ? weights : PySequence_Fast_GET_ITEM(weights, i);
}

/// "weights" or "weights[i]", for messages.
std::string argument_name(size_t i, bool is_single) {
  return is_single ? "weights" : c10::str("weights[", i, "]");
}

/// Also numpy's.
bool is_position(PyObject* object) {
  return PyIndex_Check(object) && !PyBool_Check(object) && !as_tensor(object);
}

void check_types(PyObject* weights, bool is_single, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    PyObject* weight = item(weights, i, is_single);
    if (!is_position(weight) && !as_tensor(weight)) {
      refuse(PyExc_TypeError, argument_name(i, is_single), " is a ", Py_TYPE(weight)->tp_name,
             "; expected a tensor that was given to the Function, or its position among the "
             "arguments of forward, as in ctx.needs_input_grad");
    }
  }
}

int32_t slot_of_position(PyObject* weight, const Arguments& arguments, const Node& node,
                         const std::string& name) {
  THPObjectPtr number(PyNumber_Index(weight));
  if (!number) {
    throw python_error();
  }
  int overflow = 0;
  const long position = PyLong_AsLongAndOverflow(number, &overflow);
  if (overflow || position < 0 || static_cast<size_t>(position) >= arguments.count()) {
    refuse(PyExc_ValueError, name, " is ", overflow ? "a huge number" : std::to_string(position),
           "; expected the position of an argument of the forward of ", node.name(), ", which has ",
           arguments.count(), ", the first of which is 0");
  }
  // No tensor: None, for a weight that there may be or not.
  const int32_t slot = arguments.slot_of(position);
  return slot >= 0 && node.next_edge(slot).is_valid() ? slot : -1;
}

int32_t slot_of_tensor(const at::Tensor& tensor, const Arguments& arguments, const Node& node,
                       const std::string& name) {
  const int32_t slot = arguments.find(tensor);
  if (slot < 0 && !arguments.may_be_left_out(tensor)) {
    refuse(PyExc_ValueError, name, " is a tensor of ", describe(tensor), " that was not given to ",
           node.name(), "; pass the tensor that apply() was given, or its position there");
  }
  return slot;
}

}  // namespace

Targets parse_weights(PyObject* weights, const Running& running) {
  Targets targets;
  targets.are_all = weights == Py_None;
  if (targets.are_all) {
    return targets;
  }
  targets.is_single = !PyTuple_Check(weights) && !PyList_Check(weights);
  const size_t count = targets.is_single ? 1 : PySequence_Fast_GET_SIZE(weights);
  if (count == 0) {
    refuse(PyExc_ValueError,
           "weights is empty; expected the weights whose gradients the function "
           "returns, or None if it adds them itself");
  }
  check_types(weights, targets.is_single, count);
  if (!running.node) {
    targets.slots.assign(count, -1);
    return targets;
  }
  const Arguments arguments(*running.node);
  for (size_t i = 0; i < count; ++i) {
    PyObject* weight = item(weights, i, targets.is_single);
    const std::string name = argument_name(i, targets.is_single);
    const at::Tensor* tensor = as_tensor(weight);
    targets.slots.push_back(
        tensor ? slot_of_tensor(without_vmap(*tensor), arguments, *running.node, name)
               : slot_of_position(weight, arguments, *running.node, name));
  }
  return targets;
}

namespace {

/// True for the edge to a leaf, or to what was computed from leaves alone, in not too many steps: it may be a weight.
/// What I redirects comes from the stage's inputs.
bool comes_from_leaves(const Edge& start) {
  constexpr size_t most_nodes = 256;
  std::vector<Node*> pending{start.function.get()};
  std::unordered_set<Node*> seen(pending.begin(), pending.end());
  bool has_leaf = false;
  while (!pending.empty()) {
    Node& node = *pending.back();
    pending.pop_back();
    if (as<StandIn>(node) || as<Capture>(node) || seen.size() > most_nodes) {
      return false;
    }
    has_leaf = has_leaf || as<torch::autograd::AccumulateGrad>(node);
    for (const Edge& edge : node.next_edges()) {
      if (edge.is_valid() && seen.insert(edge.function.get()).second) {
        pending.push_back(edge.function.get());
      }
    }
  }
  return has_leaf;
}

}  // namespace

bool asks_for_weights(const Targets& targets, const Running& running) {
  if (!running.node) {
    return true;
  }
  if (!targets.are_all) {
    return std::any_of(targets.slots.begin(), targets.slots.end(),
                       [&](int32_t slot) { return slot >= 0 && running.asks_for(slot); });
  }
  // See Note [Weights that nobody has named].
  size_t asked = 0;
  bool is_weight = running.proxy != nullptr;
  const size_t count = running.node->num_outputs();
  for (size_t slot = 0; slot < count; ++slot) {
    if (running.asks_for(slot)) {
      ++asked;
      is_weight = is_weight || comes_from_leaves(running.node->next_edge(slot));
    }
  }
  return asked > 0 && (asked == count || is_weight);
}

}  // namespace zbp
