// What Python objects are to a search for holders, by their types alone: none of their code runs.
#pragma once

#include <Python.h>

#include <cstdint>
#include <unordered_map>

namespace zbp {

enum class Type : uint8_t {
  skipped,
  plain,
  tensor,
  storage,
  cpp_node,
  py_node,
  group,
  work,
  saved,
  array,         // of numpy
  capsule,       // of DLPack, or any other
  script,        // torch._C.ScriptObject
  script_module  // torch.jit.ScriptModule
};

class Types {
 public:
  /// group: ParamGroup; work: torch.distributed's Work, or null; array: numpy's, or null. All outlive this.
  Types(PyTypeObject* group, PyTypeObject* work, PyTypeObject* array);

  Type of(PyObject* object);

 private:
  PyTypeObject* group_;
  PyTypeObject* work_;
  PyTypeObject* array_;
  PyTypeObject*
      saved_;  // of a saved variable that Python holds; null before torch has made one known
  PyTypeObject* script_;
  PyTypeObject* script_module_;
  std::unordered_map<PyTypeObject*, Type> known_;
};

}  // namespace zbp
