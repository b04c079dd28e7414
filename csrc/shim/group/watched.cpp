#include "shim/group/watched.h"

#include <utility>

#include <torch/csrc/autograd/variable.h>

#include "shim/group/dtensor.h"
#include "shim/torch/python.h"

namespace zbp {

bool has_version(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference();
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

size_t bytes_of(const at::Tensor& tensor) {
  const bool has_bytes = tensor.defined() && tensor.has_storage();
  return has_bytes ? static_cast<size_t>(tensor.storage().sym_nbytes().maybe_as_int().value_or(0))
                   : 0;
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl()
                                                  : nullptr;
}

Watched::Watched(const at::Tensor& tensor)
    : tensor_(tensor.defined() && tensor.requires_grad() ? tensor.detach() : tensor),
      version_(has_version(tensor) ? tensor._version() : 0) {}

Watched Watched::with_history(at::Tensor&& tensor) noexcept {
  Watched watched;
  watched.version_ = has_version(tensor) ? tensor._version() : 0;
  watched.tensor_ = std::move(tensor);
  return watched;
}

bool Watched::was_modified() const {
  return has_version(tensor_) && tensor_._version() != version_;
}

}  // namespace zbp
