#include "shim/group/saved.h"

#include <thread>

#include <ATen/EmptyTensor.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "shim/group/dtensor.h"
#include "shim/torch/gil.h"
#include "shim/torch/nodes.h"
#include "shim/torch/saved_parts.h"

namespace zbp {

namespace {

constexpr const char* OF_CHECKPOINTS = "zbpipe._torch.checkpoint";

uint32_t bits_of(const Task& task) {
  uint32_t bits = 0;
  for (size_t f = 0; f < task.face.size(); ++f) {
    bits |= bit(task.plan(f).slot);
  }
  return bits;
}

/// As it is: default hooks of a surrounding saved_tensors_hooks context would pack it once more.
SavedVariable save_plainly(const at::Tensor& tensor, bool is_output = false) {
  const at::impl::SavedTensorDefaultHooksTLS hooks = at::SavedTensorDefaultHooks::get_tls_state();
  at::SavedTensorDefaultHooks::set_tls_state({});
  const auto put_back =
      c10::make_scope_exit([&] { at::SavedTensorDefaultHooks::set_tls_state(hooks); });
  return SavedVariable(tensor, is_output);
}

/// Leaked, as all of torch's that is static: it would be freed after torch.
const at::Tensor& no_values() {
  static const at::Tensor& tensor = *new at::Tensor(at::detail::empty_cpu({0}, at::kFloat));
  return tensor;
}

bool is_convolution(const Node& node) {
  return typeid(node) == typeid(torch::autograd::generated::ConvolutionBackward0);
}

/// True for what the operation can take that stands for the node.
bool is_plain_factor(const Node& node, const at::Tensor& tensor) {
  const bool is_grouped = typeid(node) == typeid(torch::autograd::generated::GroupedMmBackward0);
  const bool takes_dtensors = !is_convolution(node) && !is_grouped;
  return tensor.defined() && (is_convolution(node) || tensor.dim() == 2 || tensor.dim() == 3) &&
         (!is_subclass(tensor) || (takes_dtensors && is_dtensor(tensor))) && !tensor.is_complex() &&
         !tensor.is_neg();
}

/// saved: null where nobody is to fill it.
Blank blank_of(SavedVariable* saved, const at::Tensor& tensor, const Task& task, uint32_t slot,
               const Group& group) {
  const int32_t face = task.face_at(slot);
  const int32_t weight = face >= 0 ? task.plan(face).weight : -1;
  const bool is_weight =
      weight >= 0 && storage_of(group.weights[weight].accumulator->variable) == storage_of(tensor);
  return {saved, is_weight ? tensor : at::Tensor(), tensor.sizes().vec(), tensor.strides().vec(),
          tensor.options()};
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

/// True if what the hooks give back may be a buffer that somebody fills anew before W: an
/// offloading one's. What torch's checkpoint gives has been computed for this use.
bool may_be_refilled(const SavedVariable& saved) {
  if (!saved.has_hooks()) {
    return false;
  }
  const AcquireGil gil;
  const auto data = saved.retrieve_unpack_hook_data();
  return !data || !is_checkpoints(data->first);
}

/// Whoever has a node's mutex may wait for the GIL (libtorch's accumulators do, for subclasses), so
/// nobody waits for one with the GIL in hand.
std::unique_lock<std::mutex> lock_of(Node& node, bool waits) {
  std::unique_lock<std::mutex> lock(NodeParts::mutex_of(node), std::defer_lock);
  if (waits && !PyGILState_Check()) {
    lock.lock();
  }
  while (!lock && !lock.try_lock() && waits) {
    const ReleaseGil no_gil;
    std::this_thread::yield();
  }
  return lock;
}

/// Unpacked in I, unless W is to do that.
Saved take_one(Task& task, Saver& saver, SavedVariable& saved, bool may_leave_packed) {
  if (auto packed = may_leave_packed && saved.has_hooks() ? packed_in(saved) : nullptr) {
    task.plan().leaves_packed = true;
    return packed;
  }
  return Kept(saver.unpack(saved));
}

/// False where the task's factors need more than one operation.
bool take_product(Task& task, Saver& saver, const Separable& separable, const variable_list& grads,
                  bool may_leave_packed, const Group& group) {
  Product& product = std::get<Product>(task.work);
  product.weight_is_left = task.face_at(separable.parts[0].own_slot) >= 0;
  const Part& own = separable.parts[product.weight_is_left ? 0 : 1];
  product.matrix_slot = own.own_slot;
  product.output_grad = Kept(grads[0]);
  if ((grads[0].defined() && !is_plain_factor(*task.node, grads[0])) ||
      (is_convolution(*task.node) && product.weight_is_left)) {
    return false;
  }
  if (own.is_insisted_on) {
    if (may_leave_packed && own.saved->has_hooks()) {
      return false;
    }
    const at::Tensor weight = saver.unpack(*own.saved, false);
    if (!is_plain_factor(*task.node, weight)) {
      return false;
    }
    product.weight =
        std::make_unique<const Blank>(blank_of(nullptr, weight, task, own.own_slot, group));
  }
  product.other = take_one(task, saver, *separable.parts[product.weight_is_left ? 1 : 0].saved,
                           may_leave_packed);
  if (separable.parts.size() > 2) {
    product.offsets = take_one(task, saver, *separable.parts[2].saved, may_leave_packed);
  }
  const auto* other = std::get_if<Kept>(&product.other);
  return !other || is_plain_factor(*task.node, other->tensor());
}

void take_deferred(Task& task, Saver& saver, const Separable& separable, const variable_list& grads,
                   bool may_leave_packed) {
  Deferred& deferred = std::get<Deferred>(task.work);
  deferred = Deferred();
  deferred.output_grads.append(grads.begin(), grads.end());
  const uint32_t faces = bits_of(task);
  for (const Part& part : separable.parts) {
    const bool is_read = (part.readers & faces) != 0;
    const auto packed =
        may_leave_packed && part.saved->has_hooks() ? packed_in(*part.saved) : nullptr;
    if (packed) {
      task.plan().leaves_packed = task.plan().leaves_packed || is_read;
      saver.leave(*part.saved, packed);
      deferred.packed.push_back(packed);
    } else if (is_read || part.is_insisted_on) {
      // Also without hooks: a saved tensor that is a stage output is about to lose its history.
      const at::Tensor tensor = saver.pin(*part.saved, is_read);
      if (is_read && tensor.defined()) {
        deferred.saved.emplace_back(tensor);
      }
    }
  }
}

}  // namespace

bool is_checkpoints(const c10::SafePyObject& unpack_hook) {
  return call_python(OF_CHECKPOINTS, "is_unpack_hook", {unpack_hook.ptr(getPyInterpreter())})
             .get() == Py_True;
}

PackedPtr packed_in(const SavedVariable& saved) {
  const AcquireGil gil;
  auto data = saved.retrieve_unpack_hook_data();
  THPObjectPtr read =
      data ? call_python(OF_CHECKPOINTS, "read_again", {data->first.ptr(getPyInterpreter())})
           : THPObjectPtr();
  if (!read || read.get() == Py_None) {
    return nullptr;
  }
  Packed packed{std::move(data->first), std::move(data->second), {}};
  for (const at::Tensor& tensor : tensors_in(read)) {
    if (has_version(tensor)) {
      packed.arguments.emplace_back(tensor);
    }
  }
  return std::make_shared<const Packed>(std::move(packed));
}

Saver::Saver(Node& node, bool waits) : around_(lock_of(node, waits)) {
  if (!around_) {
    return;
  }
  node_ = ref_of(node);
  // Another thread's W sets it null, under the lock around.
  if (const auto* slices = as<torch::autograd::CopySlices>(node); slices && slices->fn) {
    node_ = slices->fn;
    within_ = lock_of(*node_, waits);
    node_ = within_ ? std::move(node_) : nullptr;
  }
}

void Saver::put(SavedVariable& saved, SavedVariable fresh) {
  std::swap(saved, fresh);
  gone_.push_back(std::move(fresh));
}

void Saver::leave(SavedVariable& saved, PackedPtr packed) {
  const AcquireGil gil;
  SavedVariable left = save_plainly(no_values());
  left.register_hooks(std::make_unique<LeftPacked>(std::move(packed)));
  put(saved, std::move(left));
}

at::Tensor Saver::pin(SavedVariable& saved, bool is_read_by_w) {
  const bool is_copied = is_read_by_w && may_be_refilled(saved);
  at::Tensor tensor = saved.unpack(node_);
  if (!tensor.defined()) {
    return tensor;  // the other factor takes no gradient
  }
  const bool is_functions = is_python_function(*node_);
  at::Tensor plain = is_read_by_w ? tensor.detach() : tensor.variable_data();
  if (is_copied && !(is_functions && tensor.requires_grad())) {
    plain = plain.clone();
  }
  if (is_functions) {
    // Its backward sees what it would have unpacked, history and all.
    const at::Tensor& seen = tensor.requires_grad() ? tensor : plain;
    put(saved, save_plainly(seen, tensor.grad_fn() == node_));
  } else {
    put(saved, save_plainly(plain));
  }
  return plain;
}

at::Tensor Saver::unpack(SavedVariable& saved, bool is_read_by_w) {
  return saved.has_hooks() ? pin(saved, is_read_by_w) : saved.unpack(node_);
}

at::Tensor filled(const Blank& blank) {
  return blank.weight.defined() && !is_emptied(blank.weight)
             ? blank.weight
             : at::empty_strided(blank.sizes, blank.strides, blank.options);
}

bool may_unpack_refilled(Node& node) {
  const AcquireGil gil;
  const auto saved = Saver(node).all();
  return std::any_of(saved.begin(), saved.end(),
                     [](const SavedVariable* one) { return may_be_refilled(*one); });
}

void take_matrices(Task& task, const Separable& separable, const variable_list& grads,
                   const Group& group) {
  Saver saver(*task.node);
  const bool may_leave_packed = std::exchange(task.plan().leaves_packed, false);
  if (task.kind() == ZBP_TASK_PRODUCT) {
    if (take_product(task, saver, separable, grads, may_leave_packed, group)) {
      return;
    }
    task.plan().kind = ZBP_TASK_DEFERRED;
    task.plan().why = ZBP_WHY_MATRICES;
    task.work.emplace<Deferred>();
  }
  take_deferred(task, saver, separable, grads, may_leave_packed);
}

void let_go_of_unread(Task& task, const Separable& separable, const Group& group) {
  Saver saver(*task.node);
  const uint32_t faces = bits_of(task);
  for (const Part& part : separable.parts) {
    const bool stays_packed = part.saved->has_hooks() && part.is_insisted_on;
    if ((part.readers & faces) != 0 || stays_packed) {
      continue;
    }
    const at::Tensor tensor =
        part.is_insisted_on ? part.saved->unpack(ref_of(saver.node())) : at::Tensor();
    if (tensor.defined() && is_subclass(tensor)) {
      continue;
    }
    if (tensor.defined()) {
      std::get<Deferred>(task.work).blanks.push_back(
          blank_of(part.saved, tensor, task, part.own_slot, group));
    }
    // Of what is no blank the node finds nothing, which it does not mind.
    saver.put(*part.saved, tensor.defined() ? released_variable() : SavedVariable());
  }
}

void forget_leaves(Node& node, const Separable& separable) {
  Saver saver(node);
  for (const Part& part : separable.parts) {
    if (accumulator_of(*part.saved)) {
      saver.put(*part.saved, released_variable());
    }
  }
}

variable_list run_deferred(const Task& task) {
  const Deferred& deferred = std::get<Deferred>(task.work);
  variable_list grads;
  for (const Kept& grad : deferred.output_grads) {
    grads.push_back(grad.tensor());
  }
  // While it runs, tensors of the right shapes, whose values nobody reads, are where it insists on
  // them.
  std::vector<SavedVariable> shapes;  // all of them, before one is put
  for (const Blank& blank : deferred.blanks) {
    shapes.push_back(save_plainly(filled(blank)));
  }
  const auto fill = [&](const auto& variable) {
    Saver saver(*task.node);
    for (size_t i = 0; i < shapes.size(); ++i) {
      saver.put(*deferred.blanks[i].saved, variable(i));
    }
  };
  fill([&](size_t i) { return std::move(shapes[i]); });
  const auto empty =
      c10::make_scope_exit([&] { fill([](size_t) { return released_variable(); }); });
  return NodeParts::apply_to(*task.node, std::move(grads));
}

}  // namespace zbp
