#include "shim/work/lazy.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "core/pass/zbp_verdict.h"
#include "shim/torch/gil.h"
#include "shim/torch/nodes.h"
#include "shim/work/keeping.h"

namespace zbp {

namespace {

constexpr const char* MODULE = "zbpipe._kernels.lazy";

bool may_be_lazy(const at::Tensor& tensor) {
  return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python);
}

/// New tuple of ints; None where one is not known as a number.
PyObject* size_at(const Edge& edge) {
  const c10::SymIntArrayRef sizes =
      edge.function->input_metadata(edge.input_nr).shape_as_dim_vector();
  return c10::asIntArrayRefSlowOpt(sizes) ? wrap_sizes(sizes) : Py_NewRef(Py_None);
}

/// The task's faces whose gradients may come late, each alone.
std::vector<bool> late_faces(const Task& task, const Node& original) {
  const SmallVector<bool, 4> is_matrix_face = matrix_faces(task);
  std::vector<bool> late(task.face.size());
  for (size_t f = 0; f < late.size(); ++f) {
    const bool leads = true;
    const auto slot = static_cast<int32_t>(task.plan(f).slot);
    int32_t face = -1;
    zbp_offer offer{};
    offer.is_watched = !original.post_hooks().empty();
    offer.slot = &slot;
    offer.leads = &leads;
    offer.slot_count = 1;
    offer.is_matrix = is_matrix_face.data();
    const auto verdict = zbp_verdict_of(task.layout, task.number, &offer, &face);
    late[f] =
        verdict == ZBP_VERDICT_HAND_OVER &&
        !task.face[f].edge.function->input_metadata(task.face[f].edge.input_nr).is_nested_tensor();
  }
  return late;
}

}  // namespace

LazyProducts::LazyProducts(Group& group, Task& task, Node& original) : group_(group), task_(task) {
  if (!group.splits_functions || !is_python_function(original)) {
    return;
  }
  const std::vector<bool> late = late_faces(task, original);
  if (std::find(late.begin(), late.end(), true) == late.end()) {
    return;
  }
  const AcquireGil gil;
  THPObjectPtr sizes(PyTuple_New(static_cast<Py_ssize_t>(original.num_outputs())));
  for (uint32_t slot = 0; sizes && slot < original.num_outputs(); ++slot) {
    const auto face = face_at(task, slot);
    PyTuple_SET_ITEM(sizes.get(), slot,
                     face && late[*face] ? size_at(task.face[*face].edge) : Py_NewRef(Py_None));
  }
  THPObjectPtr context(torch::autograd::functionToPyObject(ref_of(original)));
  if (PyErr_Occurred()) {
    throw python_error();
  }
  seen_ =
      call_python(MODULE, "begin", {reinterpret_cast<PyObject*>(Py_TYPE(context.get())), sizes});
  is_under_way_ = seen_.get() != Py_None;
}

LazyProducts::~LazyProducts() {
  if (seen_) {
    const AcquireGil gil;
    end();
    seen_ = nullptr;
  }
}

void LazyProducts::end() noexcept {
  if (std::exchange(is_under_way_, false)) {
    try {
      call_python(MODULE, "end", {});
    } catch (python_error&) {
      PyErr_Clear();  // who called us has unbalanced the stack of modes
    }
  }
}

void LazyProducts::settle(variable_list& gradients) {
  if (!is_under_way_) {
    return;
  }
  const AcquireGil gil;
  end();
  if (std::any_of(gradients.begin(), gradients.end(), may_be_lazy)) {
    settle_lazy(gradients);
  }
  THPObjectPtr none(PyObject_CallMethod(seen_, "finish", nullptr));
  if (!none) {
    throw python_error();
  }
}

void LazyProducts::settle_lazy(variable_list& gradients) {
  THPObjectPtr returned(wrap_tensors(gradients));
  THPObjectPtr settled = call_python(MODULE, "settled", {seen_, returned});
  for (size_t slot = 0; slot < gradients.size(); ++slot) {
    PyObject* const one = PyList_GET_ITEM(settled.get(), static_cast<Py_ssize_t>(slot));
    if (PyTuple_Check(one)) {
      gradients[slot] = hand_over(PyTuple_GET_ITEM(one, 0), PyTuple_GET_ITEM(one, 1), slot);
    } else if (one != Py_None) {
      gradients[slot] = *as_tensor(one);
    }
  }
}

/// Undefined.
at::Tensor LazyProducts::hand_over(PyObject* function, PyObject* factors, size_t slot) {
  const auto face = static_cast<int32_t>(*face_at(task_, static_cast<uint32_t>(slot)));
  keep_work(group_, task_, function, factors, {face}, /*is_single=*/true);
  task_.works.back().is_product = true;
  return {};
}

}  // namespace zbp
