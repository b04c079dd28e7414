#include "shim/torch/python.h"

#include <string_view>
#include <typeindex>
#include <unordered_map>

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "shim/torch/gil.h"
#include "shim/pass/kinds.h"

namespace zbp {

int run_for_python(torch::PyWarningHandler& warnings, c10::function_ref<void()> body) noexcept {
  try {
    body();
    return ZBP_OK;
  } catch (const Refused& refused) {
    PyErr_SetString(refused.type, refused.message.c_str());
  } catch (...) {
    warnings.set_in_exception();
    torch::translate_exception_to_python(std::current_exception());
  }
  return ZBP_EPYTHON;
}

int warning_became_error() noexcept {
  if (!PyErr_Occurred()) {
    PyErr_SetString(PyExc_RuntimeError, "zbpipe: a warning was turned into an error");
  }
  return ZBP_EPYTHON;
}

int Barrier::begin() noexcept {
  warnings_ = new (std::nothrow) torch::PyWarningHandler;
  if (!warnings_) {
    PyErr_NoMemory();
    return ZBP_EPYTHON;
  }
  return ZBP_OK;
}

int Barrier::end(c10::function_ref<void()> body) noexcept {
  const int status = run_for_python(*warnings_, body);
  try {
    delete std::exchange(warnings_, nullptr);
  } catch (...) {
    return warning_became_error();
  }
  return status;
}

THPObjectPtr new_list() {
  THPObjectPtr list(PyList_New(0));
  if (!list) {
    throw python_error();
  }
  return list;
}

void append(PyObject* list, PyObject* value) {
  THPObjectPtr owned(value);
  if (!owned || PyList_Append(list, owned.get()) < 0) {
    throw python_error();
  }
}

PyObject* wrap_tensors(const variable_list& tensors) {
  THPObjectPtr tuple(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  if (!tuple) {
    throw python_error();
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* wrapped = THPVariable_Wrap(tensors[i]);
    if (!wrapped) {
      throw python_error();
    }
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), wrapped);
  }
  return tuple.release();
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

std::string describe(c10::ScalarType type, c10::SymIntArrayRef shape, c10::Device device) {
  return c10::str(type, " ", shape, " on ", device);
}

}  // namespace

std::optional<Edge> as_gradient_edge(PyObject* object) {
  const int is_edge = PyObject_IsInstance(object, THPGradientEdgeClass);
  if (is_edge < 0) {
    throw python_error();
  }
  if (!is_edge) {
    return std::nullopt;
  }
  THPObjectPtr node(PyObject_GetAttrString(object, "node"));
  THPObjectPtr output_nr(PyObject_GetAttrString(object, "output_nr"));
  if (!node || !output_nr) {
    throw python_error();
  }
  int overflow = 0;
  const long nr = PyLong_AsLongAndOverflow(output_nr, &overflow);
  if (nr == -1 && PyErr_Occurred()) {
    throw python_error();
  }
  Edge edge(as_node(node), 0);
  if (!edge.is_valid()) {
    refuse(PyExc_TypeError, "a GradientEdge's node is a ", Py_TYPE(node.get())->tp_name,
           "; expected a node of an autograd graph that still exists");
  }
  if (overflow || nr < 0 || static_cast<unsigned long>(nr) >= edge.function->num_inputs()) {
    refuse(PyExc_ValueError, "a GradientEdge names output ",
           overflow ? "beyond any" : std::to_string(nr), " of ", edge.function->name(),
           ", which has ", edge.function->num_inputs());
  }
  edge.input_nr = static_cast<uint32_t>(nr);
  return edge;
}

namespace {

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

/// A node's Python object for the time of a call, on the stack: a real one, once made, stays with the node from
/// torch 2.13 on, and a graph whose nodes have one is freed recursively.
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

const char* name_of(const PyGetSetDef& def) {
  return def.name + std::string_view("_raw_").size();
}

/// Static: lives as long as the process. Null if there is none.
PyTypeObject* python_type_of(const Node& node) {
  THPObjectPtr module(PyImport_ImportModule("torch._C"));
  THPObjectPtr functions(module ? PyObject_GetAttrString(module, "_functions") : nullptr);
  THPObjectPtr type(functions ? PyObject_GetAttrString(functions, node.name().c_str()) : nullptr);
  PyErr_Clear();
  return type && PyType_Check(type.get()) ? reinterpret_cast<PyTypeObject*>(type.get()) : nullptr;
}

/// By libtorch's getters, which give a tensor's member of the node itself, and a list's entries in a tuple.
SavedPlaces find_saved_places(Node& node) {
  constexpr std::string_view prefix = "_raw_saved_";
  SavedPlaces places;
  places.type = python_type_of(node);
  if (!places.type) {
    return places;
  }
  ObjectOf object(node, places.type);
  for (const PyGetSetDef* def = places.type->tp_getset; def && def->name; ++def) {
    if (std::string_view(def->name).substr(0, prefix.size()) != prefix) {
      continue;
    }
    THPObjectPtr value = object.get(*def);
    PyErr_Clear();  // a list that a backward has released
    if (!value || !pybind11::isinstance<SavedVariable>(pybind11::handle(value.get()))) {
      places.lists.push_back(def);
      continue;
    }
    const auto* member = reinterpret_cast<const char*>(&saved_in(value));
    places.members.push_back({member - reinterpret_cast<const char*>(&node), name_of(*def)});
  }
  return places;
}

const SavedPlaces& saved_places_of(Node& node) {
  static auto* const known = new std::unordered_map<std::type_index, SavedPlaces>;  // with the GIL
  const auto place = known->find(typeid(node));
  return place != known->end()
             ? place->second
             : known->emplace(typeid(node), find_saved_places(node)).first->second;
}

}  // namespace

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
        visit(saved_in(item), name_of(*def), static_cast<int32_t>(i));
      }
    }
  }
  return places.type != nullptr;
}

std::vector<SavedVariable*> saved_by(Node& node) {
  std::vector<SavedVariable*> saved;
  if (is_generated(node)) {
    for_each_saved(node, [&](SavedVariable& one, const char*, int32_t) { saved.push_back(&one); });
  } else if (is_python_function(node)) {
    THPObjectPtr context(torch::autograd::functionToPyObject(ref_of(node)));  // the one it has
    if (!context) {
      throw python_error();
    }
    for (SavedVariable& one : reinterpret_cast<THPFunction*>(context.get())->saved_variables) {
      saved.push_back(&one);
    }
  }
  return saved;
}

namespace {

/// Calls `visit` with what each cell of a Python function's closure holds, until it returns true.
template <class Visit>
bool find_in_closure(PyObject* function, const Visit& visit) {
  PyObject* closure = PyFunction_Check(function) ? PyFunction_GetClosure(function) : nullptr;
  for (Py_ssize_t i = 0; closure && i < PyTuple_GET_SIZE(closure); ++i) {
    THPObjectPtr held(PyCell_Get(PyTuple_GET_ITEM(closure, i)));
    if (held && visit(held.get())) {
      return true;
    }
  }
  return false;
}

}  // namespace

// torch.utils.checkpoint has no question for this. Its hook's closure holds the frame of the region, whose
// function for computing it again holds, of a selective one, the mode that hands results out, each once. Where torch
// has no such mode to tell, a region may be a selective one.
UnpackHook recognise(PyObject* unpack_hook) {
  THPObjectPtr module(PyImport_ImportModule("torch.utils.checkpoint"));
  const auto type_named = [&](const char* name) {
    THPObjectPtr type(module ? PyObject_GetAttrString(module, name) : nullptr);
    PyErr_Clear();
    return type;
  };
  THPObjectPtr frame_type = type_named("_CheckpointFrame");
  THPObjectPtr mode_type = type_named("_CachedTorchDispatchMode");
  UnpackHook hook = UnpackHook::other;
  if (!frame_type) {
    return hook;
  }
  find_in_closure(unpack_hook, [&](PyObject* held) {
    if (PyObject_IsInstance(held, frame_type) != 1) {
      return false;
    }
    THPObjectPtr recompute(PyObject_GetAttrString(held, "recompute_fn"));
    const auto is_mode = [&](PyObject* inner) {
      return PyObject_IsInstance(inner, mode_type) == 1;
    };
    const bool is_selective = !mode_type || (recompute && find_in_closure(recompute, is_mode));
    hook = is_selective ? UnpackHook::selective_checkpoint : UnpackHook::checkpoint;
    return true;
  });
  PyErr_Clear();
  return hook;
}

namespace {

/// New reference to the frame of the checkpointed region that the hook is of, or null.
THPObjectPtr frame_of(PyObject* unpack_hook) {
  THPObjectPtr module(PyImport_ImportModule("torch.utils.checkpoint"));
  THPObjectPtr type(module ? PyObject_GetAttrString(module, "_CheckpointFrame") : nullptr);
  THPObjectPtr frame;
  if (type) {
    find_in_closure(unpack_hook, [&](PyObject* held) {
      if (PyObject_IsInstance(held, type) == 1) {
        frame = THPObjectPtr(Py_NewRef(held));
      }
      return static_cast<bool>(frame);
    });
  }
  PyErr_Clear();
  return frame;
}

using VisitTensor = c10::function_ref<void(const at::Tensor&)>;

/// An argument of a region; within another region it is packed by that one's hooks.
void visit_argument(const SavedVariable& saved, const NodePtr& saved_for, VisitTensor visit) {
  if (!saved.has_hooks()) {
    visit(saved.unpack(saved_for));
  } else if (const auto data = saved.retrieve_unpack_hook_data()) {
    for_each_argument(data->first.ptr(getPyInterpreter()), visit);
  }
}

void visit_if_tensor(PyObject* object, VisitTensor visit) {
  const at::Tensor* tensor = as_tensor(object);
  if (tensor && !(tensor->is_leaf() && tensor->requires_grad())) {
    visit(*tensor);
  }
}

/// Named arguments, and what the region's function itself has closed over.
void visit_closure(PyObject* recompute, VisitTensor visit) {
  find_in_closure(recompute, [&](PyObject* held) {
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Check(held) && PyDict_Next(held, &at, &key, &value);) {
      visit_if_tensor(value, visit);
    }
    find_in_closure(held, [&](PyObject* inner) {
      visit_if_tensor(inner, visit);
      return false;
    });
    return false;
  });
}

}  // namespace

// A region's frame has its arguments as saved tensors: in a list from torch 2.13 on, of a node of their own before.
void for_each_argument(PyObject* unpack_hook, VisitTensor visit) {
  THPObjectPtr frame = frame_of(unpack_hook);
  if (!frame) {
    return;
  }
  THPObjectPtr arguments(PyObject_GetAttrString(frame, "saved_args"));
  PyErr_Clear();
  for (Py_ssize_t i = 0;
       arguments && PyList_Check(arguments.get()) && i < PyList_GET_SIZE(arguments.get()); ++i) {
    const pybind11::handle item(PyList_GET_ITEM(arguments.get(), i));
    if (pybind11::isinstance<SavedVariable>(item)) {
      visit_argument(*pybind11::cast<SavedVariable*>(item), nullptr, visit);
    }
  }
  THPObjectPtr saver(PyObject_GetAttrString(frame, "input_saver"));
  PyErr_Clear();
  const at::Tensor* saved_by_it = saver ? as_tensor(saver) : nullptr;
  if (const NodePtr node = saved_by_it ? saved_by_it->grad_fn() : nullptr;
      node && is_python_function(*node)) {
    THPObjectPtr context(torch::autograd::functionToPyObject(node));
    if (!context) {
      throw python_error();
    }
    for (const SavedVariable& saved :
         reinterpret_cast<THPFunction*>(context.get())->saved_variables) {
      visit_argument(saved, node, visit);
    }
  }
  THPObjectPtr recompute(PyObject_GetAttrString(frame, "recompute_fn"));
  PyErr_Clear();
  if (recompute) {
    visit_closure(recompute, visit);
  }
}

bool is_reentrant_checkpoint(Node& node) {
  THPObjectPtr context(torch::autograd::functionToPyObject(ref_of(node)));
  THPObjectPtr function(context ? PyObject_GetAttrString(context, "_forward_cls") : nullptr);
  THPObjectPtr module(PyImport_ImportModule("torch.utils.checkpoint"));
  THPObjectPtr reentrant(module ? PyObject_GetAttrString(module, "CheckpointFunction") : nullptr);
  PyErr_Clear();
  return function && function.get() == reentrant.get();
}

bool in_graph_exec_group() {
  THPObjectPtr module(PyImport_ImportModule("torch._C"));
  THPObjectPtr group(module ? PyObject_CallMethod(module, "_get_graph_exec_group", nullptr)
                            : nullptr);
  PyErr_Clear();  // a torch that has none
  return group && group.get() != Py_None;
}

int ask(PyObject* function, const at::Tensor& parameter) {
  THPObjectPtr wrapped(THPVariable_Wrap(parameter));
  THPObjectPtr answer(wrapped ? PyObject_CallFunctionObjArgs(function, wrapped.get(), nullptr)
                              : nullptr);
  const long number = answer ? PyLong_AsLong(answer) : -1;
  if (number == -1 && PyErr_Occurred()) {
    throw python_error();
  }
  return static_cast<int>(number);
}

at::Tensor Packed::unpack() const {
  const AcquireGil gil;
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  THPObjectPtr tensor(
      PyObject_CallFunctionObjArgs(unpack_hook.ptr(interpreter), data.ptr(interpreter), nullptr));
  if (!tensor) {
    throw python_error();
  }
  TORCH_CHECK_TYPE(THPVariable_Check(tensor.get()), "a saved tensor's unpack hook returned a ",
                   Py_TYPE(tensor.get())->tp_name, "; expected a tensor");
  return THPVariable_Unpack(tensor.get()).detach();
}

std::string describe(const at::Tensor& tensor) {
  if (tensor.is_nested() && !is_subclass(tensor)) {
    return "a nested tensor";
  }
  return describe(tensor.scalar_type(), tensor.sym_sizes(), tensor.device());
}

std::string describe(const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  if (metadata.is_cpp_nested_tensor()) {
    return "a nested tensor";
  }
  return describe(c10::typeMetaToScalarType(metadata.dtype()), metadata.shape_as_dim_vector(),
                  metadata.device());
}

bool fits(const at::Tensor& grad, const Edge& edge) {
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  return metadata.is_cpp_nested_tensor() == (grad.is_nested() && !is_subclass(grad)) &&
         metadata.is_same_shape(grad) && grad.dtype() == metadata.dtype() &&
         grad.device() == metadata.device();
}

}  // namespace zbp
