#include "shim/pass/kinds.h"

#include <algorithm>
#include <cstring>

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/PyInterpreter.h>

#include "shim/pass/dtensor.h"
#include "shim/pass/path.h"
#include "shim/torch/checkpoint.h"
#include "shim/torch/detach.h"
#include "shim/torch/gil.h"
#include "shim/torch/python.h"

namespace zbp {

namespace gen = torch::autograd::generated;
using torch::autograd::SavedVariable;

namespace {

constexpr uint32_t bit(uint32_t slot) {
  return uint32_t{1} << slot;
}

constexpr uint32_t no_slot = UINT32_MAX;

/// Something that a node has saved.
struct Part {
  SavedVariable* saved;
  uint32_t readers;             // the edges, as bits, whose gradients are computed from it
  uint32_t own_slot = no_slot;  // the edge that takes its gradient
  bool is_insisted_on = false;  // the node wants a tensor of its shape where it does not read it
};

/// A node of a type that is known to compute the gradients of its edges apart, at no extra cost worth
/// naming, as often as one likes.
struct Separable {
  SmallVector<Part, 5> parts;
  // It multiplies its first part with its second: its weights may be heavy.
  bool has_factors = false;
  // d(left) = dY rightᵀ and d(right) = leftᵀ dY, nothing scaled.
  bool is_plain_product = false;
};

Separable two_factors(SavedVariable& left, SavedVariable& right, uint32_t left_slot,
                      bool is_plain_product, bool is_insisted_on = false) {
  const uint32_t right_slot = left_slot + 1;
  return {{{&left, bit(right_slot), left_slot, is_insisted_on},
           {&right, bit(left_slot), right_slot, is_insisted_on}},
          true,
          is_plain_product};
}

/// The weights of such a node are light: it is deferred only where the policy asks for it.
Separable without_factors(std::initializer_list<Part> parts) {
  Separable separable;
  separable.parts.assign(parts.begin(), parts.end());
  return separable;
}

bool is_one(const at::Scalar& scalar) {
  return scalar.equal(1);
}

std::optional<Separable> separate(Node& node) {
  if (auto* n = as<gen::AddmmBackward0>(node)) {
    return two_factors(n->mat1_, n->mat2_, 1, is_one(n->alpha) && is_one(n->beta));
  }
  if (auto* n = as<gen::MmBackward0>(node)) {
    return two_factors(n->self_, n->mat2_, 0, true);
  }
  if (auto* n = as<gen::BmmBackward0>(node)) {
    return two_factors(n->self_, n->mat2_, 0, true);
  }
  if (auto* n = as<gen::BaddbmmBackward0>(node)) {
    return two_factors(n->batch1_, n->batch2_, 1, is_one(n->alpha) && is_one(n->beta));
  }
  if (auto* n = as<gen::GroupedMmBackward0>(node)) {
    Separable separable = two_factors(n->self_, n->mat2_, 0, false);
    separable.parts.push_back({&n->offs_, bit(0) | bit(1)});
    return separable;
  }
  if (auto* n = as<gen::LinearBackward0>(node)) {
    return two_factors(n->input_, n->weight_, 0, false, true);
  }
  if (auto* n = as<gen::ConvolutionBackward0>(node)) {
    return two_factors(n->input_, n->weight_, 0, false, true);
  }
  if (auto* n = as<gen::NativeLayerNormBackward0>(node)) {
    constexpr uint32_t all = bit(0) | bit(1) | bit(2);
    return without_factors({{&n->input_, all, 0},
                            {&n->result1_, all},
                            {&n->result2_, all},
                            {&n->weight_, bit(0), 1, true},
                            {&n->bias_, 0, 2, true}});
  }
  if (auto* n = as<gen::FusedRmsNormBackward0>(node)) {
    constexpr uint32_t all = bit(0) | bit(1);
    return without_factors(
        {{&n->input_, all, 0}, {&n->result1_, all}, {&n->weight_, bit(0), 1, true}});
  }
  if (auto* n = as<gen::NativeGroupNormBackward0>(node)) {
    constexpr uint32_t all = bit(0) | bit(1) | bit(2);
    return without_factors({{&n->input_, all, 0},
                            {&n->result1_, all},
                            {&n->result2_, all},
                            {&n->weight_, bit(0), 1, true}});
  }
  if (auto* n = as<gen::MulBackward0>(node)) {
    return without_factors({{&n->self_, bit(1), 0}, {&n->other_, bit(0), 1}});
  }
  if (as<gen::AddBackward0>(node) || as<gen::SubBackward0>(node)) {
    return without_factors({});
  }
  return std::nullopt;
}

uint32_t bits_of(const Task& task) {
  uint32_t bits = 0;
  for (size_t f = 0; f < task.face.size(); ++f) {
    bits |= bit(task.plan(f).slot);
  }
  return bits;
}

bool has_packed_part(const Separable& separable) {
  return std::any_of(separable.parts.begin(), separable.parts.end(),
                     [](const Part& part) { return part.saved->has_hooks(); });
}

/// While it lives, a SavedVariable that is made here is stored as it is: default hooks of a
/// surrounding saved_tensors_hooks context would pack it once more.
class NoSavedTensorHooks {
 public:
  NoSavedTensorHooks() : saved_(at::SavedTensorDefaultHooks::get_tls_state()) {
    at::SavedTensorDefaultHooks::set_tls_state({});
  }
  ~NoSavedTensorHooks() { at::SavedTensorDefaultHooks::set_tls_state(saved_); }
  NoSavedTensorHooks(const NoSavedTensorHooks&) = delete;
  NoSavedTensorHooks& operator=(const NoSavedTensorHooks&) = delete;

 private:
  at::impl::SavedTensorDefaultHooksTLS saved_;
};

SavedVariable save_plainly(const at::Tensor& tensor) {
  const NoSavedTensorHooks guard;
  return SavedVariable(tensor, /*is_output=*/false);
}

bool is_plain_matrix(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.dim() == 2 || tensor.dim() == 3) &&
         (!is_subclass(tensor) || is_dtensor(tensor)) && !tensor.is_complex() && !tensor.is_neg();
}

/// Puts `fresh` in the place of what the node has saved, which other threads may read meanwhile. What was there goes
/// when the lock is no longer held: it may run Python code.
void exchange_saved(Node& node, SavedVariable& place, SavedVariable fresh) {
  const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(node));
  std::swap(place, fresh);
}

/// What Python hooks have packed in `saved`; nothing if W cannot unpack it, or need not pay for it: a
/// selectively checkpointed region is computed again only once, and runs in a GraphExecGroup share.
/// `arguments` gets what computing it again reads.
std::unique_ptr<const Packed> packed_in(const SavedVariable& saved,
                                        std::vector<Version>& arguments) {
  const AcquireGil gil;
  auto data = saved.retrieve_unpack_hook_data();
  if (!data || in_graph_exec_group() ||
      recognise(data->first.ptr(getPyInterpreter())) == UnpackHook::selective_checkpoint) {
    return nullptr;
  }
  for_each_argument(data->first.ptr(getPyInterpreter()), [&](const at::Tensor& tensor) {
    if (has_version(tensor)) {
      arguments.emplace_back(tensor);
    }
  });
  return std::make_unique<const Packed>(Packed{std::move(data->first), std::move(data->second)});
}

}  // namespace

zbp_fact fact_of_split(Node& node) {
  zbp_fact fact{};
  fact.sequence_nr = node.sequence_nr();
  if (!node.post_hooks().empty()) {
    fact.flag = ZBP_FACT_POST_HOOK;
  } else if (const auto separable = separate(node)) {
    fact.type = ZBP_TYPE_SEPARABLE;
    if (separable->has_factors) {
      fact.type = separable->is_plain_product ? ZBP_TYPE_PRODUCT : ZBP_TYPE_FACTORS;
      fact.left_slot = static_cast<uint8_t>(separable->parts[0].own_slot);
    }
    fact.flag = has_packed_part(*separable) ? ZBP_FACT_PACKED : 0;
  } else if (is_python_function(node)) {
    fact.type = ZBP_TYPE_FUNCTION;
    const auto saved = saved_by(node);
    const bool is_packed = std::any_of(saved.begin(), saved.end(),
                                       [](const SavedVariable* one) { return one->has_hooks(); });
    fact.flag = is_packed ? ZBP_FACT_PACKED : 0;
  }
  return fact;
}

zbp_fact fact_of_outside(Node& node) {
  zbp_fact fact{};
  fact.step = step_of(node);
  fact.flag = fact.step != ZBP_STEP_NONE && has_hooks(node) ? ZBP_FACT_WATCHED : 0;
  return fact;
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::product:
      return "product";
    case Kind::deferred:
      return "deferred";
    case Kind::whole:
      return "whole";
    case Kind::root:
      break;
  }
  return "root";
}

bool is_matrix(const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  return metadata.is_nested_tensor() || metadata.shape_as_dim_vector().size() > 1;
}

at::Tensor pin(SavedVariable& saved, Node& node, bool is_read_by_w) {
  at::Tensor tensor = saved.unpack(ref_of(node));
  if (tensor.defined()) {  // else the other factor takes no gradient
    tensor = is_read_by_w ? tensor.detach() : tensor.variable_data();
    exchange_saved(node, saved, save_plainly(tensor));
  }
  return tensor;
}

at::Tensor pin_locked(SavedVariable& saved, Node& node, SavedVariable& before) {
  at::Tensor tensor = saved.unpack(ref_of(node));
  if (tensor.defined() && (saved.has_hooks() || keeps_base_unused(tensor))) {
    tensor = tensor.detach();
    before = std::exchange(saved, save_plainly(tensor));
  }
  return tensor;
}

bool leave_packed(const SavedVariable& saved, std::vector<Version>& arguments) {
  const auto packed = packed_in(saved, arguments);
  if (packed) {
    const AcquireGil gil;
    if (recognise(packed->unpack_hook.ptr(getPyInterpreter())) == UnpackHook::checkpoint) {
      packed->unpack();
    }
  }
  return packed != nullptr;
}

void take_matrices(Task& task, Node& node, const variable_list& grads) {
  task.output_grads.clear();
  task.saved.clear();
  task.arguments.clear();
  for (const at::Tensor& grad : grads) {
    task.output_grads.emplace_back(grad);
  }
  Separable separable = *separate(node);
  const bool may_leave_packed = std::exchange(task.plan().leaves_packed, false);
  if (task.kind() == Kind::product) {
    task.weight_is_left = face_at(task, separable.parts[0].own_slot).has_value();
    task.matrix_slot = separable.parts[task.weight_is_left ? 0 : 1].own_slot;
    SavedVariable& saved = *separable.parts[task.weight_is_left ? 1 : 0].saved;
    const bool gradient_is_plain = !grads[0].defined() || is_plain_matrix(grads[0]);
    if (may_leave_packed && saved.has_hooks() && gradient_is_plain) {
      task.packed = packed_in(saved, task.arguments);
    }
    if (task.packed) {
      task.plan().leaves_packed = true;
      return;
    }
    if (gradient_is_plain) {
      const at::Tensor other =
          saved.has_hooks() ? pin(saved, node, true) : saved.unpack(ref_of(node));
      if (is_plain_matrix(other)) {
        task.other = Watched(other);
        return;
      }
    }
    task.set_kind(Kind::deferred);
  }
  const uint32_t faces = bits_of(task);
  for (const Part& part : separable.parts) {
    const bool is_read = (part.readers & faces) != 0;
    const bool stays_packed = may_leave_packed && part.saved->has_hooks() &&
                              packed_in(*part.saved, task.arguments) != nullptr;
    task.plan().leaves_packed = task.plan().leaves_packed || (is_read && stays_packed);
    // Also without hooks: a saved tensor that is a stage output is about to lose its history.
    if ((is_read || part.is_insisted_on) && !stays_packed) {
      const at::Tensor tensor = pin(*part.saved, node, is_read);
      if (is_read && tensor.defined()) {
        task.saved.emplace_back(tensor);
      }
    }
  }
}

void let_go_of_unread(Task& task, Node& node, const Group& group) {
  const Separable separable = *separate(node);
  const uint32_t faces = bits_of(task);
  for (const Part& part : separable.parts) {
    const bool stays_packed = part.saved->has_hooks() && part.is_insisted_on;
    if ((part.readers & faces) != 0 || stays_packed) {
      continue;
    }
    const at::Tensor tensor = part.is_insisted_on ? part.saved->unpack(ref_of(node)) : at::Tensor();
    const auto face = face_at(task, part.own_slot);
    const bool is_weight =
        face && task.plan(*face).weight >= 0 &&
        storage_of(group.weights[task.plan(*face).weight].accumulator->variable) ==
            storage_of(tensor);
    if (tensor.defined() && (is_weight || is_subclass(tensor))) {
      continue;
    }
    if (tensor.defined()) {
      task.blanks.push_back(
          {part.saved, tensor.sizes().vec(), tensor.strides().vec(), tensor.options()});
    }
    exchange_saved(node, *part.saved, SavedVariable());
  }
}

namespace {

/// Puts tensors of the right shapes, whose values nobody reads, where a node insists on them.
class FilledBlanks {
 public:
  explicit FilledBlanks(const Task& task) : node_(*task.node), blanks_(task.blanks) {
    for (const Blank& blank : blanks_) {
      exchange_saved(node_, *blank.place,
                     save_plainly(at::empty_strided(blank.sizes, blank.strides, blank.options)));
    }
  }
  ~FilledBlanks() {
    for (const Blank& blank : blanks_) {
      exchange_saved(node_, *blank.place, SavedVariable());
    }
  }
  FilledBlanks(const FilledBlanks&) = delete;
  FilledBlanks& operator=(const FilledBlanks&) = delete;

 private:
  Node& node_;
  const std::vector<Blank>& blanks_;
};

}  // namespace

variable_list run_deferred(const Task& task) {
  variable_list grads;
  grads.reserve(task.output_grads.size());
  for (const Watched& grad : task.output_grads) {
    grads.push_back(grad.tensor());
  }
  const FilledBlanks blanks(task);
  return NodeParts::apply_to(*task.node, std::move(grads));
}

bool saved_nothing(Node& node) {
  if (is_python_function(node)) {
    THPObjectPtr context(torch::autograd::functionToPyObject(ref_of(node)));
    return context && reinterpret_cast<THPFunction*>(context.get())->saved_variables.empty();
  }
  return as<gen::AddBackward0>(node) || as<gen::SubBackward0>(node);
}

}  // namespace zbp
