// Note [Where the memory of a deallocated output goes]
//
// A tensor reaches its memory through a TensorImpl, which holds a StorageImpl. Nodes that save an output
// of their own hold the storage alone. Nodes that save an input, views (their base) and sends in
// flight hold the TensorImpl itself: taking the storage out of that would pull memory away from under
// them. So deallocate_output changes the TensorImpl only if nobody else has it; otherwise the Python
// object moves to a new one, without memory and with the same gradient edge, and the old one stays with
// its other holders. Either way the Python object gives up its share, and the memory goes with the
// last holder.
#include "shim/release/zbp_release.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/COW.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/pybind.h>

#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;

// ---- what a tensor holds

/// The tensor in `object` if it is a plain one: memory of its own kind, reached through one storage.
const at::Tensor& plain_tensor(PyObject* object) {
  const at::Tensor* tensor = as_tensor(object);
  if (!tensor) {
    refuse(PyExc_TypeError, "tensor is a ", Py_TYPE(object)->tp_name, "; expected a torch.Tensor");
  }
  if (tensor->defined() && !tensor->is_nested() && !tensor->is_quantized() &&
      !tensor->is_mkldnn() && !is_subclass(*tensor) && tensor->has_storage()) {
    if (tensor->is_meta()) {
      refuse(PyExc_ValueError, "tensor is ", describe(*tensor), ", which has no memory to give up");
    }
    return *tensor;
  }
  refuse(
      PyExc_TypeError, "tensor is a ", Py_TYPE(object)->tp_name,
      " whose memory is not one plain strided storage (a tensor subclass, a functorch wrapper, a "
      "sparse, nested or quantized tensor); pass the plain tensors that it is made of");
}

at::TensorImpl& impl_of(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl();
}

c10::StorageImpl& memory_of(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

/// What a view keeps alive; nothing for a tensor that is no view.
const at::Tensor* base_kept_by(const at::Tensor& tensor) {
  const auto* view = impl::get_view_autograd_meta(tensor);
  if (!view) {
    return nullptr;
  }
  return view->has_bw_view() ? &view->get_backward_view().base_ : &view->get_forward_view().base_;
}

/// Holders of the tensor besides its Python object.
size_t other_holders(const at::Tensor& tensor) {
  return tensor.use_count() - 1;
}

/// True if somebody holds the storage in Python. An object that only libtorch keeps, for the case that
/// it is asked for again, is held by nobody.
bool held_as_python_storage(const c10::StorageImpl& storage) {
  PyObject* object = storage.pyobj_slot()->load_pyobj();
  return object && Py_REFCNT(object) > 1;
}

/// Holders of its storage besides the tensor.
size_t other_holders_of_memory(const at::Tensor& tensor) {
  const c10::StorageImpl& storage = memory_of(tensor);
  const bool kept = storage.pyobj_slot()->load_pyobj() && !held_as_python_storage(storage);
  return tensor.storage().use_count() - 1 - (kept ? 1 : 0);
}

/// False for memory that was lent to torch (numpy, DLPack, another process) or that lazy clones share.
/// Not resizable(): that is also false, for ever, of what was lent to numpy once.
bool is_torchs_own(c10::StorageImpl& storage) {
  return storage.allocator() &&
         !c10::impl::cow::is_cow_data_ptr(storage._mutable_data_ptr_no_checks());
}

// ---- tensors without memory

/// A storage of no bytes; whoever tries to read it is told why (copied).
c10::Storage gone_storage(c10::Device device, const char* why) {
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, at::DataPtr(nullptr, device), /*allocator=*/nullptr,
      /*resizable=*/false));
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(why);
  return storage;
}

void set_storage(at::TensorImpl& tensor, c10::Storage&& storage) {
  // False for what .detach() and .data return; there it guards against surprises, which this is not.
  const bool allowed = tensor.allow_tensor_metadata_change();
  tensor.set_allow_tensor_metadata_change(true);
  tensor.set_storage_keep_dtype(std::move(storage));
  tensor.set_allow_tensor_metadata_change(allowed);
}

// ---- deallocate_output

/// A tensor without memory, and else as `tensor`.
at::Tensor make_shell(const at::Tensor& tensor, const char* why) {
  at::TensorImpl& from = impl_of(tensor);
  at::Tensor shell(
      from.shallow_copy_and_detach(from.version_counter(), from.allow_tensor_metadata_change()));
  set_storage(impl_of(shell), gone_storage(tensor.device(), why));
  if (tensor.requires_grad()) {
    impl::set_gradient_edge(shell, impl::gradient_edge(tensor));
  }
  if (const auto* meta = impl::get_autograd_meta(tensor); meta && meta->grad_.defined()) {
    shell.mutable_grad() = meta->grad_;
  }
  return shell;
}

/// See Note [Where the memory of a deallocated output goes].
void move_to_shell(PyObject* object, const at::Tensor& tensor, const char* why) {
  if (tensor.weak_use_count() > 1) {  // counts the strong ones as one
    refuse(
        PyExc_RuntimeError, "tensor of ", describe(tensor), " has ", other_holders(tensor),
        " other holders in C++ and is referred to weakly there as well, as retain_grad() does, so "
        "its memory cannot be given up; drop the holders first (wait for the sends, delete the "
        "views)");
  }
  THPObjectPtr shell(THPVariable_Wrap(make_shell(tensor, why)));
  THPObjectPtr module(PyImport_ImportModule("torch._C"));
  THPObjectPtr swapped(
      shell && module ? PyObject_CallMethod(module, "_swap_tensor_impl", "OO", object, shell.get())
                      : nullptr);
  if (!swapped) {
    throw python_error();
  }
}

void check_output(const at::Tensor& tensor) {
  if (const at::Tensor* base = base_kept_by(tensor)) {
    refuse(PyExc_ValueError, "tensor of ", describe(tensor), " is a view, and its base of ",
           describe(*base), " would keep the ", memory_of(tensor).nbytes(),
           " bytes; deallocate what zbpipe.make_viewless(tensor) returns");
  }
  if (tensor.is_leaf() && tensor.requires_grad()) {
    refuse(PyExc_ValueError, "tensor of ", describe(tensor),
           " is a leaf that requires a gradient, a parameter or an input, and no output; nothing "
           "could compute its values again");
  }
}

size_t deallocate_output(PyObject* object, const char* why) {
  const at::Tensor& tensor = plain_tensor(object);
  check_output(tensor);
  c10::StorageImpl& storage = memory_of(tensor);
  const size_t bytes = is_torchs_own(storage) ? storage.nbytes() : 0;
  const auto old = tensor.storage().getWeakStorageImpl();
  if (other_holders(tensor) == 0) {
    set_storage(impl_of(tensor), gone_storage(tensor.device(), why));
  } else {
    move_to_shell(object, tensor, why);
  }
  return old.expired() ? bytes : 0;
}

// ---- make_viewless

/// True if every byte of the storage is the tensor's. Looks at the numbers: views made to find out
/// would be recorded.
bool fills_its_storage(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and size of those that move
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != 0) {
      dims.emplace_back(tensor.stride(d), tensor.size(d));
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t reached = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != reached) {
      return false;
    }
    reached *= size;
  }
  return tensor.storage().nbytes() == (tensor.numel() == 0 ? 0 : reached * tensor.itemsize());
}

/// A copy in a storage of its own, of the same shape; dimensions of stride 0 keep it.
at::Tensor copy_of(const at::Tensor& tensor) {
  at::Tensor once = tensor;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) {
      once = once.narrow(d, 0, 1);
    }
  }
  return once.clone().expand_as(tensor);
}

/// The edge that a gradient of `tensor` takes, if it takes any. A leaf's is not its accumulator, which
/// is no history, but a node in front of it. A view that was made without grad mode has none, though it
/// says that it requires a gradient when its base does.
Edge history_of(const at::Tensor& tensor) {
  if (!tensor.requires_grad() ||
      (tensor.is_leaf() && !impl::get_autograd_meta(tensor)->requires_grad_)) {
    return {};
  }
  const at::AutoGradMode grad_mode(true);
  return impl::gradient_edge(tensor.is_leaf() ? tensor.view_as(tensor) : tensor);
}

at::Tensor make_viewless(const at::Tensor& tensor) {
  // An inference tensor's result may be one; others stay what they are.
  const c10::InferenceMode inference(c10::InferenceMode::is_enabled() && tensor.is_inference());
  const Edge history = history_of(tensor);
  const at::NoGradGuard no_grad;
  const at::Tensor source = fills_its_storage(tensor) ? tensor : copy_of(tensor);
  at::TensorImpl& from = impl_of(source);
  // The counter of what shares the memory: a change in place is seen by those that saved the base.
  at::Tensor viewless(from.shallow_copy_and_detach(from.version_counter(), true));
  if (history.is_valid()) {
    impl::set_gradient_edge(viewless, history);
  }
  return viewless;
}

PyObject* make_viewless(PyObject* object) {
  const at::Tensor& tensor = plain_tensor(object);
  if (!base_kept_by(tensor) && fills_its_storage(tensor)) {
    return Py_NewRef(object);
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != THPVariableClass) {
    refuse(PyExc_TypeError, "tensor is a ", Py_TYPE(object)->tp_name,
           ", whose class the result could not have; pass tensor.as_subclass(torch.Tensor)");
  }
  if (tensor._fw_grad(/*level=*/0).defined()) {
    refuse(PyExc_ValueError, "tensor of ", describe(tensor),
           " carries a forward-mode gradient, which the result would lose; take it off with "
           "torch.autograd.forward_ad.unpack_dual");
  }
  return wrap_tensor(make_viewless(tensor));
}

// ---- release_storage

void check_releasable(const at::Tensor& tensor) {
  c10::StorageImpl& storage = memory_of(tensor);
  if (storage.nbytes() > 0 && !is_torchs_own(storage)) {
    refuse(
        PyExc_ValueError, "tensor of ", describe(tensor), " lies in ", storage.nbytes(),
        " bytes that are not torch's alone to free (from numpy, DLPack, another process or a lazy "
        "clone); drop the tensor instead");
  }
}

// ---- who holds a tensor

int hold_through_tensor(const at::Tensor& tensor, const at::Tensor& other) {
  if (!other.defined() || !other.has_storage()) {
    return 0;
  }
  if (&impl_of(other) == &impl_of(tensor)) {
    return ZBP_HOLDS_TENSOR;
  }
  const at::Tensor* base = base_kept_by(other);
  const bool as_base = base && &impl_of(*base) == &impl_of(tensor);
  const auto* storage = impl_of(other).unsafe_storage().unsafeGetStorageImpl();
  return (storage == &memory_of(tensor) ? ZBP_HOLDS_STORAGE : 0) |
         (as_base ? ZBP_HOLDS_AS_BASE : 0);
}

int find_hold(const at::Tensor& tensor, PyObject* object) {
  if (const at::Tensor* other = as_tensor(object)) {
    return hold_through_tensor(tensor, *other);
  }
  if (!py::isinstance<torch::autograd::SavedVariable>(object)) {
    return 0;
  }
  const auto& saved = *py::cast<const torch::autograd::SavedVariable*>(py::handle(object));
  return saved.has_hooks() ? ZBP_HOLDS_UNKNOWN
                           : hold_through_tensor(tensor, saved.get_raw_data().value());
}

}  // namespace

int zbp_deallocate_output(PyObject* tensor, const char* why, size_t* freed_out, zbp_error* error) {
  return guarded(error, [&] { *freed_out = deallocate_output(tensor, why); });
}

PyObject* zbp_make_viewless(PyObject* tensor, zbp_error* error) {
  return guarded_object(error, [&] { return make_viewless(tensor); });
}

int zbp_release_storage(PyObject* object, const char* why, zbp_other_holders* holders_out,
                        int* released_out, zbp_error* error) {
  return guarded(error, [&] {
    const at::Tensor& tensor = plain_tensor(object);
    check_releasable(tensor);
    c10::StorageImpl& storage = memory_of(tensor);
    *holders_out = {storage.nbytes(), other_holders_of_memory(tensor),
                    held_as_python_storage(storage), other_holders(tensor)};
    *released_out = storage.nbytes() == 0 || holders_out->storage + holders_out->tensor == 0;
    if (*released_out && storage.nbytes() > 0) {
      set_storage(impl_of(tensor), gone_storage(tensor.device(), why));
    }
  });
}

int zbp_find_hold(PyObject* tensor, PyObject* other, int* hold_out, zbp_error* error) {
  return guarded(error, [&] { *hold_out = find_hold(plain_tensor(tensor), other); });
}
