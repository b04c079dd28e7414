// Operators: the CPU's own kernels, as tasks of the current stream, which read and write memory when they run.
//
// Note [How an operator becomes a task]
//
// What its outputs will look like is asked of the CPU kernel on zeros of the same shapes (the Meta kernels of some
// operators are Python). They are allocated now; the kernel itself runs later, on CPU tensors that have the arguments'
// memory and own nothing: as on a GPU, a task keeps no memory alive. Random numbers are those that a CPU would have drawn
// in the order of the calls. Where a shape or a number depends on the values, the host waits.

#include "kernels.h"

#include <algorithm>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

namespace late {

namespace {

using at::Tensor;
using c10::IValue;
using c10::Stack;
using Convert = std::function<Tensor(const Tensor&)>;

// ---- values

/// The value with every tensor converted, lists too.
IValue converted(const IValue& value, const Convert& convert) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(convert(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) {
      list.push_back(tensor.defined() ? convert(tensor) : tensor);
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(convert(*tensor)) : tensor);
    }
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == LATE) {
    return c10::Device(c10::kCPU);
  }
  return value.isGenerator() ? IValue() : value;
}

std::vector<Tensor> tensors_in(const IValue& value) {
  std::vector<Tensor> found;
  converted(value, [&](const Tensor& tensor) {
    found.push_back(tensor);
    return tensor;
  });
  return found;
}

Stack all_converted(const Stack& values, const Convert& convert) {
  Stack made;
  for (const IValue& value : values) {
    made.push_back(converted(value, convert));
  }
  return made;
}

/// A tensor of that shape and dtype, with both bits, over a storage.
Tensor shaped(Tensor tensor, const Tensor& shape) {
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(),
                                                      shape.storage_offset());
  tensor._set_conj(shape.is_conj());
  tensor._set_neg(shape.is_neg());
  return tensor;
}

}  // namespace

Tensor in_place_of(const Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  void* data = storage.nbytes() == 0 ? nullptr : storage.data_ptr().get();
  c10::Storage alias(c10::Storage::use_byte_size_t(), storage.nbytes(),
                     c10::DataPtr(data, c10::Device(c10::kCPU)), nullptr, false);
  return shaped(at::detail::make_tensor<c10::TensorImpl>(
                    std::move(alias), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype()),
                tensor);
}

namespace {

Tensor zeros_like_it(const Tensor& tensor) {
  if (!is_late(tensor)) {
    return tensor;
  }
  Tensor zeros =
      at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
  return zeros.zero_();
}

}  // namespace

Tensor for_task(const Tensor& tensor) {
  if (is_late(tensor)) {
    return in_place_of(tensor);
  }
  Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

namespace {

Tensor empty_like_it(const Tensor& shape) {
  return Tensor(at::detail::empty_strided_generic(
      shape.sizes(), shape.strides(), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), shape.scalar_type()));
}

}  // namespace

void add_use(std::vector<Use>& uses, const Tensor& tensor, bool writes) {
  if (!is_late(tensor) || tensor.numel() == 0) {
    return;
  }
  Block* block = block_of(tensor.storage().data_ptr());  // raises if it was given up
  TORCH_CHECK(block, "late: a tensor has no memory");
  int64_t last = tensor.storage_offset();
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  const auto item = static_cast<int64_t>(tensor.itemsize());
  uses.push_back({block, static_cast<size_t>(tensor.storage_offset() * item),
                  static_cast<size_t>((last + 1) * item), writes});
}

namespace {

// ---- calls

void call_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  const Plain plain;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

Tensor random_state() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_random_state(const Tensor& state) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

bool is_view(const c10::FunctionSchema& schema) {
  return schema.returns().size() == 1 && schema.returns()[0].alias_info() &&
         !writes(schema.returns()[0]);
}

bool depends_on_values(const c10::OperatorHandle& op, const Stack& args) {
  const auto& returns = op.schema().returns();
  const bool gives_numbers = std::any_of(returns.begin(), returns.end(), [](const auto& given) {
    return !given.type()->isSubtypeOf(*c10::TensorType::get()) &&
           !given.type()->isSubtypeOf(*c10::ListType::ofTensors());
  });
  if (op.operator_name().name == "aten::index") {
    const auto indices = tensors_in(args[1]);
    return std::any_of(indices.begin(), indices.end(), [](const Tensor& index) {
      return index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    });
  }
  return gives_numbers || op.hasTag(at::Tag::dynamic_output_shape) ||
         op.hasTag(at::Tag::data_dependent_output);
}

/// An operator on its way to the queue.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack args) : op_(op), args_(std::move(args)) {
    for (const IValue& arg : args_) {
      for (const Tensor& tensor : tensors_in(arg)) {
        device_ = is_late(tensor) && !device_ ? tensor.device() : device_;
      }
      device_ = !device_ && arg.isDevice() ? arg.toDevice() : device_;
    }
  }

  Stack run() {
    if (is_view(op_.schema())) {
      return view();
    }
    const c10::OptionalDeviceGuard guard(device_);
    stream_ = current_stream(current_device());
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < args_.size(); ++i) {
      for (const Tensor& tensor : tensors_in(args_[i])) {
        add_use(uses_, tensor, writes(arguments[i]));
      }
    }
    return depends_on_values(op_, args_) ? run_now() : put_in();
  }

 private:
  Stack view() {
    Stack made = all_converted(args_, in_place_of);
    const Tensor base = args_[0].toTensor();
    call_on_cpu(op_, made);
    const Tensor shape = made[0].toTensor();
    return {shaped(at::detail::make_tensor<c10::TensorImpl>(
                       c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                       base.key_set() - c10::DispatchKeySet({c10::DispatchKey::Conjugate,
                                                             c10::DispatchKey::Negative}),
                       shape.dtype()),
                   shape)};
  }

  Stack run_now() {
    Schedule& schedule = Schedule::get();
    schedule.enqueue(stream_, name() + ", for which the host waits", uses_, nullptr);
    schedule.finish(schedule.mark(stream_));
    Stack results = all_converted(args_, for_task);
    call_on_cpu(op_, results);
    return all_converted(results, [&](const Tensor& result) {
      const Tensor output = empty_like_it(result);
      std::vector<Use> uses;
      add_use(uses, output, true);
      schedule.enqueue(stream_, name(), uses,
                       [to = in_place_of(output), result] { copy(to, result); });
      return output;
    });
  }

  Stack put_in() {
    const bool is_random = op_.hasTag(at::Tag::nondeterministic_seeded);
    const Tensor state = is_random ? random_state() : Tensor();
    Stack shapes;
    if (is_random || !gives_arguments_back() || may_resize()) {
      shapes = all_converted(args_, zeros_like_it);
      Stack dry = shapes;
      call_on_cpu(op_, dry);
      resize_outputs(shapes);
      shapes = std::move(dry);
    }
    Stack returns;
    std::vector<Tensor> fresh;  // what the task writes, beside what it was given to write to
    for (size_t r = 0; r < op_.schema().returns().size(); ++r) {
      if (const auto given = given_back(r)) {
        returns.push_back(args_[*given]);
        continue;
      }
      returns.push_back(converted(shapes[r], [&](const Tensor& shape) {
        Tensor output = empty_like_it(shape);
        add_use(uses_, output, true);
        fresh.push_back(in_place_of(output));
        return output;
      }));
    }
    Schedule::get().enqueue(
        stream_, name(), uses_,
        [op = op_, stack = all_converted(args_, for_task), fresh, state, is_fresh = is_fresh()] {
          Stack results = stack;
          const Tensor now = state.defined() ? random_state() : state;
          if (state.defined()) {
            set_random_state(state);
          }
          call_on_cpu(op, results);
          if (state.defined()) {
            set_random_state(now);
          }
          size_t next = 0;
          for (size_t r = 0; r < is_fresh.size(); ++r) {
            for (const Tensor& result :
                 is_fresh[r] ? tensors_in(results[r]) : std::vector<Tensor>()) {
              copy(fresh[next++], result);
            }
          }
        });
    return returns;
  }

  /// The argument that the operator returns as its r-th output.
  std::optional<size_t> given_back(size_t r) const {
    const auto& returned = op_.schema().returns()[r];
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; writes(returned) && i < arguments.size(); ++i) {
      if (writes(arguments[i]) &&
          arguments[i].alias_info()->beforeSets() == returned.alias_info()->beforeSets()) {
        return i;
      }
    }
    return std::nullopt;
  }
  std::vector<bool> is_fresh() const {
    std::vector<bool> fresh;
    for (size_t r = 0; r < op_.schema().returns().size(); ++r) {
      fresh.push_back(!given_back(r));
    }
    return fresh;
  }
  bool gives_arguments_back() const {
    const auto fresh = is_fresh();
    return std::none_of(fresh.begin(), fresh.end(), [](bool is) { return is; });
  }
  bool may_resize() const {
    const auto& arguments = op_.schema().arguments();
    for (size_t i = 0; i < args_.size(); ++i) {
      if (arguments[i].kwarg_only() && writes(arguments[i]) && args_[i].isTensor() &&
          args_[i].toTensor().numel() == 0) {
        return true;
      }
    }
    return false;
  }
  void resize_outputs(const Stack& shapes) {
    for (size_t i = 0; may_resize() && i < args_.size(); ++i) {
      if (writes(op_.schema().arguments()[i]) && args_[i].isTensor() &&
          args_[i].toTensor().sizes() != shapes[i].toTensor().sizes()) {
        args_[i].toTensor().resize_(shapes[i].toTensor().sizes());
        add_use(uses_, args_[i].toTensor(), true);
      }
    }
  }
  static void copy(const Tensor& to, const Tensor& from) {
    const Plain plain;
    to.copy_(from);
  }
  std::string name() const { return op_.operator_name().name; }

  c10::OperatorHandle op_;
  Stack args_;
  std::optional<c10::Device> device_;
  std::vector<Use> uses_;
  uint32_t stream_ = 0;
};

}  // namespace

void run_boxed(const c10::OperatorHandle& op, Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  Call call(op, Stack(stack->end() - static_cast<std::ptrdiff_t>(arguments), stack->end()));
  torch::jit::drop(*stack, arguments);
  for (IValue& value : call.run()) {
    stack->push_back(std::move(value));
  }
}

}  // namespace late
