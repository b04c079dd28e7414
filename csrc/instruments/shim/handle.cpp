#include "instruments/shim/handle.h"

#include <unordered_map>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>

#include "instruments/shim/zbp_tap.h"
#include "shim/engine/stand_in.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace zbp {

namespace {

PyTypeObject* handle_type = nullptr;  // of the one module that there is
std::array<int, 2> opcodes{};         // that set and that delete an attribute

/// The handle of each thing that has one. Never destroyed: handles may outlive static objects.
std::unordered_map<const void*, Handle*>& handles() {
  static auto* const all = new std::unordered_map<const void*, Handle*>;
  return *all;
}

/// An owning reference; null for what is dying.
template <class Object, class Null>
void lock(c10::intrusive_ptr<Object, Null>& ref, const Object* object) {
  auto weak = c10::weak_intrusive_ptr<Object, Null>::reclaim(const_cast<Object*>(object));
  ref = weak.lock();
  weak.release();
}

TensorRef owned(const c10::TensorImpl* tensor) {
  TensorRef ref;
  lock(ref, tensor);
  return ref;
}

StorageRef owned(const c10::StorageImpl* storage) {
  StorageRef ref;
  lock(ref, storage);
  return ref;
}

NodePtr owned(const Node* node) {
  return lock_node(*const_cast<Node*>(node));
}

template <class Object>
THPObjectPtr find_or_make(const Object* object) {
  if (const auto known = handles().find(object); known != handles().end()) {
    return THPObjectPtr(Py_NewRef(reinterpret_cast<PyObject*>(known->second)));
  }
  auto ref = owned(object);
  if (!ref) {
    return THPObjectPtr();
  }
  THPObjectPtr made = checked(handle_type->tp_alloc(handle_type, 0));
  auto* const handle = reinterpret_cast<Handle*>(made.get());
  new (&handle->thing) decltype(handle->thing)(std::move(ref));
  handles().emplace(object, handle);
  return made;
}

Handle& handle_in(PyObject* self) {
  return *reinterpret_cast<Handle*>(self);
}

void dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  handles().erase(handle_in(self).address());
  std::destroy_at(&handle_in(self).thing);
  type->tp_free(self);
  Py_DECREF(type);
}

/// The Python object of a handle's thing, if it has one that does not have to be made; new or null.
PyObject* object_of(const Handle& handle) {
  if (const auto* tensor = handle.tensor()) {
    return Py_XNewRef(tensor->pyobj_slot()->load_pyobj());
  }
  if (const auto* storage = handle.storage()) {
    return Py_XNewRef(storage->pyobj_slot()->load_pyobj());
  }
  Node& node = *handle.node();
  PyObject* const object = python_object_of(node);
  if (!object && is_python_function(node)) {  // torch 2.11 does not note it
    return torch::autograd::functionToPyObject(ref_of(node));
  }
  return Py_XNewRef(object);
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

/// Runs `body` for an attribute of a handle.
template <class Body>
PyObject* attribute(PyObject* self, const Body& body) {
  return answer_of([&] { return body(handle_in(self)); });
}

PyObject* get_kind(PyObject* self, void* /*closure*/) {
  const char* const names[] = {"tensor", "storage", "node"};
  return PyUnicode_InternFromString(names[handle_in(self).thing.index()]);
}

PyObject* get_address(PyObject* self, void* /*closure*/) {
  return PyLong_FromVoidPtr(const_cast<void*>(handle_in(self).address()));
}

PyObject* get_object(PyObject* self, void* /*closure*/) {
  return attribute(self, [](const Handle& handle) {
    PyObject* const object = object_of(handle);
    return object ? object : Py_NewRef(Py_None);
  });
}

PyObject* get_name(PyObject* self, void* /*closure*/) {
  return attribute(self, [](const Handle& handle) {
    const auto* const tensor = handle.tensor();
    const auto* const node = handle.node();
    const std::string name = tensor ? describe_briefly(*tensor) : node ? node->name() : "";
    return PyUnicode_FromString(name.c_str());
  });
}

PyObject* get_sequence(PyObject* self, void* /*closure*/) {
  return attribute(self, [](const Handle& handle) {
    const auto* const node = handle.node();
    return node ? PyLong_FromUnsignedLongLong(node->sequence_nr()) : Py_NewRef(Py_None);
  });
}

PyObject* get_counts(PyObject* self, void* /*closure*/) {
  return attribute(self, [](const Handle& handle) {
    const size_t native =
        std::visit([](const auto& ref) { return static_cast<size_t>(ref.use_count()); },
                   handle.thing) -
        1;
    Node* const node = handle.node();
    const bool native_owns = NODES_KEEP_PYTHON_OBJECTS || !node || is_python_function(*node);
    const bool python_owns = NODES_KEEP_PYTHON_OBJECTS || !node || !native_owns;
    PyObject* const object = node ? python_object_of(*node) : THPObjectPtr(object_of(handle)).get();
    return Py_BuildValue("(nnii)", static_cast<Py_ssize_t>(native), object ? Py_REFCNT(object) : 0,
                         object && python_owns, object && native_owns);
  });
}

PyObject* get_storage(PyObject* self, void* /*closure*/) {
  return attribute(self, [](const Handle& handle) {
    const auto* const tensor = handle.tensor();
    const auto* const storage = tensor ? storage_in(*tensor) : nullptr;
    PyObject* const found = storage ? handle_of(storage).release() : nullptr;
    return found ? found : Py_NewRef(Py_None);
  });
}

PyObject* get_facts(PyObject* self, void* /*closure*/) {
  return attribute(self, [](const Handle& handle) -> PyObject* {
    const auto* const tensor = handle.tensor();
    if (!tensor) {
      return Py_NewRef(Py_None);
    }
    const bool is_plain = has_plain_shape(*tensor);
    const int64_t count = is_plain ? tensor->sym_numel().maybe_as_int().value_or(0) : 0;
    const int64_t bytes = count * static_cast<int64_t>(tensor->itemsize());
    return Py_BuildValue(
        "(NOL)", wrap_sizes(is_plain ? tensor->sym_sizes() : c10::SymIntArrayRef()),
        reinterpret_cast<PyObject*>(dtype_of(*tensor)), static_cast<long long>(bytes));
  });
}

PyObject* get_memory(PyObject* self, void* /*closure*/) {
  return attribute(self, [](const Handle& handle) {
    auto* const storage = handle.storage();
    return storage ? memory_of(*storage) : Py_NewRef(Py_None);
  });
}

PyObject* wrap(PyObject* self, PyObject* /*ignored*/) {
  return attribute(self, [](const Handle& handle) {
    const TensorRef* const tensor = std::get_if<TensorRef>(&handle.thing);
    return tensor ? THPVariable_Wrap(at::Tensor(*tensor)) : Py_NewRef(Py_None);
  });
}

PyGetSetDef attributes[] = {
    {"kind", get_kind, nullptr, "\"tensor\", \"storage\" or \"node\".", nullptr},
    {"address", get_address, nullptr, "Of libtorch's object.", nullptr},
    {"object", get_object, nullptr, "The Python object that stands for it, or None.", nullptr},
    {"name", get_name, nullptr, "As \"float32 [2, 3]\"; a node's name; \"\" for a storage.",
     nullptr},
    {"sequence", get_sequence, nullptr,
     "A node's number: greater for those that a thread has made later, greatest for those that "
     "accumulate gradients; else None.",
     nullptr},
    {"counts", get_counts, nullptr,
     "(native, python, python owns native, native owns python): references to libtorch's object, "
     "without the handle's, and to the Python object.",
     nullptr},
    {"storage", get_storage, nullptr, "A tensor's, as a handle, or None.", nullptr},
    {"facts", get_facts, nullptr,
     "A tensor's (shape, dtype, bytes that it uses, 0 where unknown), else None.", nullptr},
    {"memory", get_memory, nullptr,
     "A storage's (address, bytes, device, is foreign), else None. Foreign is memory that is not "
     "the CPU allocator's, which the tap knows or is older than it; not meta's.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef methods[] = {
    {"wrap", wrap, METH_NOARGS, "wrap()\n--\n\nA tensor's Python object, made if there is none."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("Owns a tensor, storage or node without "
                                                     "standing for it.")},
                       {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                       {Py_tp_getset, attributes},
                       {Py_tp_methods, methods},
                       {0, nullptr}};

PyType_Spec spec = {
    "zbpipe._C.Handle", sizeof(Handle), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, slots};

PyObject* handle_of_object(PyObject* /*module*/, PyObject* object) {
  return answer_of([&] {
    THPObjectPtr found;
    if (const auto* tensor = tensor_in(object)) {
      found = handle_of(tensor);
    } else if (const auto* storage = storage_in(object)) {
      found = handle_of(storage);
    } else if (is_one(object, &THPFunctionType)) {
      if (const auto node = lock_py_node(reinterpret_cast<THPFunction*>(object)->cdata)) {
        found = handle_of(&original_of(*node));
      }
    } else if (torch::autograd::THPCppFunction_Check(object)) {
      if (const auto& node = reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata) {
        found = handle_of(node.get());
      }
    }
    return found ? found.release() : Py_NewRef(Py_None);
  });
}

PyMethodDef handle_functions[] = {
    {"handle_of", handle_of_object, METH_O,
     "handle_of(object, /)\n--\n\n"
     "The handle of the tensor, storage or node that an object stands for; None for others."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

const void* Handle::address() const {
  return std::visit([](const auto& ref) -> const void* { return ref.get(); }, thing);
}

c10::TensorImpl* Handle::tensor() const {
  const auto* const ref = std::get_if<TensorRef>(&thing);
  return ref ? ref->get() : nullptr;
}

c10::StorageImpl* Handle::storage() const {
  const auto* const ref = std::get_if<StorageRef>(&thing);
  return ref ? ref->get() : nullptr;
}

Node* Handle::node() const {
  const auto* const ref = std::get_if<NodePtr>(&thing);
  return ref ? ref->get() : nullptr;
}

Handle* as_handle(PyObject* object) {
  return Py_IS_TYPE(object, handle_type) ? reinterpret_cast<Handle*>(object) : nullptr;
}

THPObjectPtr handle_of(const c10::TensorImpl* tensor) {
  return find_or_make(tensor);
}

THPObjectPtr handle_of(const c10::StorageImpl* storage) {
  return find_or_make(storage);
}

THPObjectPtr handle_of(const Node* node) {
  return find_or_make(node);
}

bool is_owned(const void* address) {
  return handles().count(address) != 0;
}

const std::array<int, 2>& attribute_opcodes() {
  return opcodes;
}

PyObject* memory_of(c10::StorageImpl& storage) {
  const void* const data = storage._mutable_data_ptr_no_checks().get();
  // Memory of the CPU allocator that the tap does not know is older than the tap: a storage that
  // came to be seen. But one that Python made goes past the tap (torch.UntypedStorage(n), and so
  // copy.deepcopy, torch.load), and has an object of Python's: an old one is watched.
  const bool is_the_taps = storage.device_type() == c10::kCPU &&
                           zbp_tap_feeds(storage.allocator()) &&
                           storage.pyobj_slot()->load_pyobj() == nullptr;
  const bool is_meta = storage.device_type() == c10::kMeta;
  const bool has_memory = data || is_meta;  // else it was given up: release.cpp
  const int64_t bytes = has_memory ? storage.sym_nbytes().maybe_as_int().value_or(0) : 0;
  return Py_BuildValue("(NLsN)", PyLong_FromVoidPtr(const_cast<void*>(data)),
                       static_cast<long long>(bytes), storage.device().str().c_str(),
                       PyBool_FromLong(!is_meta && !is_the_taps));
}

}  // namespace zbp

using namespace zbp;

int zbp_add_handle(PyObject* module) {
  THPObjectPtr opcode(PyImport_ImportModule("opcode"));
  THPObjectPtr numbers(opcode ? PyObject_GetAttrString(opcode, "opmap") : nullptr);
  const char* const names[] = {"STORE_ATTR", "DELETE_ATTR"};
  for (size_t i = 0; i < opcodes.size(); ++i) {
    THPObjectPtr number(numbers ? PyMapping_GetItemString(numbers, names[i]) : nullptr);
    if (!number) {
      return -1;
    }
    opcodes[i] = static_cast<int>(PyLong_AsLong(number));
  }
  handle_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return !handle_type || PyModule_AddFunctions(module, handle_functions) < 0
             ? -1
             : PyModule_AddObjectRef(module, "Handle", reinterpret_cast<PyObject*>(handle_type));
}
