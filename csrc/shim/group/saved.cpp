#include "shim/group/saved.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "shim/group/dtensor.h"
#include "shim/torch/separable.h"
#include "shim/torch/checkpoint.h"
#include "shim/torch/detach.h"
#include "shim/torch/gil.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"
#include "shim/torch/saved_parts.h"

namespace zbp {

using torch::autograd::SavedVariable;

namespace {

uint32_t bits_of(const Task& task) {
  uint32_t bits = 0;
  for (size_t f = 0; f < task.face.size(); ++f) {
    bits |= bit(task.plan(f).slot);
  }
  return bits;
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

SavedVariable save_plainly(const at::Tensor& tensor, bool is_output = false) {
  const NoSavedTensorHooks guard;
  return SavedVariable(tensor, is_output);
}

/// A tensor without values. Leaked, as all of torch's that is static: it would be freed after
/// torch.
const at::Tensor& no_values() {
  static const at::Tensor& tensor = *new at::Tensor(at::empty({0}));
  return tensor;
}

bool is_plain_matrix(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.dim() == 2 || tensor.dim() == 3) &&
         (!is_subclass(tensor) || is_dtensor(tensor)) && !tensor.is_complex() && !tensor.is_neg();
}

/// Puts `fresh` where the node has `saved`, which other threads may read meanwhile. What was there
/// goes when the lock is no longer held: it may run Python code.
void exchange_saved(Node& node, SavedVariable& saved, SavedVariable fresh) {
  const std::lock_guard<std::mutex> lock(NodeParts::mutex_of(node));
  std::swap(saved, fresh);
}

/// The place of Python's hooks for what stays packed: without the hook that packed, and without the
/// leaf that was.
class LeftPacked : public torch::autograd::SavedVariableHooks {
 public:
  explicit LeftPacked(PackedPtr packed) : packed_(std::move(packed)) {}

  void call_pack_hook(const at::Tensor& /*tensor*/) override {}
  at::Tensor call_unpack_hook() override { return packed_->unpack(); }
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override {
    return std::pair(packed_->unpack_hook, packed_->data);
  }

 private:
  const PackedPtr packed_;
};

/// What a backward leaves of a saved tensor: to unpack it raises.
SavedVariable released_variable() {
  SavedVariable saved = save_plainly(no_values());
  saved.reset_data();
  return saved;
}

/// Called with the GIL held.
SavedVariable left_packed(PackedPtr packed) {
  SavedVariable saved = save_plainly(no_values());
  saved.register_hooks(std::make_unique<LeftPacked>(std::move(packed)));
  return saved;
}

/// What Python hooks have packed in `saved`, if W is to unpack it; else null. A selectively
/// checkpointed region, and what is within one, is computed again only once, so I unpacks it. So
/// it does within a GraphExecGroup, whose runs share one recomputation. `arguments` gets what
/// computing the region again reads.
PackedPtr packed_in(const SavedVariable& saved, std::vector<Version>& arguments) {
  const AcquireGil gil;
  auto data = saved.retrieve_unpack_hook_data();
  if (!data || in_graph_exec_group() ||
      is_computed_only_once(data->first.ptr(getPyInterpreter()))) {
    return nullptr;
  }
  for_each_argument(data->first.ptr(getPyInterpreter()), [&](const at::Tensor& tensor) {
    if (has_version(tensor)) {
      arguments.emplace_back(tensor);
    }
  });
  return std::make_shared<const Packed>(Packed{std::move(data->first), std::move(data->second)});
}

/// True if what the hooks give back may be a buffer that somebody fills anew before W: an
/// offloading one's. What torch's checkpoint gives has been computed for this use.
bool may_be_refilled(const SavedVariable& saved) {
  if (!saved.has_hooks()) {
    return false;
  }
  const AcquireGil gil;
  const auto data = saved.retrieve_unpack_hook_data();
  return !data || recognise(data->first.ptr(getPyInterpreter())) == UnpackHook::other;
}

/// Pins, as pin() does, what an outside node has saved. What is neither packed nor a view that
/// keeps its base for nothing stays as it is. Called with the node's mutex held; `before` gets what
/// was there.
at::Tensor pin_locked(SavedVariable& saved, Node& node, SavedVariable& before) {
  const bool is_copied = may_be_refilled(saved);
  at::Tensor tensor = saved.unpack(ref_of(node));
  if (tensor.defined() && is_copied && !tensor.requires_grad()) {
    tensor = tensor.clone();
  }
  if (tensor.defined() && is_python_function(node)) {
    // Its backward sees what it would have unpacked, history and all.
    const AcquireGil gil;
    before = std::exchange(saved, save_plainly(tensor, tensor.grad_fn().get() == &node));
    return tensor.detach();
  }
  if (tensor.defined() && (saved.has_hooks() || keeps_base_unused(tensor))) {
    tensor = tensor.detach();
    before = std::exchange(saved, save_plainly(tensor));
  }
  return tensor;
}

/// Leaves `saved` packed for W; false, and nothing was done, if W cannot unpack it. A checkpoint's
/// is unpacked here all the same: its region, once computed in I, would keep the tensor until
/// somebody unpacks it. A Function's stays as it is: its backward may look at what it unpacks.
/// `arguments` and `before`: as above. Called with the node's mutex held.
bool leave_packed(SavedVariable& saved, const Node& node, SavedVariable& before,
                  std::vector<Version>& arguments) {
  const auto packed = packed_in(saved, arguments);
  if (packed) {
    const AcquireGil gil;
    if (!is_python_function(node)) {
      before = std::exchange(saved, left_packed(packed));
    }
    if (recognise(packed->unpack_hook.ptr(getPyInterpreter())) == UnpackHook::checkpoint) {
      packed->unpack();
    }
  }
  return packed != nullptr;
}

}  // namespace

at::Tensor pin(SavedVariable& saved, Node& node, bool is_read_by_w) {
  const bool is_copied = is_read_by_w && may_be_refilled(saved);
  at::Tensor tensor = saved.unpack(ref_of(node));
  if (tensor.defined()) {  // else the other factor takes no gradient
    tensor = is_read_by_w ? tensor.detach() : tensor.variable_data();
    tensor = is_copied ? tensor.clone() : tensor;
    exchange_saved(node, saved, save_plainly(tensor));
  }
  return tensor;
}

NodePtr saver_of(Node& node) {
  const auto* slices = as<torch::autograd::CopySlices>(node);
  return ref_of(slices && slices->fn ? *slices->fn : node);
}

void forget_saved(Node& node) {
  const Separable separable = *separate(node);
  for (const Part& part : separable.parts) {
    if (accumulator_of(*part.saved)) {
      exchange_saved(node, *part.saved, released_variable());
    }
  }
}

void pin_outside(Group& group) {
  const std::lock_guard<std::mutex> lock(group.unpinned_outside_mutex);
  for (const UnpinnedOutside& unpinned : std::exchange(group.unpinned_outside, {})) {
    Node& node = *unpinned.node;
    torch::autograd::SavedVariable before;  // freed behind the lock: that may run Python code
    // Another microbatch's I may see to the same node, and its W may have released it.
    const std::lock_guard<std::mutex> node_lock(NodeParts::mutex_of(node));
    const auto all = [&] {
      const AcquireGil gil;
      return saved_by(node);
    }();
    TORCH_CHECK(unpinned.number < all.size(), torch::autograd::ERR_BACKWARD_TWICE);
    SavedVariable& saved = *all[unpinned.number];
    if (saved.has_hooks() && group.reads &&
        leave_packed(saved, node, before, group.arguments_outside)) {
      group.outside_recomputed_for = std::max(group.outside_recomputed_for, node.sequence_nr());
      continue;
    }
    const at::Tensor tensor = pin_locked(saved, node, before);
    if (has_version(tensor)) {
      group.saved_outside.emplace_back(tensor);
    }
  }
}

namespace {

/// False where the task's matrices need more than one multiplication.
bool take_product(Task& task, Node& node, const variable_list& grads, const Separable& separable,
                  bool may_leave_packed) {
  Product& product = std::get<Product>(task.work);
  product.weight_is_left = task.face_at(separable.parts[0].own_slot).has_value();
  product.matrix_slot = separable.parts[product.weight_is_left ? 0 : 1].own_slot;
  product.output_grad = Watched(grads[0]);
  SavedVariable& saved = *separable.parts[product.weight_is_left ? 1 : 0].saved;
  if (grads[0].defined() && !is_plain_matrix(grads[0])) {
    return false;
  }
  if (auto packed =
          may_leave_packed && saved.has_hooks() ? packed_in(saved, task.arguments) : nullptr) {
    product.other = std::move(packed);
    task.plan().leaves_packed = true;
    return true;
  }
  const at::Tensor other = saved.has_hooks() ? pin(saved, node, true) : saved.unpack(ref_of(node));
  product.other = Watched(other);
  return is_plain_matrix(other);
}

void take_deferred(Task& task, Node& node, const variable_list& grads, const Separable& separable,
                   bool may_leave_packed) {
  Deferred& deferred = std::get<Deferred>(task.work);
  deferred = Deferred();
  deferred.output_grads.append(grads.begin(), grads.end());
  const uint32_t faces = bits_of(task);
  for (const Part& part : separable.parts) {
    const bool is_read = (part.readers & faces) != 0;
    const auto packed = may_leave_packed && part.saved->has_hooks()
                            ? packed_in(*part.saved, task.arguments)
                            : nullptr;
    if (packed) {
      task.plan().leaves_packed = task.plan().leaves_packed || is_read;
      const AcquireGil gil;
      exchange_saved(node, *part.saved, left_packed(packed));
      deferred.packed.push_back(packed);
    } else if (is_read || part.is_insisted_on) {
      // Also without hooks: a saved tensor that is a stage output is about to lose its history.
      const at::Tensor tensor = pin(*part.saved, node, is_read);
      if (is_read && tensor.defined()) {
        deferred.saved.emplace_back(tensor);
      }
    }
  }
}

}  // namespace

void take_matrices(Task& task, Node& node, const variable_list& grads) {
  task.arguments.clear();
  const Separable separable = *separate(node);
  const bool may_leave_packed = std::exchange(task.plan().leaves_packed, false);
  if (task.kind() == ZBP_TASK_PRODUCT) {
    if (take_product(task, node, grads, separable, may_leave_packed)) {
      return;
    }
    task.defer_product();
  }
  take_deferred(task, node, grads, separable, may_leave_packed);
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
    const auto face = task.face_at(part.own_slot);
    const bool is_weight =
        face && task.plan(*face).weight >= 0 &&
        storage_of(group.weights[task.plan(*face).weight].accumulator->variable) ==
            storage_of(tensor);
    if (tensor.defined() && (is_weight || is_subclass(tensor))) {
      continue;
    }
    if (tensor.defined()) {
      std::get<Deferred>(task.work).blanks.push_back(
          {part.saved, tensor.sizes().vec(), tensor.strides().vec(), tensor.options()});
    }
    exchange_saved(node, *part.saved, SavedVariable());
  }
}

namespace {

/// Puts tensors of the right shapes, whose values nobody reads, where a node insists on them.
class FilledBlanks {
 public:
  FilledBlanks(Node& node, const std::vector<Blank>& blanks) : node_(node), blanks_(blanks) {
    for (const Blank& blank : blanks_) {
      exchange_saved(node_, *blank.saved,
                     save_plainly(at::empty_strided(blank.sizes, blank.strides, blank.options)));
    }
  }
  ~FilledBlanks() {
    for (const Blank& blank : blanks_) {
      exchange_saved(node_, *blank.saved, SavedVariable());
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
  const Deferred& deferred = std::get<Deferred>(task.work);
  variable_list grads;
  for (const Watched& grad : deferred.output_grads) {
    grads.push_back(grad.tensor());
  }
  const FilledBlanks blanks(*task.node, deferred.blanks);
  return NodeParts::apply_to(*task.node, std::move(grads));
}

}  // namespace zbp
