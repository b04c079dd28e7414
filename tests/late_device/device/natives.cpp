// What no kernel of the CPU does: memory, copies between host and device; and what runs as what.

#include "kernels.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace late {

namespace {

using at::Tensor;
using c10::IValue;
using c10::Stack;

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
             std::optional<bool> /*pin_memory*/, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return Tensor(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), allocator(),
                                          c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                     std::optional<at::Device> device, std::optional<bool> /*pin_memory*/) {
  const c10::OptionalDeviceGuard guard(device);
  return Tensor(at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype)));
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef symbolic,
                      std::optional<at::MemoryFormat> /*format*/) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t needed = static_cast<size_t>(self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty()) {
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

Tensor& set_to_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                     source.sym_strides());
}

Tensor& set_whole(Tensor& self, at::Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {count}, {});
}

Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_whole(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator(), true));
}

void copy_in(const Tensor& to, const Tensor& from, uint32_t stream) {
  std::vector<Use> uses;
  add_use(uses, from, false);
  add_use(uses, to, true);
  const Tensor there = in_place_of(to);
  Schedule::get().enqueue(stream, "aten::copy_", uses, [there, here = for_task(from)] {
    const Plain plain;
    there.copy_(here);
  });
}

/// In a capture the host's memory is written when the task runs, as a GPU writes pinned memory.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Schedule& schedule = Schedule::get();
  if (!is_late(to)) {
    const uint32_t stream = current_stream(from);
    std::vector<Use> uses;
    add_use(uses, from, false);
    if (non_blocking && schedule.is_captured(stream)) {
      schedule.enqueue(stream, "a copy to the host", uses,
                       [here = in_place_of(to), memory = to.storage(), there = in_place_of(from)] {
                         const Plain plain;
                         here.copy_(there);
                       });
      return to;
    }
    schedule.enqueue(stream, "a copy to the host", uses, nullptr);
    schedule.finish(schedule.mark(stream));
    const Plain plain;
    to.copy_(in_place_of(from));
    return to;
  }
  if (is_late(from) &&
      from.device() != to.device()) {  // on the source's stream, between what both have
    schedule.wait(current_stream(from), schedule.mark(current_stream(to)));
    copy_in(to, from, current_stream(from));
    schedule.wait(current_stream(to), schedule.mark(current_stream(from)));
    return to;
  }
  copy_in(to, from, current_stream(to));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

void record_stream(Tensor& self, c10::Stream stream) {
  c10::impl::getDeviceGuardImpl(LATE)->recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

int64_t no_fused_attention(const Tensor&, const Tensor&, const Tensor&,
                           const std::optional<Tensor>&, double, bool, std::optional<double>,
                           bool) {
  return 0;
}

/// The product, rounded, and then the sum: on some processors the CPU's kernel rounds once, and no gradient would have
/// the bits of its reference.
Tensor& add_product_(Tensor& self, const Tensor& left, const Tensor& right, const at::Scalar& beta,
                     const at::Scalar& alpha) {
  TORCH_CHECK(beta.equal(1) && alpha.equal(1), "the late device adds products as they are");
  return self.add_(left.matmul(right));
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  run_boxed(op, stack);
}

/// For what the CPU has under another name, with the same arguments.
template <const char* NAME>
void as_other(const c10::OperatorHandle& /*op*/, Stack* stack) {
  const auto other = c10::Dispatcher::singleton().findSchemaOrThrow(NAME, "");
  run_boxed(other, stack);
}

constexpr char CONVOLUTION[] = "aten::convolution";
constexpr char CONVOLUTION_BACKWARD[] = "aten::convolution_backward";

/// As convolution_backward, but for the sizes of the bias.
void convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const int64_t channels = torch::jit::peek(*stack, 0, 10).toTensor().size(1);
  stack->insert(stack->end() - 7, IValue(std::vector<int64_t>{channels}));
  as_other<CONVOLUTION_BACKWARD>(op, stack);
}

using torch::CppFunction;

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(CppFunction::makeFromBoxedFunction<&fallback>());
}

// The copy knows both bits of a tensor; resolved before it, they would need a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_to_tensor);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_", &set_nothing);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &no_fused_attention);
  m.impl("addmm_", &add_product_);
  m.impl("baddbmm_", &add_product_);
  m.impl("convolution_overrideable", CppFunction::makeFromBoxedFunction<&as_other<CONVOLUTION>>());
  m.impl("convolution_backward_overrideable",
         CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // Where an operator has a kernel for the CPU and one made of other operators, the CPU's, for the same bits. But in place
  // or into outputs, what is made of other operators refuses at the call what a task would refuse too late.
  using Key = c10::DispatchKey;
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (op && name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(Key::CPU) &&
        !op->hasKernelForDispatchKey(Key::PrivateUse1) &&
        (op->hasKernelForDispatchKey(Key::CompositeExplicitAutograd) ||
         op->hasKernelForDispatchKey(Key::CompositeImplicitAutograd) ||
         (op->hasKernelForDispatchKey(Key::CompositeExplicitAutogradNonFunctional) &&
          !op->schema().is_mutable()))) {
      m.impl(toString(name).c_str(), CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

}  // namespace

}  // namespace late
