#include "shim/group/zbp_describe.h"

#include <algorithm>
#include <set>
#include <unordered_map>

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/object_ptr.h>

#include "shim/group/dtensor.h"
#include "shim/group/facts.h"
#include "shim/group/saved.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

using namespace zbp;
namespace impl = torch::autograd::impl;

namespace {

/// Has the group's book while it lives: making Python objects may run other Python code, and that a
/// W.
class Claim {
 public:
  explicit Claim(zbp_group& group) : book_(group.book) {
    if (!zbp_book_claim(&book_)) {
      refuse(PyExc_RuntimeError,
             "what a parameter group holds cannot be listed while its weight pass runs; wait for "
             "stage_backward_weight to return");
    }
  }
  ~Claim() { zbp_book_give_back(&book_); }
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

 private:
  zbp_book& book_;
};

/// The weights behind some faces and nodes outside the closure. Costs what it meets.
class Behind {
 public:
  explicit Behind(const zbp_layout& layout) : layout_(layout) {}

  void add(int32_t weight, int32_t outside) {
    meet(weight, outside);
    while (!pending_.empty()) {
      const uint32_t node = pending_.back();
      pending_.pop_back();
      for (uint32_t h = zbp_layout_first_hop(&layout_, node);
           h < layout_.hop_count && layout_.hop[h].outside == node; ++h) {
        meet(layout_.hop[h].to_weight, layout_.hop[h].to_outside);
      }
    }
  }
  void add(const zbp_face& face) { add(face.weight, face.outside); }

  std::set<int32_t> weights;

 private:
  void meet(int32_t weight, int32_t outside) {
    if (weight >= 0) {
      weights.insert(weight);
    } else if (met_.insert(outside).second) {
      pending_.push_back(static_cast<uint32_t>(outside));
    }
  }

  const zbp_layout& layout_;
  std::set<int32_t> met_;
  std::vector<uint32_t> pending_;
};

PyObject* weights_of(const Group& group) {
  variable_list weights;
  for (const Weight& weight : group.weights) {
    weights.push_back(weight.accumulator->variable);
  }
  return wrap_tensors(weights);
}

class Description {
 public:
  explicit Description(Group& group)
      : group_(group),
        layout_(group.layout),
        weights_(weights_of(group)),
        list_(checked(PyList_New(0))) {}

  PyObject* list_all() {
    for (const Task& task : group_.tasks) {
      add_task(task);
    }
    for (uint32_t o = 0; o < group_.outside.size(); ++o) {
      add_outside(*group_.outside[o].node, static_cast<int32_t>(o));
    }
    for (uint32_t w = 0; w < group_.weights.size(); ++w) {
      if (group_.weights[w].grad.defined()) {
        begin(Py_NewRef(Py_None), "waiting", "", false, PyList_New(0));
        Behind behind(layout_);
        behind.weights.insert(static_cast<int32_t>(w));
        add_tensor("waiting gradient", group_.weights[w].grad, behind);
      }
    }
    return list_.release();
  }

 private:
  /// Steals name and faces.
  void begin(PyObject* name, const char* kind, const char* why, bool is_packed, PyObject* faces) {
    tensors_ = PyList_New(0);
    append(list_,
           Py_BuildValue("NssNNN", name, kind, why, PyBool_FromLong(is_packed), faces, tensors_));
  }

  /// To the last task.
  void add_tensor(const char* role, const at::Tensor& tensor, const Behind& behind) {
    if (!tensor.defined()) {
      return;
    }
    const at::Tensor held = local_part(tensor);
    append(tensors_,
           Py_BuildValue("sNnNONN", role, PyLong_FromVoidPtr(const_cast<void*>(storage_of(held))),
                         static_cast<Py_ssize_t>(bytes_of(held)), shape_of(tensor),
                         torch::getTHPDtype(tensor.scalar_type()), THPDevice_New(tensor.device()),
                         wrap(behind)));
  }

  /// `serves`: whether the gradient at a face of the task is computed from the tensor.
  template <class Serves>
  void add_tensor(const Task& task, const char* role, const at::Tensor& tensor,
                  const Serves& serves) {
    Behind behind(layout_);
    for (size_t f = 0; f < task.face.size(); ++f) {
      if (serves(f)) {
        behind.add(task.plan(f));
      }
    }
    add_tensor(role, tensor, behind);
  }

  static const char* name_of(Role role, const Task& task, const at::Tensor& tensor) {
    switch (role) {
      case Role::matrix:
        return "matrix";
      case Role::saved:
      case Role::saved_for_work:
        return "saved";
      default:
        if (role == Role::output_grad || task.kind() == ZBP_TASK_ROOT) {
          return "output gradient";
        }
        return tensor.defined() && tensor.dim() > 1 ? "kept gradient" : "light gradient";
    }
  }

  void add_task(const Task& task) {
    const char* const kind =
        works_of(task).empty() ? zbp_kind_name(task.plan().kind) : "handed over";
    begin(wrap_text(task.name()), kind, zbp_why_name(task.plan().why), task.plan().leaves_packed,
          list_faces(task));
    for_each_kept(task, [&](const Kept& kept, Role role, const auto& serves) {
      add_tensor(task, name_of(role, task, kept.tensor()), kept.tensor(), serves);
    });
  }

  void add_outside(Node& node, int32_t number) {
    if (saves_nothing(node)) {
      return;
    }
    bool is_packed = false;
    variable_list saved;
    for_each_saved_outside(node, [&](const SavedVariable& one) {
      is_packed |= one.has_hooks();
      saved.push_back(one.get_raw_data().value_or(at::Tensor()));
    });
    begin(wrap_text(node.name()), "outside", "", is_packed, PyList_New(0));
    Behind behind(layout_);
    behind.add(-1, number);
    for (const at::Tensor& tensor : saved) {
      add_tensor("saved", tensor, behind);
    }
  }

  PyObject* list_faces(const Task& task) const {
    THPObjectPtr faces = checked(PyList_New(0));
    for (size_t f = 0; f < task.face.size(); ++f) {
      const Edge& edge = task.face[f].edge;
      const auto& metadata = edge.function->input_metadata(edge.input_nr);
      Behind behind(layout_);
      behind.add(task.plan(f));
      append(faces,
             Py_BuildValue("INNN", static_cast<unsigned int>(task.plan(f).slot),
                           metadata.is_nested_tensor() ? PyTuple_New(0)
                                                       : wrap_sizes(metadata.shape_as_dim_vector()),
                           what_runs(edge, task.plan(f)), wrap(behind)));
    }
    return faces.release();
  }

  /// What makes W go through the engine to get from the face to its weight; None if it need not.
  static PyObject* what_runs(const Edge& edge, const zbp_face& plan) {
    switch (plan.obstacle) {
      case ZBP_OBSTACLE_NONE:
        return Py_NewRef(Py_None);
      case ZBP_OBSTACLE_CAST:
        return wrap_text("it is cast twice on its way");
      case ZBP_OBSTACLE_SUM:
        return wrap_text("several gradients meet before its cast");
      default: {
        Node& node = *path_behind(edge, plan.steps + size_t{1}).back();
        return wrap_text((has_hooks(node) ? "a hook watches " : "it is computed by ") +
                         node.name());
      }
    }
  }

  static PyObject* shape_of(const at::Tensor& tensor) {
    return tensor.is_nested() ? PyTuple_New(0) : wrap_sizes(tensor.sym_sizes());
  }

  PyObject* wrap(const Behind& behind) const {
    THPObjectPtr list = checked(PyList_New(0));
    for (const int32_t weight : behind.weights) {
      append(list, Py_NewRef(PyTuple_GET_ITEM(weights_.get(), weight)));
    }
    return list.release();
  }

  const Group& group_;
  const zbp_layout& layout_;
  THPObjectPtr weights_;
  THPObjectPtr list_;
  PyObject* tensors_ = nullptr;  // of the last task, which owns it
};

bool reads_weights(const Task& task) {
  const auto works = works_of(task);
  return task.kind() == ZBP_TASK_DEFERRED || task.plan().leaves_packed ||
         std::any_of(works.begin(), works.end(),
                     [](const Work& work) { return work.call && !work.call->parameters.empty(); });
}

/// True if nobody else has the nodes between the group's tasks and its weights: neither another
/// microbatch nor the caller.
bool has_outside_alone(const Group& group) {
  std::unordered_map<const Node*, size_t> references;
  const auto count_edges = [&references](Node& node) {
    for (const Edge& edge : node.next_edges()) {
      ++references[edge.function.get()];
    }
  };
  const auto count = [](Node& node) { return static_cast<size_t>(ref_of(node).use_count() - 1); };
  for (const Task& task : group.tasks) {
    for (const Face& face : task.face) {
      ++references[face.edge.function.get()];
    }
    if (task.kind() == ZBP_TASK_ROOT) {
      ++references[task.node.get()];
    } else if (task.node) {
      if (count(*task.node) > 1) {
        return false;
      }
      count_edges(*task.node);
    }
  }
  for (const Outside& outside : group.outside) {
    count_edges(*outside.node);
  }
  return std::all_of(group.outside.begin(), group.outside.end(), [&](const Outside& outside) {
    return count(*outside.node) == references[outside.node];
  });
}

/// While another owner has the group (an I, a W), what it holds is no business of the collector's.
bool is_the_collectors(const zbp_group* group) {
  return !zbp_book_is_claimed(&group->book) && group_of(group).owned.use_count() == 1;
}

}  // namespace

void zbp_group_free(zbp_group* group) {
  if (group) {
    const GroupPtr last = std::move(group_of(group).owned);
  }
}

int zbp_group_traverse(const zbp_group* group, visitproc visit, void* arg) {
  if (!is_the_collectors(group)) {
    return 0;
  }
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  const auto visit_all = [&](const auto& one, const auto& other) -> int {
    Py_VISIT(one.ptr(interpreter));
    Py_VISIT(other.ptr(interpreter));
    return 0;
  };
  int stop = 0;
  for (const Task& task : group_of(group).tasks) {
    for (const Work& work : works_of(task)) {
      stop = stop || !work.call ? stop : visit_all(work.call->function, work.call->arguments);
    }
    for_each_packed(task,
                    [&](const Packed& packed) {  // the node that shares it is the task's alone
                      stop = stop ? stop : visit_all(packed.unpack_hook, packed.data);
                    });
  }
  const auto& outside = group_of(group).packed_outside;
  if (!outside.empty() && has_outside_alone(group_of(group))) {
    for (const PackedPtr& packed : outside) {
      stop = stop ? stop : visit_all(packed->unpack_hook, packed->data);
    }
  }
  return stop;
}

void zbp_group_clear(zbp_group* group) {
  if (is_the_collectors(group)) {
    zbp_book_close(&group->book);
    group_of(group).release();  // which reads the layout
    zbp_layout_fini(&group->layout);
  }
}

// A W that runs without the GIL changes the group: nothing of it may be looked at meanwhile.
int zbp_group_bytes_held(const zbp_group* group, size_t* out, zbp_error* error) {
  return guarded(error, [&] {
    *out = 0;
    std::set<const void*> seen;
    if (zbp_book_is_claimed(&group->book)) {
      return;
    }
    for (const Task& task : group_of(group).tasks) {
      for_each_kept(task, [&](const Kept& kept, auto&&...) {
        if (seen.insert(storage_of(kept.tensor())).second) {
          *out += bytes_of(kept.tensor());
        }
      });
    }
  });
}

PyObject* zbp_group_weights(zbp_group* group, zbp_error* error) {
  return guarded_object(error, [&] {
    const Claim claim(*group);
    return weights_of(group_of(group));
  });
}

PyObject* zbp_group_describe(zbp_group* group, zbp_error* error) {
  return guarded_object(error, [&] {
    const Claim claim(*group);
    return Description(group_of(group)).list_all();
  });
}

PyObject* zbp_group_reads_weights(const zbp_group* handle, zbp_error* error) {
  return guarded_object(error, [&] {
    const Group& group = group_of(handle);
    return PyBool_FromLong(
        !zbp_book_is_claimed(&group.book) &&
        (std::any_of(group.tasks.begin(), group.tasks.end(), reads_weights) ||
         std::any_of(group.outside.begin(), group.outside.end(),
                     [](const Outside& outside) { return !has_saved_nothing(*outside.node); })));
  });
}

PyObject* zbp_is_watched(PyObject* object, zbp_error* error) {
  return guarded_object(error, [&] {
    const at::Tensor* tensor = as_tensor(object);
    TORCH_CHECK_TYPE(tensor, "tensor is a ", type_name(object), "; expected a tensor");
    const NodePtr accumulator =
        tensor->is_leaf() ? impl::try_get_grad_accumulator(*tensor) : NodePtr();
    return PyBool_FromLong(!impl::hooks(*tensor).empty() ||
                           impl::post_acc_grad_hooks(*tensor) != nullptr ||
                           (accumulator && has_hooks(*accumulator)));
  });
}
