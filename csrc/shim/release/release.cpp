#include "shim/release/zbp_release.h"

#include <c10/core/impl/COW.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/torch/python.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;

const at::Tensor& tensor_with_storage(PyObject* object) {
  const at::Tensor* tensor = as_tensor(object);
  if (!tensor || !tensor->has_storage()) {
    refuse(PyExc_TypeError, "expected a tensor that has a storage, got a ", type_name(object));
  }
  return *tensor;
}

c10::StorageImpl& storage_impl(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

int64_t own_bytes(c10::StorageImpl& storage) {
  const at::DataPtr& data =
      storage._mutable_data_ptr_no_checks();  // which makes no lazy clone real
  const auto bytes = static_cast<int64_t>(storage.nbytes());
  if (bytes > 0 && !data.get()) {
    return -1;
  }
  // Not resizable(): that is also false, for ever, of what was lent to numpy once.
  return storage.allocator() && !c10::impl::cow::is_cow_data_ptr(data) ? bytes : 0;
}

c10::Storage memoryless(const at::Tensor& tensor, const char* why) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage_impl(tensor).nbytes(),
      at::DataPtr(nullptr, tensor.device()), /*allocator=*/nullptr, /*resizable=*/false));
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
  return storage;
}

at::Tensor twin(const at::Tensor& values, const at::Tensor* place, const char* why) {
  at::TensorImpl& from = *values.unsafeGetTensorImpl();
  at::Tensor twin(from.shallow_copy_and_detach(from.version_counter(), true));
  if (why) {
    twin.unsafeGetTensorImpl()->set_storage_keep_dtype(memoryless(values, why));
  }
  if (place && place->requires_grad()) {
    impl::set_gradient_edge(twin, impl::gradient_edge(*place));
  }
  const auto* meta = place && why ? impl::get_autograd_meta(*place) : nullptr;
  if (meta && meta->grad_.defined()) {
    twin.mutable_grad() = meta->grad_;
  }
  return twin;
}

}  // namespace

PyObject* zbp_own_bytes(PyObject* tensor, zbp_error* error) {
  return guarded_object(error, [&] {
    return PyLong_FromLongLong(own_bytes(storage_impl(tensor_with_storage(tensor))));
  });
}

PyObject* zbp_twin(PyObject* values, PyObject* place, const char* why, zbp_error* error) {
  return guarded_object(
      error, [&] { return wrap_tensor(twin(tensor_with_storage(values), as_tensor(place), why)); });
}
