#include "shim/pass/zbp_describe.h"

#include <algorithm>
#include <mutex>

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/pass/dtensor.h"
#include "shim/pass/kinds.h"
#include "shim/pass/path.h"
#include "shim/pass/saved.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

using namespace zbp;
namespace impl = torch::autograd::impl;

namespace {

using torch::autograd::SavedVariable;

const Face& face_in(zbp_group* handle, uint32_t f) {
  const Group& group = group_of(handle);
  const Task& task = group.tasks[group.layout.face[f].task];
  return task.face[f - task.plan().face_begin];
}

/// Tells one visitor of tensors, with what is the same for several of them.
class Telling {
 public:
  Telling(zbp_tensor_visit visit, void* arg) : visit_(visit), arg_(arg) {}

  void tell(uint8_t part, const at::Tensor& tensor, uint32_t place = 0,
            c10::ArrayRef<int32_t> faces = {}) const {
    if (!tensor.defined()) {
      return;
    }
    const at::Tensor held = local_part(tensor);
    THPObjectPtr shape(tensor.is_nested() ? PyTuple_New(0) : wrap_sizes(tensor.sym_sizes()));
    THPObjectPtr device(THPDevice_New(tensor.device()));
    if (!shape || !device) {
      throw python_error();
    }
    const zbp_held_tensor told{
        part,
        place,
        faces.data(),
        faces.size(),
        tensor.dim(),
        storage_of(held),
        bytes_of(held),
        shape.get(),
        reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())),
        device.get()};
    if (visit_(arg_, &told) < 0) {
      throw python_error();
    }
  }
  void tell(uint8_t part, c10::ArrayRef<Watched> list, c10::ArrayRef<int32_t> faces = {}) const {
    for (size_t i = 0; i < list.size(); ++i) {
      tell(part, list[i].tensor(), static_cast<uint32_t>(i), faces);
    }
  }

 private:
  zbp_tensor_visit visit_;
  void* arg_;
};

bool reads_weights(const Task& task) {
  const auto takes_parameters = [](const Work& work) {
    return work.call && !work.call->parameters.empty();
  };
  return task.kind() == Kind::deferred || !task.packed.empty() || task.plan().leaves_packed ||
         std::any_of(task.works.begin(), task.works.end(), takes_parameters);
}

/// Nothing while a thread runs the node.
void for_each_saved(Node& node, c10::function_ref<void(const SavedVariable&)> visit) {
  const auto all = saved_by(*saver_of(node));
  if (const std::unique_lock<std::mutex> lock(NodeParts::mutex_of(node), std::try_to_lock); lock) {
    for (const SavedVariable* one : all) {
      visit(*one);
    }
  }
}

}  // namespace

int zbp_group_state(const zbp_group* group) {
  if (zbp_book_is_claimed(&group->book)) {
    return ZBP_GROUP_RUNNING;
  }
  return zbp_book_is_complete(&group->book) ? ZBP_GROUP_SPENT : ZBP_GROUP_READY;
}

void zbp_group_free(zbp_group* group) {
  if (group) {
    const GroupPtr last = std::move(group_of(group).owned);
  }
}

// A W that runs without the GIL changes the group: nothing of it may be looked at meanwhile.
int zbp_group_bytes_held(const zbp_group* group, size_t* out, zbp_error* error) {
  return guarded(
      error, [&] { *out = zbp_book_is_claimed(&group->book) ? 0 : group_of(group).bytes_held(); });
}

PyObject* zbp_group_weights(zbp_group* group, zbp_error* error) {
  return guarded_object(error, [&] {
    variable_list weights;
    for (const Weight& weight : group_of(group).weights) {
      weights.push_back(weight.accumulator->variable);
    }
    return wrap_tensors(weights);
  });
}

PyObject* zbp_task_name(zbp_group* group, uint32_t task, zbp_error* error) {
  return guarded_object(error, [&] { return wrap_text(group_of(group).tasks[task].name()); });
}

bool zbp_task_has_work(zbp_group* group, uint32_t task) {
  return !group_of(group).tasks[task].works.empty();
}

PyObject* zbp_face_shape(zbp_group* group, uint32_t face, zbp_error* error) {
  return guarded_object(error, [&] {
    const Edge& edge = face_in(group, face).edge;
    const auto& metadata = edge.function->input_metadata(edge.input_nr);
    return metadata.is_nested_tensor() ? PyTuple_New(0)
                                       : wrap_sizes(metadata.shape_as_dim_vector());
  });
}

PyObject* zbp_face_end(zbp_group* group, uint32_t face, bool* watched_out, zbp_error* error) {
  return guarded_object(error, [&] {
    Node* node = face_in(group, face).edge.function.get();
    for (uint8_t i = 0; i < group_of(group).layout.face[face].steps; ++i) {
      node = node->next_edge(0).function.get();
    }
    *watched_out = has_hooks(*node);
    return wrap_text(node->name());
  });
}

int zbp_task_tensors(zbp_group* group, uint32_t number, zbp_tensor_visit visit, void* arg,
                     zbp_error* error) {
  return guarded(error, [&] {
    const Task& task = group_of(group).tasks[number];
    const Telling to(visit, arg);
    to.tell(ZBP_PART_MATRIX, task.other.tensor(), task.matrix_slot);
    to.tell(ZBP_PART_OUTPUT_GRAD, task.output_grads);
    to.tell(ZBP_PART_KEPT, task.kept);
    to.tell(ZBP_PART_SAVED, task.saved);
    for (const Work& work : task.works) {
      if (work.call) {
        to.tell(ZBP_PART_WORK_SAVED, work.call->saved, work.faces);
      }
      to.tell(ZBP_PART_WORK_GRAD, work.grads, work.faces);
    }
  });
}

int zbp_weight_waiting(zbp_group* group, uint32_t weight, zbp_tensor_visit visit, void* arg,
                       zbp_error* error) {
  return guarded(error, [&] {
    Telling(visit, arg).tell(ZBP_PART_WAITING, group_of(group).weights[weight].grad);
  });
}

PyObject* zbp_outside_name(zbp_group* group, uint32_t outside, bool* packed_out, zbp_error* error) {
  return guarded_object(error, [&] {
    Node& node = *group_of(group).outside[outside].node;
    *packed_out = false;
    for_each_saved(node, [&](const SavedVariable& one) { *packed_out |= one.has_hooks(); });
    return saves_nothing(node) ? Py_NewRef(Py_None) : wrap_text(node.name());
  });
}

int zbp_outside_tensors(zbp_group* group, uint32_t outside, zbp_tensor_visit visit, void* arg,
                        zbp_error* error) {
  return guarded(error, [&] {
    Node& node = *group_of(group).outside[outside].node;
    variable_list saved;
    for_each_saved(node, [&](const SavedVariable& one) {
      saved.push_back(one.get_raw_data().value_or(at::Tensor()));
    });
    for (const at::Tensor& tensor : saved) {
      Telling(visit, arg).tell(ZBP_PART_SAVED, tensor);
    }
  });
}

int zbp_group_reads_weights(const zbp_group* handle, int* out, zbp_error* error) {
  return guarded(error, [&] {
    const Group& group = group_of(handle);
    const auto has_saved = [](const Outside& outside) {
      return !saves_nothing(*outside.node) && !saved_nothing(*outside.node);
    };
    *out = !zbp_book_is_claimed(&group.book) &&
           (std::any_of(group.tasks.begin(), group.tasks.end(),
                        [](const Task& task) { return reads_weights(task); }) ||
            std::any_of(group.outside.begin(), group.outside.end(), has_saved));
  });
}

int zbp_is_watched(PyObject* object, int* out, zbp_error* error) {
  return guarded(error, [&] {
    const at::Tensor* tensor = as_tensor(object);
    TORCH_CHECK_TYPE(tensor, "tensor is a ", Py_TYPE(object)->tp_name, "; expected a tensor");
    const NodePtr accumulator =
        tensor->is_leaf() ? impl::try_get_grad_accumulator(*tensor) : NodePtr();
    *out = !impl::hooks(*tensor).empty() || impl::post_acc_grad_hooks(*tensor) != nullptr ||
           (accumulator && has_hooks(*accumulator));
  });
}
