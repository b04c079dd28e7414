#include "shim/explain/zbp_account.h"

#include <algorithm>

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/explain/reach.h"
#include "shim/pass/dtensor.h"
#include "shim/pass/kinds.h"
#include "shim/pass/path.h"
#include "shim/torch/python.h"

namespace {

using namespace zbp;

bool is_among(const Watched& watched, c10::ArrayRef<Watched> list) {
  return !list.empty() && &watched >= list.begin() && &watched < list.end();
}

const char* role_of(const Watched& watched, const Task& task) {
  if (&watched == &task.other) {
    return "matrix";
  }
  if (is_among(watched, task.output_grads)) {
    return "output gradient";
  }
  const auto is_computed = [&](const Work& work) { return is_among(watched, work.grads); };
  if (is_among(watched, task.kept) ||
      std::any_of(task.works.begin(), task.works.end(), is_computed)) {
    return watched.tensor().dim() > 1 ? "kept gradient" : "light gradient";
  }
  return "saved";
}

/// Tuple of ints, -1 for a size that is not known as a number; empty for a nested tensor.
PyObject* shape_of(const at::Tensor& tensor) {
  THPObjectPtr list = new_list();
  if (!tensor.is_nested()) {
    for (const c10::SymInt& size : tensor.sym_sizes()) {
      append(list, PyLong_FromLongLong(size.maybe_as_int().value_or(-1)));
    }
  }
  return PyList_AsTuple(list);
}

PyObject* wrap_weights(const std::vector<const Weight*>& weights) {
  THPObjectPtr list = new_list();
  for (const Weight* weight : weights) {
    append(list, THPVariable_Wrap(weight->accumulator->variable));
  }
  return list.release();
}

void append_tensor(PyObject* list, const char* role, const at::Tensor& tensor,
                   const std::vector<const Weight*>& weights) {
  const at::Tensor held = local_part(tensor);
  const void* storage = storage_of(held);
  THPObjectPtr shape(shape_of(tensor));
  THPObjectPtr device(THPDevice_New(tensor.device()));
  THPObjectPtr wrapped(wrap_weights(weights));
  if (!shape || !device) {
    throw python_error();
  }
  append(list, Py_BuildValue("sNnOOOO", role, PyLong_FromVoidPtr(const_cast<void*>(storage)),
                             static_cast<Py_ssize_t>(bytes_of(held)), shape.get(),
                             reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())),
                             device.get(), wrapped.get()));
}

bool is_of(const Watched& watched, const Work& work) {
  return is_among(watched, work.grads) || (work.call && is_among(watched, work.call->saved));
}

/// Whether the gradient that the task gives at face number `f` is computed from the tensor.
bool serves(const Watched& watched, const Task& task, size_t f) {
  for (const Work& work : task.works) {
    if (is_of(watched, work)) {
      return std::find(work.faces.begin(), work.faces.end(), static_cast<int32_t>(f)) !=
             work.faces.end();
    }
  }
  if (is_among(watched, task.kept)) {
    return &watched == &task.kept[f];
  }
  return &watched != &task.other || task.plan(f).slot == task.matrix_slot;
}

/// The weights whose gradients are computed from the tensor.
std::vector<const Weight*> weights_of(const Watched& watched, const Task& task, Reach& reach) {
  reach.begin();
  for (size_t f = 0; f < task.face.size(); ++f) {
    if (serves(watched, task, f)) {
      reach.add(task, f);
    }
  }
  return reach.weights();
}

PyObject* account_of(const Task& task, Reach& reach) {
  THPObjectPtr tensors = new_list();
  for_each_watched(task, [&](const Watched& watched) {
    if (watched.tensor().defined()) {
      append_tensor(tensors, role_of(watched, task), watched.tensor(),
                    weights_of(watched, task, reach));
    }
  });
  return Py_BuildValue("zsO", task.node ? task.node->name().c_str() : nullptr,
                       task.works.empty() ? name_of(task.kind()) : "handed over", tensors.get());
}

/// What a W that raised has computed for `weight` and could not add.
PyObject* account_of_waiting(const Weight& weight) {
  THPObjectPtr tensors = new_list();
  append_tensor(tensors, "waiting gradient", weight.grad, {&weight});
  return Py_BuildValue("zsO", nullptr, "waiting", tensors.get());
}

bool reads_weights(const Task& task) {
  const auto takes_parameters = [](const Work& work) {
    return work.call && !work.call->parameters.empty();
  };
  return task.kind() == Kind::deferred || task.packed || task.plan().leaves_packed ||
         std::any_of(task.works.begin(), task.works.end(), takes_parameters);
}

}  // namespace

PyObject* zbp_group_account(const zbp_group* handle) {
  PyObject* result = nullptr;
  const int status = guarded([&] {
    if (zbp_book_is_claimed(&handle->group->book)) {
      refuse(PyExc_RuntimeError,
             "what a parameter group holds cannot be listed while its weight pass runs; wait for "
             "stage_backward_weight to return");
    }
    THPObjectPtr list = new_list();
    const Group& group = *handle->group;
    Reach reach(group);
    for (const Task& task : group.tasks) {
      append(list, account_of(task, reach));
    }
    for (const Weight& weight : group.weights) {
      if (weight.grad.defined()) {
        append(list, account_of_waiting(weight));
      }
    }
    result = list.release();
  });
  return status == ZBP_OK ? result : nullptr;
}

int zbp_group_reads_weights(const zbp_group* handle, int* out) {
  return guarded([&] {
    const Group& group = *handle->group;
    const auto has_saved = [](const Outside& outside) {
      return !saves_nothing(*outside.node) && !saved_nothing(*outside.node);
    };
    *out = std::any_of(group.tasks.begin(), group.tasks.end(),
                       [](const Task& task) { return reads_weights(task); }) ||
           std::any_of(group.outside.begin(), group.outside.end(), has_saved);
  });
}
