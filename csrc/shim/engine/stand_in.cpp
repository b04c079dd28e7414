#include "shim/engine/stand_in.h"

#include <algorithm>

#include <torch/csrc/autograd/cpp_hook.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_hook.h>

#include "shim/torch/gil.h"
#include "shim/torch/main_grad.h"
#include "shim/torch/names.h"
#include "shim/group/facts.h"
#include "shim/group/saved.h"
#include "shim/torch/nodes.h"

namespace zbp {

namespace {

/// Which of its node's gradients a tensor's hook takes; nothing for a hook of another kind.
const size_t* number_in(torch::autograd::FunctionPreHook& hook) {
  namespace ag = torch::autograd;
  if (auto* python = as_hidden<ag::PyFunctionTensorPreHook>(hook)) {
    return &python->value_idx;
  }
  if (auto* list = as_hidden<ag::CppFunctionTensorPreHook>(hook)) {
    return &list->value_idx_;
  }
  auto* one = as_hidden<ag::CppFunctionSingleTensorPreHook>(hook);
  return one ? &one->value_idx_ : nullptr;
}

/// What is kept of what the node's hooks return is theirs no more.
variable_list call_hooks_before(Node& node, variable_list&& grads, bool skip_undefined) {
  if (!has_hooks(node)) {
    return std::move(grads);
  }
  const CameIn came_in(grads);
  variable_list in =
      call_pre_hooks(node, call_tensor_hooks(node, std::move(grads), skip_undefined));
  came_in.own(in);
  return in;
}

/// While it lives, the context of a Function's node refers to the node that the engine runs in its
/// place.
///
/// Note [Buffers of a Function's inputs]
/// From torch 2.15 on a backward can ask for the buffers in which the engine adds up the gradients
/// of the Function's inputs, and add to them itself. The context finds them by its node's edges, if
/// that is the node that the engine runs. With a post hook torch refuses, and so do we.
class Impersonation {
 public:
  Impersonation(Node& node, Node& substitute) {
    if constexpr (CONTEXTS_ASK_FOR_BUFFERS) {
      if (is_python_function(node) && node.post_hooks().empty()) {
        const AcquireGil gil;
        THPObjectPtr context = context_of(node);
        begin(reinterpret_cast<THPFunction*>(context.get()), node, substitute);
      }
    }
  }
  ~Impersonation() {
    if (context_) {
      const AcquireGil gil;
      std::swap(context_->cdata, other_);
      other_.reset();
      Py_DECREF(reinterpret_cast<PyObject*>(context_));
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(Impersonation);

 private:
  // A template, as the context of an older torch cannot refer to another's node.
  template <class Context>
  void begin(Context* context, Node& node, Node& substitute) {
    if constexpr (std::is_same_v<decltype(context->cdata), NodePtr>) {
      // Else another thread runs the node as well.
      if (context->cdata.get() == &node) {
        context_ = context;
        Py_INCREF(reinterpret_cast<PyObject*>(context_));
        other_ = ref_of(substitute);
        std::swap(context_->cdata, other_);  // no reference is counted: the node keeps its context
      }
    }
  }

  THPFunction* context_ = nullptr;
  decltype(THPFunction::cdata) other_;
};

}  // namespace

variable_list call_tensor_hooks(Node& node, variable_list grads, bool skip_undefined) {
  for (const auto& hook : node.tensor_pre_hooks()) {
    const size_t* number = skip_undefined ? number_in(*hook) : nullptr;
    if (!number || grads[*number].defined()) {
      grads = (*hook)(grads);
    }
  }
  for (const auto& [output, hook] : node.retains_grad_hooks()) {
    if (!skip_undefined || grads[output].defined()) {
      grads = (*hook)(grads);
    }
  }
  return grads;
}

variable_list call_pre_hooks(Node& node, variable_list grads) {
  for (const auto& hook : node.pre_hooks()) {
    grads = (*hook)(grads);
  }
  return grads;
}

variable_list call_post_hooks(Node& node, variable_list outputs, const variable_list& inputs) {
  if (!node.post_hooks().empty()) {
    const CameIn made(outputs);
    for (const auto& hook : node.post_hooks()) {
      outputs = (*hook)(outputs, inputs);
    }
    made.own(outputs);
  }
  return outputs;
}

Node& original_of(Node& node) {
  const auto* in_place = dynamic_cast<InPlaceOf*>(&node);
  return in_place && in_place->original_ ? *in_place->original_ : node;
}

variable_list Runner::apply(variable_list&& grads) {
  try {
    return run_node(*original_, *this, std::move(grads), release_, track_views_, skip_undefined_);
  } catch (...) {
    if (torch::autograd::AnomalyMode::is_enabled()) {
      original_->metadata()->print_stack(original_->name());
    }
    throw;
  }
}

StandIn::StandIn(Node& original, GroupPtr group, size_t task, bool skip_undefined)
    : InPlaceOf(ref_of(original), original.sequence_nr()),
      group_(std::move(group)),
      task_(task),
      skip_undefined_(skip_undefined) {
  if (has_metadata_) {
    NodeParts::swap_anomaly_metadata(*original_, *this);
  }
}

void StandIn::retire() noexcept {
  give_back_metadata();
  const edge_list dead = std::exchange(next_edges(), edge_list(next_edges().size()));
  original_ = nullptr;
  group_ = nullptr;
}

void StandIn::give_up() noexcept {
  give_back_metadata();
  if (original_ && std::exchange(has_run_, false)) {
    original_->release_variables();
    original_->add_pre_hook(std::make_unique<ConsumedGuard>());
  }
}

void StandIn::give_back_metadata() noexcept {
  if (original_ && std::exchange(has_metadata_, false)) {
    NodeParts::swap_anomaly_metadata(*original_, *this);
  }
}

variable_list StandIn::apply(variable_list&& grads) {
  TORCH_CHECK(original_, ERR_CONSUMED);
  TORCH_CHECK(!std::exchange(has_begun_, true), ERR_WITHIN);
  pin_outside(*group_);
  Task& mine = task();
  SmallVector<uint32_t, 2> somebodys;
  variable_list outputs = mine.kind() == ZBP_TASK_WHOLE
                              ? run_whole(mine, std::move(grads), somebodys)
                              : run_split(mine, std::move(grads));
  if (const auto faces = group_->arrive(mine, somebodys); !faces.empty()) {
    group_->own(faces, outputs);
  }
  return outputs;
}

variable_list StandIn::run_split(Task& task, variable_list&& grads) {
  Node& node = *original_;
  const Separable separable = *separate(node);
  variable_list in = call_hooks_before(node, std::move(grads), skip_undefined_);
  take_matrices(task, separable, in, *group_);
  const variable_list inputs = node.post_hooks().empty() ? variable_list() : in;
  if (task.kind() == ZBP_TASK_PRODUCT) {
    node.will_release_variables();
  }
  variable_list outputs = NodeParts::apply_to(node, std::move(in));
  has_run_ = true;
  // A post hook makes a node whole; one that another hook has added meanwhile comes too late for
  // that.
  outputs = call_post_hooks(node, std::move(outputs), inputs);
  if (task.kind() == ZBP_TASK_PRODUCT) {
    node.release_variables();
    forget_leaves(node, separable);
  } else {
    let_go_of_unread(task, separable, *group_);
  }
  return outputs;
}

variable_list run_node(Node& node, Node& substitute, variable_list&& grads, bool release,
                       bool track_views, bool skip_undefined) {
  variable_list in = call_hooks_before(node, std::move(grads), skip_undefined);
  if (release) {
    node.will_release_variables();
  }
  const variable_list inputs = node.post_hooks().empty() ? variable_list() : in;
  variable_list outputs;
  {
    const Impersonation impersonation(node, substitute);
    std::optional<at::AutoDispatchBelowADInplaceOrView> no_view;
    if (!track_views && saves_nothing(node)) {
      no_view.emplace();
    }
    outputs = NodeParts::apply_to(node, std::move(in));
  }
  torch::autograd::validate_outputs(node.next_edges(), outputs, [&](const std::string& message) {
    return "Function " + node.name() + " returned an " + message;
  });
  outputs = call_post_hooks(node, std::move(outputs), inputs);
  if (release) {
    node.release_variables();
  }
  return outputs;
}

variable_list StandIn::run_whole(Task& task, variable_list&& grads,
                                 SmallVector<uint32_t, 2>& somebodys) {
  Node& node = *original_;
  const bool is_functions = !is_generated(node);
  const bool is_weights = std::none_of(next_edges().begin(), next_edges().end(),
                                       [](const Edge& edge) { return edge.is_valid(); });
  const CameIn came_in(grads);
  variable_list weights(group_->adds_to_main_grad && is_functions ? node.num_outputs() : 0);
  for (size_t f = 0; f < task.face.size() && !weights.empty(); ++f) {
    if (const int32_t w = task.plan(f).weight; w >= 0) {
      weights[task.plan(f).slot] = group_->weights[w].accumulator->variable;
    }
  }
  const AddedByKernels added(weights);
  may_unpack_refilled_ = is_python_function(node) && zbp::may_unpack_refilled(node);
  variable_list outputs = run_node(node, *this, std::move(grads), /*release=*/true,
                                   /*track_views=*/true, skip_undefined_);
  added.drop(outputs);
  for (size_t f = 0; f < task.face.size(); ++f) {  // the engine gets the others
    const at::Tensor grad = std::exchange(outputs[task.plan(f).slot], {});
    if (!grad.defined()) {
      continue;
    }
    if (came_in.has(grad) ? is_weights : is_functions) {
      somebodys.push_back(task.plan().face_begin + static_cast<uint32_t>(f));
    }
    task.face[f].grad = Kept(grad);
  }
  return outputs;
}

Capture::Capture(NodePtr original, bool skip_undefined, bool owns)
    : InPlaceOf(original, original->sequence_nr()), skip_undefined_(skip_undefined), owns_(owns) {}

variable_list Capture::apply(variable_list&& in) {
  TORCH_CHECK(grads.empty(), ERR_WITHIN);
  grads = call_tensor_hooks(*original_, std::move(in), skip_undefined_);
  // A leaf's own node would run in an ordinary backward; the node behind another input would not,
  // it belongs to an older graph.
  if (as_accumulator(*original_)) {
    grads = call_pre_hooks(*original_, std::move(grads));
  }
  if (owns_) {
    CameIn({}).own(grads);
  }
  return {};
}

bool is_consumed(Node& node) {
  if (typeid(node) == typeid(StandIn)) {
    return static_cast<StandIn&>(node).is_retired();
  }
  for (const auto& hook : node.pre_hooks()) {
    const torch::autograd::FunctionPreHook& h = *hook;
    if (typeid(h) == typeid(ConsumedGuard)) {
      return true;
    }
  }
  return false;
}

variable_list ConsumedGuard::operator()(const variable_list& /*grads*/) {
  TORCH_CHECK(false, ERR_CONSUMED);
}

}  // namespace zbp
