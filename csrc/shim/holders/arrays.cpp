#include "shim/holders/arrays.h"

#include <cstring>
#include <memory>
#include <vector>

#include <torch/csrc/utils/object_ptr.h>

namespace zbp {

namespace {

/// Through the type's own descriptor.
THPObjectPtr own_attribute(PyTypeObject* type, PyObject* object, const char* name) {
  THPObjectPtr descriptor(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
  const descrgetfunc get = descriptor ? Py_TYPE(descriptor.get())->tp_descr_get : nullptr;
  return THPObjectPtr(get ? get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object)))
                          : nullptr);
}

/// Where in an element of this type, beginning at `offset`, references to objects are.
void add_offsets(PyObject* dtype, Py_ssize_t offset, std::vector<Py_ssize_t>& offsets) {
  THPObjectPtr has_objects(PyObject_GetAttrString(dtype, "hasobject"));
  if (has_objects.get() != Py_True) {
    return;
  }
  THPObjectPtr fields(PyObject_GetAttrString(dtype, "fields"));
  if (fields && fields.get() != Py_None) {
    THPObjectPtr values(PyMapping_Values(fields));
    for (Py_ssize_t i = 0; values && i < PyList_GET_SIZE(values.get()); ++i) {
      PyObject* const field = PyList_GET_ITEM(values.get(), i);  // (dtype, offset[, title])
      if (PyTuple_Check(field) && PyTuple_GET_SIZE(field) >= 2) {
        add_offsets(PyTuple_GET_ITEM(field, 0),
                    offset + PyLong_AsSsize_t(PyTuple_GET_ITEM(field, 1)), offsets);
      }
    }
    return;
  }
  THPObjectPtr part(PyObject_GetAttrString(dtype, "subdtype"));
  if (part && PyTuple_Check(part.get())) {
    PyObject* const base = PyTuple_GET_ITEM(part.get(), 0);
    const auto size_of = [](PyObject* type) {
      THPObjectPtr size(PyObject_GetAttrString(type, "itemsize"));
      return size ? PyLong_AsSsize_t(size) : 0;
    };
    const Py_ssize_t step = size_of(base);
    for (Py_ssize_t at = 0, end = size_of(dtype); step > 0 && at < end; at += step) {
      add_offsets(base, offset + at, offsets);
    }
    return;
  }
  offsets.push_back(offset);
}

void visit_elements(const Py_buffer& buffer, const std::vector<Py_ssize_t>& offsets,
                    c10::function_ref<void(PyObject*)> visit) {
  const auto dimensions = static_cast<size_t>(buffer.ndim);
  std::vector<Py_ssize_t> at(dimensions, 0);
  for (size_t d = 0; d < dimensions; ++d) {
    if (buffer.shape[d] == 0) {
      return;
    }
  }
  const char* element = static_cast<const char*>(buffer.buf);
  for (;;) {
    for (const Py_ssize_t offset : offsets) {
      PyObject* held = nullptr;
      std::memcpy(&held, element + offset, sizeof held);  // fields may be packed
      if (held) {
        visit(held);
      }
    }
    size_t d = dimensions;
    while (d > 0 && ++at[d - 1] == buffer.shape[d - 1]) {
      element -= (buffer.shape[d - 1] - 1) * buffer.strides[d - 1];
      at[--d] = 0;
    }
    if (d == 0) {
      return;
    }
    element += buffer.strides[d - 1];
  }
}

struct Release {
  void operator()(Py_buffer* buffer) const { PyBuffer_Release(buffer); }
};

}  // namespace

void visit_array(PyObject* array, PyTypeObject* type, c10::function_ref<void(PyObject*)> visit) {
  THPObjectPtr base = own_attribute(type, array, "base");
  if (base && base.get() != Py_None) {
    visit(base.get());
  }
  THPObjectPtr dtype = own_attribute(type, array, "dtype");
  std::vector<Py_ssize_t> offsets;
  if (dtype) {
    add_offsets(dtype, 0, offsets);
  }
  if (!offsets.empty() && type->tp_as_buffer && type->tp_as_buffer->bf_getbuffer) {
    Py_buffer buffer{};
    if (type->tp_as_buffer->bf_getbuffer(array, &buffer, PyBUF_STRIDED_RO) == 0) {
      const std::unique_ptr<Py_buffer, Release> released(&buffer);
      visit_elements(buffer, offsets, visit);
    }
  }
  PyErr_Clear();
}

}  // namespace zbp
