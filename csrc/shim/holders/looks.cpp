#include "shim/holders/zbp_looks.h"

#include <string>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "shim/holders/things.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"
#include "shim/torch/zbp_tensor.h"

namespace {

using namespace zbp;

c10::TensorImpl& tensor_at(const void* key) {
  return *static_cast<c10::TensorImpl*>(const_cast<void*>(key));
}

/// False for a tensor whose shape is Python's to tell, or that has none.
bool has_plain_shape(const c10::TensorImpl& tensor) {
  return !tensor.key_set().has(c10::DispatchKey::Python) && tensor.layout() == c10::kStrided &&
         !tensor.is_nested();
}

THPDtype* dtype_of(const c10::TensorImpl& tensor) {
  return torch::getTHPDtype(c10::typeMetaToScalarType(tensor.dtype()));
}

std::string describe_briefly(const c10::TensorImpl& tensor) {
  if (!has_plain_shape(tensor)) {
    return "";
  }
  std::string sizes;
  for (const auto& size : tensor.sym_sizes()) {
    sizes += (sizes.empty() ? "" : ", ") + std::to_string(size.maybe_as_int().value_or(-1));
  }
  return std::string(dtype_of(tensor)->name) + " [" + sizes + "]";  // float32 without the module
}

PyObject* object_of_node(Node& node) {
  PyObject* const object = python_object_of(node);
  if (!object && is_python_function(node)) {  // torch 2.11 does not note it
    return torch::autograd::functionToPyObject(ref_of(node));
  }
  return Py_XNewRef(object);
}

c10::Device device_of(const zbp_memory& memory) {
  return {static_cast<c10::DeviceType>(memory.device_type), memory.device_index};
}

/// Calls `visit` with each storage of what `tensor` is made of.
void for_each_storage(const c10::TensorImpl& tensor, c10::function_ref<void(const void*)> visit) {
  if (const void* storage = zbp_tensor_storage(&tensor)) {
    visit(storage);
  }
  for_each_component(tensor, [&](const at::Tensor& component, const char*) {
    for_each_storage(*component.unsafeGetTensorImpl(), visit);
  });
}

/// New set of `number` of each storage of the tensors.
template <class Number>
PyObject* set_of(PyObject* tensors, zbp_error* error, const Number& number) {
  return guarded_object(error, [&] {
    THPObjectPtr set(PySet_New(nullptr));
    THPObjectPtr sequence(PySequence_Fast(tensors, "expected a list of tensors"));
    if (!set || !sequence) {
      throw python_error();
    }
    for (Py_ssize_t i = 0; i < size_of(sequence); ++i) {
      const void* const tensor = zbp_tensor_key(item(sequence, i));
      if (!tensor) {
        continue;
      }
      for_each_storage(tensor_at(tensor), [&](const void* storage) {
        THPObjectPtr value(number(storage));
        if (!value || PySet_Add(set, value) < 0) {
          throw python_error();
        }
      });
    }
    return set.release();
  });
}

}  // namespace

int zbp_things_new(zbp_group_access groups, PyTypeObject* work, PyTypeObject* array,
                   zbp_things** things_out, zbp_error* error) {
  return kept_in(error, [&] { *things_out = new zbp_things(groups, work, array); });
}

PyObject* zbp_things_unseen(const zbp_things* things, zbp_error* error) {
  return guarded_object(error, [&] {
    THPObjectPtr unseen(PyDict_New());
    for (const auto& [what, count] : things->unseen()) {
      THPObjectPtr number(unseen ? PyLong_FromSize_t(count) : nullptr);
      if (!number || PyDict_SetItemString(unseen, what.c_str(), number) < 0) {
        throw python_error();
      }
    }
    return unseen.release();
  });
}

PyObject* zbp_look_object(uint8_t thing, const void* key, zbp_error* error) {
  return guarded_object(error, [&] {
    PyObject* const object = thing == ZBP_THING_NODE
                                 ? object_of_node(*static_cast<Node*>(const_cast<void*>(key)))
                                 : Py_XNewRef(object_of(thing, key));
    return object ? object : Py_NewRef(Py_None);
  });
}

PyObject* zbp_look_name(uint8_t thing, const void* key, zbp_error* error) {
  return guarded_object(error, [&] {
    return wrap_text(thing == ZBP_THING_TENSOR ? describe_briefly(tensor_at(key))
                     : thing == ZBP_THING_NODE ? static_cast<const Node*>(key)->name()
                                               : "");
  });
}

PyObject* zbp_look_tensor(const void* tensor, bool wraps, zbp_error* error) {
  return guarded_object(error, [&] {
    c10::TensorImpl& impl = tensor_at(tensor);
    const bool is_plain = has_plain_shape(impl);
    THPObjectPtr shape(wrap_sizes(is_plain ? impl.sym_sizes() : c10::SymIntArrayRef()));
    const int64_t bytes = is_plain ? impl.numel() * static_cast<int64_t>(impl.itemsize()) : 0;
    THPObjectPtr object(Py_XNewRef(object_of(ZBP_THING_TENSOR, tensor)));
    if (!object && wraps) {
      object = THPObjectPtr(THPVariable_Wrap(at::Tensor(
          c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(&impl))));
    }
    return Py_BuildValue("(OOOL)", shape.get(), reinterpret_cast<PyObject*>(dtype_of(impl)),
                         object ? object.get() : Py_None, static_cast<long long>(bytes));
  });
}

PyObject* zbp_look_device_name(const zbp_memory* memory, zbp_error* error) {
  return guarded_object(error, [&] { return wrap_text(device_of(*memory).str()); });
}

PyObject* zbp_storages_of(PyObject* tensors, zbp_error* error) {
  return set_of(tensors, error,
                [](const void* storage) { return PyLong_FromVoidPtr(const_cast<void*>(storage)); });
}

PyObject* zbp_addresses_of(PyObject* tensors, zbp_error* error) {
  return set_of(tensors, error, [](const void* storage) {
    zbp_memory memory{};
    zbp_storage_look(storage, &memory);
    return PyLong_FromUnsignedLongLong(memory.address);
  });
}
