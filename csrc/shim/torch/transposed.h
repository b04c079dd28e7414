// The transpose of a factor, made without the dispatcher.
#pragma once

#include <typeinfo>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace zbp {

/// Strides and storage say all about it, and nobody watches the operators that would make a view of it.
inline bool is_only_strided(const at::Tensor& matrix) {
  const c10::TensorImpl& impl = *matrix.unsafeGetTensorImpl();
  const c10::DispatchKeySet others =
      impl.key_set() -
      c10::DispatchKeySet({c10::DispatchKey::Dense, c10::DispatchKey::ADInplaceOrView,
                           c10::DispatchKey::AutogradFunctionality});
  return typeid(impl) == typeid(c10::TensorImpl) &&
         (others.raw_repr() & ~c10::full_backend_mask) == 0 && impl.has_storage() &&
         !impl.has_symbolic_sizes_strides() && !c10::impl::dispatch_mode_enabled();
}

/// matrix.mT(), to be read and let go: to autograd it is no view, and it has a version of its own. Half a microsecond
/// sooner, which a product of a small layer notices.
inline at::Tensor transposed_factor(const at::Tensor& matrix) {
  if (!is_only_strided(matrix)) {
    return matrix.mT();
  }
  auto view = c10::make_intrusive<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(matrix.storage()), matrix.key_set(), matrix.dtype());
  c10::SmallVector<int64_t, 5> sizes(matrix.sizes());
  c10::SmallVector<int64_t, 5> strides(matrix.strides());
  std::swap(sizes.end()[-1], sizes.end()[-2]);
  std::swap(strides.end()[-1], strides.end()[-2]);
  view->set_sizes_and_strides(sizes, strides, matrix.storage_offset());
  return at::Tensor(std::move(view));
}

}  // namespace zbp
