#include "shim/torch/python.h"

#include <string_view>
#include <typeindex>
#include <unordered_map>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "shim/torch/nodes.h"

namespace zbp {

void throw_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

THPObjectPtr checked(PyObject* object) {
  if (!object) {
    throw_error();
  }
  return THPObjectPtr(object);
}

void forget_error() {
  if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
    throw_error();
  }
  PyErr_Clear();
}

void append(PyObject* list, PyObject* value) {
  if (PyList_Append(list, checked(value)) < 0) {
    throw_error();
  }
}

PyObject* wrap_tensor(const at::Tensor& tensor) {
  return checked(THPVariable_Wrap(tensor)).release();
}

PyObject* wrap_tensors(const variable_list& tensors) {
  THPObjectPtr tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), wrap_tensor(tensors[i]));
  }
  return tuple.release();
}

variable_list tensors_in(PyObject* list) {
  variable_list tensors(static_cast<size_t>(PyList_GET_SIZE(list)));
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (const at::Tensor* tensor = as_tensor(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)))) {
      tensors[i] = *tensor;
    }
  }
  return tensors;
}

PyObject* wrap_sizes(c10::SymIntArrayRef sizes) {
  THPObjectPtr list = checked(PyList_New(0));
  for (const c10::SymInt& size : sizes) {
    append(list, PyLong_FromLongLong(size.maybe_as_int().value_or(-1)));
  }
  return checked(PyList_AsTuple(list)).release();
}

THPObjectPtr call_python(const char* module, const char* function,
                         std::initializer_list<PyObject*> arguments) {
  THPObjectPtr found =
      checked(PyObject_GetAttrString(checked(PyImport_ImportModule(module)), function));
  return checked(PyObject_Vectorcall(found, arguments.begin(), arguments.size(), nullptr));
}

Py_ssize_t as_position(PyObject* number) {
  const Py_ssize_t position = PyNumber_AsSsize_t(number, nullptr);
  if (position == -1 && PyErr_Occurred()) {
    throw_error();
  }
  return position;
}

const at::Tensor* as_tensor(PyObject* object) {
  return THPVariable_Check(object) ? &THPVariable_Unpack(object) : nullptr;
}

namespace {

NodePtr as_node(PyObject* object) {
  if (THPFunction_Check(object)) {
    return lock_py_node(reinterpret_cast<THPFunction*>(object)->cdata);
  }
  if (torch::autograd::THPCppFunction_Check(object)) {
    return reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata;
  }
  return nullptr;
}

/// Where the nodes of one type have what they have saved.
struct SavedPlaces {
  struct Member {
    ptrdiff_t offset;  // from the node
    const char* name;
  };
  PyTypeObject* type = nullptr;  // what Python sees them as; null if libtorch has none
  std::vector<Member> members;
  std::vector<const PyGetSetDef*> lists;  // to be asked each time: a list can be released
};

/// A node's Python object for the time of a call, on the stack: a real one, once made, stays with
/// the node from torch 2.13 on, and a graph whose nodes have one is freed recursively.
struct ObjectOf {
  ObjectOf(Node& node, PyTypeObject* type) {
    object.ob_base.ob_refcnt = 1;
    object.ob_base.ob_type = type;
    object.cdata = ref_of(node);
  }
  THPObjectPtr get(const PyGetSetDef& def) {
    return THPObjectPtr(def.get(reinterpret_cast<PyObject*>(&object), def.closure));
  }
  torch::autograd::THPCppFunction object{};
};

SavedVariable& saved_in(PyObject* object) {
  return *pybind11::cast<SavedVariable*>(pybind11::handle(object));
}

/// Static: lives as long as the process. Null if there is none.
PyTypeObject* python_type_of(const Node& node) {
  // Not imported: that might run Python code, in the middle of a search for holders.
  THPObjectPtr name(PyUnicode_FromString("torch._C"));
  THPObjectPtr module(name ? PyImport_GetModule(name) : nullptr);
  THPObjectPtr functions(module ? PyObject_GetAttrString(module, "_functions") : nullptr);
  THPObjectPtr type(functions ? PyObject_GetAttrString(functions, node.name().c_str()) : nullptr);
  PyErr_Clear();
  return type && PyType_Check(type.get()) ? reinterpret_cast<PyTypeObject*>(type.get()) : nullptr;
}

const char* saved_name(const PyGetSetDef& def) {
  return def.name + std::string_view("_raw_").size();
}

/// By libtorch's getters, which give a tensor's member of the node itself, and a list's entries in
/// a tuple.
SavedPlaces find_saved_places(Node& node) {
  constexpr std::string_view prefix = "_raw_saved_";
  SavedPlaces places;
  places.type = python_type_of(node);
  for (const PyGetSetDef* def = places.type ? places.type->tp_getset : nullptr; def && def->name;
       ++def) {
    if (std::string_view(def->name).substr(0, prefix.size()) != prefix) {
      continue;
    }
    THPObjectPtr value = ObjectOf(node, places.type).get(*def);
    PyErr_Clear();  // a list that a backward has released
    if (!value || !pybind11::isinstance<SavedVariable>(pybind11::handle(value.get()))) {
      places.lists.push_back(def);
      continue;
    }
    const auto* member = reinterpret_cast<const char*>(&saved_in(value));
    places.members.push_back({member - reinterpret_cast<const char*>(&node), saved_name(*def)});
  }
  return places;
}

/// Asked once per type: I asks about every node. With the GIL.
const SavedPlaces& saved_places_of(Node& node) {
  static auto* const known = new std::unordered_map<std::type_index, SavedPlaces>;
  const auto place = known->find(typeid(node));
  return place != known->end()
             ? place->second
             : known->emplace(typeid(node), find_saved_places(node)).first->second;
}

}  // namespace

std::optional<Edge> as_gradient_edge(PyObject* object) {
  if (!PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPGradientEdgeClass))) {
    return std::nullopt;
  }
  THPObjectPtr node = checked(PyObject_GetAttrString(object, "node"));
  THPObjectPtr output_nr = checked(PyObject_GetAttrString(object, "output_nr"));
  const Py_ssize_t nr = as_position(output_nr);
  Edge edge(as_node(node), 0);
  if (!edge.is_valid()) {
    refuse(PyExc_TypeError, "a GradientEdge's node is a ", Py_TYPE(node.get())->tp_name,
           "; expected a node of an autograd graph that still exists");
  }
  if (nr < 0 || nr >= static_cast<Py_ssize_t>(edge.function->num_inputs())) {
    refuse(PyExc_ValueError, "a GradientEdge names output ", nr, " of ", edge.function->name(),
           ", which has ", edge.function->num_inputs());
  }
  edge.input_nr = static_cast<uint32_t>(nr);
  return edge;
}

bool for_each_saved(Node& node,
                    c10::function_ref<void(SavedVariable&, const char*, int32_t)> visit) {
  const SavedPlaces& places = saved_places_of(node);
  for (const SavedPlaces::Member& member : places.members) {
    auto* saved = reinterpret_cast<char*>(&node) + member.offset;
    visit(*reinterpret_cast<SavedVariable*>(saved), member.name, -1);
  }
  for (const PyGetSetDef* def : places.lists) {
    THPObjectPtr list = ObjectOf(node, places.type).get(*def);
    PyErr_Clear();
    const Py_ssize_t size = list && PyTuple_Check(list.get()) ? PyTuple_GET_SIZE(list.get()) : 0;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* item = PyTuple_GET_ITEM(list.get(), i);
      if (item != Py_None) {
        visit(saved_in(item), saved_name(*def), static_cast<int32_t>(i));
      }
    }
  }
  return places.type != nullptr;
}

THPObjectPtr context_of(Node& node) {
  return checked(torch::autograd::functionToPyObject(ref_of(node)));  // the one it has
}

std::vector<SavedVariable*> saved_by(Node& node) {
  std::vector<SavedVariable*> saved;
  if (is_generated(node)) {
    for_each_saved(node, [&](SavedVariable& one, const char*, int32_t) { saved.push_back(&one); });
  } else if (is_python_function(node)) {
    THPObjectPtr context = context_of(node);
    for (SavedVariable& one : reinterpret_cast<THPFunction*>(context.get())->saved_variables) {
      saved.push_back(&one);
    }
  }
  return saved;
}

std::string described(c10::ScalarType type, c10::SymIntArrayRef shape, c10::Device device) {
  return c10::str(torch::getTHPDtype(type)->name, shape, " on ", device);
}

std::string describe(const at::Tensor& tensor) {
  if (tensor.is_nested() && !is_subclass(tensor)) {
    return "a nested tensor";
  }
  return described(tensor.scalar_type(), tensor.sym_sizes(), tensor.device());
}

std::string describe(const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  if (metadata.is_cpp_nested_tensor()) {
    return "a nested tensor";
  }
  const auto type = metadata.grad_dtype();
  return described(type.value_or(c10::typeMetaToScalarType(metadata.dtype())),
                   metadata.shape_as_dim_vector(), metadata.device());
}

bool fits(const at::Tensor& grad, const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  return metadata.is_cpp_nested_tensor() == (grad.is_nested() && !is_subclass(grad)) &&
         metadata.is_same_shape(grad) &&
         grad.scalar_type() == metadata.grad_dtype().value_or(grad.scalar_type()) &&
         grad.device() == metadata.device();
}

}  // namespace zbp
