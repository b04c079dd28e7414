#include "shim/group/kept.h"

#include <algorithm>

#include <ATen/CachedTensorUtils.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "shim/group/dtensor.h"
#include "shim/torch/detach.h"
#include "shim/torch/gil.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace zbp {

bool has_version(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference();
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

size_t bytes_of(const at::Tensor& tensor) {
  const bool has_bytes = tensor.defined() && tensor.has_storage();
  return has_bytes ? static_cast<size_t>(tensor.storage().sym_nbytes().maybe_as_int().value_or(0))
                   : 0;
}

bool is_emptied(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && !tensor.storage().data_ptr().get() &&
         !is_subclass(tensor) && tensor.storage().sym_nbytes().maybe_as_int() == 0 &&
         tensor.sym_numel() != 0;
}

// ---- what is kept

Kept::Kept(const at::Tensor& tensor)
    : tensor_(tensor.defined() && tensor.requires_grad() ? tensor.detach() : tensor),
      stream_(stream_here(tensor)),
      version_(has_version(tensor) ? tensor._version() : 0) {}

Kept Kept::with_history(at::Tensor&& tensor) noexcept {
  Kept kept;
  kept.version_ = has_version(tensor) ? tensor._version() : 0;
  kept.tensor_ = std::move(tensor);
  return kept;
}

bool Kept::was_modified() const {
  return has_version(tensor_) && tensor_._version() != version_;
}

void Kept::bring_here(std::optional<c10::Stream>& ordered) const {
  if (!stream_ || !tensor_.defined()) {
    return;
  }
  const c10::Stream here = *stream_here(tensor_);
  if (here == *stream_) {
    return;
  }
  if (ordered != stream_) {
    order(*stream_, here);
    ordered = stream_;
  }
  record_here(tensor_);
}

Version::Version(const at::Tensor& tensor)
    : counter_(torch::autograd::impl::version_counter(tensor)),
      seen_(counter_.current_version()),
      type_(tensor.scalar_type()),
      device_(tensor.device()) {
  if (!tensor.is_nested()) {
    const c10::SymIntArrayRef sizes = tensor.sym_sizes();
    sizes_.assign(sizes.begin(), sizes.end());
  }
}

std::string Version::describe() const {
  return described(type_, sizes_, device_);
}

// ---- whose memory it is

namespace {

/// What has the tensor's memory: of a DTensor the local part, of a sparse tensor the values.
at::Tensor in_memory(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_subclass(tensor)) {
    return tensor;
  }
  const at::AutoDispatchBelowADInplaceOrView no_view;
  const at::Tensor local = local_part(tensor);
  if (local.is_sparse()) {
    return local._values();
  }
  return at::sparse_csr::is_sparse_compressed(local) ? local.values() : local;
}

/// True if somebody has the object beside `references` of C++, and `names` of Python. Its Python
/// object, if it has one, refers to it, and is kept by it.
template <class Impl>
bool is_held(const Impl& impl, size_t references, Py_ssize_t names = 0) {
  PyObject* const object = impl.pyobj_slot()->load_pyobj();
  const size_t counted =
      c10::raw::intrusive_ptr::use_count(const_cast<Impl*>(&impl)) - (object ? 1 : 0);
  return counted > references || (object && Py_REFCNT(object) > names + 1);
}

bool is_captured(const c10::Stream& stream) {
  return is_capturing(*c10::impl::getDeviceGuardImpl(stream.device_type()), stream, 0);
}

}  // namespace

const void* memory_of(const at::Tensor& tensor) {
  const auto place_of = [](const at::Tensor& in) -> const void* {
    return !in.defined() || in.has_storage() ? storage_of(in) : in.unsafeGetTensorImpl();
  };
  // A plain tensor is not copied.
  return tensor.defined() && is_subclass(tensor) ? place_of(in_memory(tensor)) : place_of(tensor);
}

Holders::Holders(c10::ArrayRef<at::Tensor> known) {
  for (const at::Tensor& tensor : known) {
    add(tensor);
  }
}

void Holders::add(const at::Tensor& tensor) {
  if (!tensor.defined() || known_[tensor.unsafeGetTensorImpl()]++ > 0) {
    return;
  }
  add(base_of(tensor));
}

bool Holders::has_others(const at::Tensor& tensor) const {
  if (at::caching::is_cached_tensor(tensor)) {
    return true;  // a captured graph writes it anew at each replay
  }
  const AcquireGil gil;
  const bool is_distributed = is_dtensor(tensor);
  if (is_subclass(tensor) && tensor.layout() == c10::kStrided && !is_distributed) {
    return false;
  }
  if (is_held(*tensor.unsafeGetTensorImpl(), known_.at(tensor.unsafeGetTensorImpl()))) {
    return true;
  }
  if (is_distributed) {
    // Its Python object has the local part.
    const at::Tensor local = local_part(tensor);
    return !is_subclass(local) && (is_held(*local.unsafeGetTensorImpl(), 1, 1) ||
                                   is_held(*local.storage().unsafeGetStorageImpl(), 1));
  }
  if (!tensor.has_storage()) {
    const at::Tensor values = in_memory(tensor);  // a compressed tensor gives an alias of its own
    return values.has_storage() &&
           is_held(*values.storage().unsafeGetStorageImpl(), values.use_count() > 1 ? 1 : 2);
  }
  size_t tensors = 0;
  for (const auto& [other, references] : known_) {
    if (other->has_storage() && other->unsafe_storage().is_alias_of(tensor.storage())) {
      ++tensors;
      if (is_held(*other, references)) {
        return true;
      }
    }
  }
  return is_held(*tensor.storage().unsafeGetStorageImpl(), tensors);
}

void own(c10::ArrayRef<Kept*> grads, c10::ArrayRef<at::Tensor> known) {
  Holders holders(known);
  for (const Kept* grad : grads) {
    holders.add(grad->tensor());
  }
  SmallVector<Kept*, 2> others;
  for (Kept* grad : grads) {
    grad->see_anew();
    if (grad->tensor().defined() && holders.has_others(grad->tensor())) {
      others.push_back(grad);
    }
  }
  std::optional<c10::Stream> ordered;
  for (Kept* grad : others) {
    grad->bring_here(ordered);
    *grad = Kept(grad->tensor().clone());
  }
}

CameIn::CameIn(c10::ArrayRef<at::Tensor> grads) {
  for (const at::Tensor& grad : grads) {
    if (const at::Tensor in = in_memory(grad); storage_of(in)) {
      storages_.push_back(in.storage().getWeakStorageImpl());
    }
  }
}

bool CameIn::has(const at::Tensor& grad) const {
  const void* const storage = memory_of(grad);
  return std::any_of(storages_.begin(), storages_.end(),
                     [&](const auto& other) { return other._unsafe_get_target() == storage; });
}

void CameIn::own(variable_list& returned, c10::ArrayRef<at::Tensor> known) const {
  Holders holders(known);
  for (const at::Tensor& grad : returned) {
    holders.add(grad);
  }
  SmallVector<at::Tensor*, 2> others;
  for (at::Tensor& grad : returned) {
    if (grad.defined() && !has(grad) && holders.has_others(grad)) {
      others.push_back(&grad);
    }
  }
  for (at::Tensor* grad : others) {
    *grad = grad->clone();
  }
}

// ---- streams

bool runs_late(c10::Device device) {
  return !device.is_cpu() && !device.is_meta();
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

const torch::autograd::InputMetadata* late_metadata_of(Node& node) {
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    if (const auto& metadata = node.input_metadata(i); runs_late(metadata.device())) {
      return &metadata;
    }
  }
  return nullptr;
}

std::optional<c10::Stream> stream_of(Node& node) {
  const auto* metadata = late_metadata_of(node);
  return metadata ? std::optional(metadata->stream()) : std::nullopt;
}

std::optional<c10::Stream> stream_here(const at::Tensor& tensor) {
  return tensor.defined() && runs_late(tensor.device())
             ? std::optional(current_stream(tensor.device()))
             : std::nullopt;
}

void order(const c10::Stream& first, const c10::Stream& second) {
  if (first != second) {
    c10::Event done(first.device_type());
    done.record(first);
    second.wait(done);
  }
}

void record_here(const at::Tensor& tensor) {
  const at::Tensor in = in_memory(tensor);
  if (const auto here = stream_here(in); here && in.has_storage()) {
    c10::impl::VirtualGuardImpl(here->device_type())
        .recordDataPtrOnStream(in.storage().data_ptr(), *here);
  }
  if (tensor.is_sparse()) {
    record_here(tensor._indices());
  }
}

void Streams::add(const std::optional<c10::Stream>& stream) {
  if (stream && std::find(all_.begin(), all_.end(), *stream) == all_.end()) {
    all_.push_back(*stream);
  }
}

void Streams::add(const Streams& others) {
  for (const c10::Stream& stream : others.all_) {
    add(std::optional(stream));
  }
}

/// A capture of the caller's may not know the stream, of an accumulator that was made before: the
/// engine decides what becomes of it, as in an ordinary backward.
void Streams::order_callers(bool are_first) const {
  for (const c10::Stream& stream : all_) {
    const c10::Stream callers = current_stream(stream.device());
    if (stream != callers && (!is_captured(callers) || is_captured(stream))) {
      order(are_first ? callers : stream, are_first ? stream : callers);
    }
  }
}

bool Streams::are_captured() const {
  return !all_.empty() && std::any_of(all_.begin(), all_.end(), [](const c10::Stream& stream) {
    return is_captured(current_stream(stream.device()));
  });
}

}  // namespace zbp
