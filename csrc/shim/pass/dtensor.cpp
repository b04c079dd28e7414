#include "shim/pass/dtensor.h"

#include <Python.h>

#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/torch/gil.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

constexpr int64_t replicated = -1;
constexpr int64_t partial = -2;  // a sum over the ranks

/// How a matrix lies along each dimension of its mesh: the dimension that is sharded, or one of the above.
using PartLayout = c10::SmallVector<int64_t, 2>;

struct LocalPart {
  at::Tensor local;
  THPObjectPtr mesh;
  PartLayout layout;
};

/// A class of torch.distributed.tensor; null if nobody imported that, or it has none of the name. No error is set.
THPObjectPtr class_named(const char* name) {
  THPObjectPtr module_name(PyUnicode_FromString("torch.distributed.tensor"));
  THPObjectPtr module(module_name ? PyImport_GetModule(module_name.get()) : nullptr);
  THPObjectPtr found(module ? PyObject_GetAttrString(module.get(), name) : nullptr);
  PyErr_Clear();
  return found;
}

bool is_of_class(PyObject* object, const char* name) {
  THPObjectPtr found = class_named(name);
  return found && reinterpret_cast<PyObject*>(Py_TYPE(object)) == found.get();
}

/// Nothing for a placement of another kind.
std::optional<int64_t> layout_of(PyObject* placement) {
  if (is_of_class(placement, "Replicate")) {
    return replicated;
  }
  if (is_of_class(placement, "Shard")) {
    THPObjectPtr dim(PyObject_GetAttrString(placement, "dim"));
    const long value = dim ? PyLong_AsLong(dim.get()) : -1;
    return value == 0 || value == 1 ? std::optional<int64_t>(value) : std::nullopt;
  }
  if (is_of_class(placement, "Partial")) {
    THPObjectPtr operation(PyObject_GetAttrString(placement, "reduce_op"));
    const char* name = operation ? PyUnicode_AsUTF8(operation.get()) : nullptr;
    return name && std::string_view(name) == "sum" ? std::optional<int64_t>(partial) : std::nullopt;
  }
  return std::nullopt;
}

/// The memory behind `_local_tensor`, which may still be on its way from a collective: then waits for it.
std::optional<at::Tensor> memory_of(PyObject* dtensor) {
  THPObjectPtr local(PyObject_GetAttrString(dtensor, "_local_tensor"));
  if (local && as_tensor(local.get()) && is_subclass(*as_tensor(local.get()))) {
    local = PyObject_CallMethod(local.get(), "trigger_wait", nullptr);
  }
  const at::Tensor* tensor = local ? as_tensor(local.get()) : nullptr;
  return tensor && !is_subclass(*tensor) ? std::optional(*tensor) : std::nullopt;
}

bool is_dtensor_object(PyObject* object) {
  THPObjectPtr type = class_named("DTensor");
  return type && PyObject_IsInstance(object, type.get()) == 1;
}

std::optional<LocalPart> part_of(const at::Tensor& tensor) {
  THPObjectPtr object(THPVariable_Wrap(tensor));
  if (!object || !is_dtensor_object(object.get()) || tensor.dim() != 2) {
    return std::nullopt;
  }
  THPObjectPtr spec(PyObject_GetAttrString(object.get(), "_spec"));
  THPObjectPtr placements(spec ? PyObject_GetAttrString(spec.get(), "placements") : nullptr);
  LocalPart part{{}, THPObjectPtr(spec ? PyObject_GetAttrString(spec.get(), "mesh") : nullptr), {}};
  auto local = memory_of(object.get());
  if (!local || !part.mesh || !placements || !PyTuple_Check(placements.get())) {
    return std::nullopt;
  }
  part.local = *std::move(local);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(placements.get()); ++i) {
    const auto layout = layout_of(PyTuple_GET_ITEM(placements.get(), i));
    if (!layout) {
      return std::nullopt;
    }
    part.layout.push_back(*layout);
  }
  return part;
}

void transpose(PartLayout& layout) {
  for (int64_t& along : layout) {
    along = along >= 0 ? 1 - along : along;
  }
}

/// How the product of two matrices lies, where their parts alone make it up.
std::optional<int64_t> layout_of_product(int64_t left, int64_t right) {
  if (left == 1 && right == 0) {
    return partial;
  }
  if (right == replicated && (left == 0 || left == replicated)) {
    return left;
  }
  if (left == replicated && right == 1) {
    return right;
  }
  return std::nullopt;
}

bool is_same_mesh(PyObject* a, PyObject* b) {
  return a == b || PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

std::optional<LocalProduct> take_apart(const Factor& sum, const Factor& left, const Factor& right) {
  auto s = part_of(sum.matrix);
  auto l = s ? part_of(left.matrix) : std::nullopt;
  auto r = l ? part_of(right.matrix) : std::nullopt;
  if (!r || !is_same_mesh(s->mesh, l->mesh) || !is_same_mesh(s->mesh, r->mesh)) {
    return std::nullopt;
  }
  if (sum.is_transposed) {
    transpose(s->layout);
  }
  if (left.is_transposed) {
    transpose(l->layout);
  }
  if (right.is_transposed) {
    transpose(r->layout);
  }
  for (size_t i = 0; i < s->layout.size(); ++i) {
    const auto layout = layout_of_product(l->layout[i], r->layout[i]);
    if (!layout || *layout != s->layout[i]) {
      return std::nullopt;
    }
  }
  return LocalProduct{s->local, l->local, r->local};
}

}  // namespace

bool is_dtensor(const at::Tensor& tensor) {
  if (!tensor.defined() || !is_subclass(tensor)) {
    return false;
  }
  const AcquireGil gil;
  THPObjectPtr object(THPVariable_Wrap(tensor));
  const bool is_one = object && is_dtensor_object(object.get());
  PyErr_Clear();
  return is_one;
}

at::Tensor local_part(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) {
    return tensor;
  }
  const AcquireGil gil;
  THPObjectPtr object(THPVariable_Wrap(tensor));
  const auto local = object ? memory_of(object.get()) : std::nullopt;
  PyErr_Clear();
  return local.value_or(tensor);
}

std::optional<LocalProduct> local_product(const Factor& sum, const Factor& left,
                                          const Factor& right) {
  if (!is_subclass(sum.matrix) || !is_subclass(left.matrix) || !is_subclass(right.matrix)) {
    return std::nullopt;
  }
  const AcquireGil gil;
  auto parts = take_apart(sum, left, right);
  PyErr_Clear();  // whatever could not be asked: then the DTensors' own rules apply
  return parts;
}

}  // namespace zbp
