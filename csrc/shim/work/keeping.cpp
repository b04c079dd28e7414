#include "shim/work/keeping.h"

#include <utility>

#include <ATen/autocast_mode.h>
#include <torch/csrc/PyInterpreter.h>

#include "shim/pass/kinds.h"
#include "shim/work/work_arguments.h"

namespace zbp {

namespace {

std::vector<Autocast> autocast_here() {
  std::vector<Autocast> there;
  for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (at::autocast::is_autocast_enabled(device)) {
      there.push_back({device, at::autocast::get_autocast_dtype(device)});
    }
  }
  return there;
}

}  // namespace

void keep_work(Group& group, Task& task, PyObject* function, PyObject* saved,
               SmallVector<int32_t, 2> faces, bool is_single) {
  WorkArguments held(group);
  THPObjectPtr arguments = held.take(saved);
  Work& work = task.works.emplace_back();
  work.call = std::make_unique<const Work::Call>(
      Work::Call{c10::SafePyObject(Py_NewRef(function), getPyInterpreter()),
                 c10::SafePyObject(arguments.release(), getPyInterpreter()),
                 std::move(held.tensors), std::move(held.parameters), autocast_here(), is_single});
  work.faces = std::move(faces);
  task.can_run_again = false;
  task.plan().has_work = true;
}

SmallVector<bool, 4> matrix_faces(const Task& task) {
  SmallVector<bool, 4> faces;
  for (const Face& face : task.face) {
    faces.push_back(is_matrix(face.edge));
  }
  return faces;
}

}  // namespace zbp
