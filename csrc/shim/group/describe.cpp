#include "shim/group/zbp_describe.h"

#include <set>

#include <torch/csrc/Device.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/PyInterpreter.h>

#include "shim/group/dtensor.h"
#include "shim/group/facts.h"
#include "shim/group/saved.h"
#include "shim/torch/nodes.h"

using namespace zbp;
namespace impl = torch::autograd::impl;

namespace {

/// Has the group's book while it lives, since other Python code may run meanwhile, and that a W;
/// null if a W has it.
auto claim_if_free(zbp_group& group) {
  zbp_book* const book = zbp_book_claim(&group.book) ? &group.book : nullptr;
  return std::unique_ptr<zbp_book, decltype(&zbp_book_give_back)>(book, zbp_book_give_back);
}

auto claim(zbp_group& group) {
  auto claimed = claim_if_free(group);
  if (!claimed) {
    refuse(PyExc_RuntimeError,
           "what a parameter group holds cannot be listed while its weight pass runs; wait for "
           "stage_backward_weight to return");
  }
  return claimed;
}

THPObjectPtr new_list() {
  return checked(PyList_New(0));
}

void add_tensor(PyObject* list, const char* role, const at::Tensor& tensor, PyObject* ends) {
  const at::Tensor held = local_part(tensor);
  append(list, Py_BuildValue(
                   "sNnNONO", role, PyLong_FromVoidPtr(const_cast<void*>(storage_of(held))),
                   static_cast<Py_ssize_t>(bytes_of(held)),
                   tensor.is_nested() ? PyTuple_New(0) : wrap_sizes(tensor.sym_sizes()),
                   torch::getTHPDtype(tensor.scalar_type()), THPDevice_New(tensor.device()), ends));
}

PyObject* describe_face(const Edge& edge, const zbp_face& plan) {
  static constexpr const char* OBSTACLE[] = {nullptr, "", "it is cast twice on its way",
                                             "several gradients meet before its cast"};
  std::string node_in_between;
  if (plan.obstacle == ZBP_OBSTACLE_NODE) {
    Node& node = *path_behind(edge, plan.steps + size_t{1}).back();
    node_in_between = (has_hooks(node) ? "a hook watches " : "it is computed by ") + node.name();
  }
  const auto& metadata = edge.function->input_metadata(edge.input_nr);
  return Py_BuildValue(
      "INz(ii)", static_cast<unsigned int>(plan.slot),
      metadata.is_nested_tensor() ? PyTuple_New(0) : wrap_sizes(metadata.shape_as_dim_vector()),
      node_in_between.empty() ? OBSTACLE[plan.obstacle] : node_in_between.c_str(), plan.weight,
      plan.outside);
}

PyObject* describe_task(const Task& task) {
  THPObjectPtr faces = new_list(), tensors = new_list();
  for (size_t f = 0; f < task.face.size(); ++f) {
    append(faces, describe_face(task.face[f].edge, task.plan(f)));
  }
  for_each_kept(task, [&](const Kept& kept, Role role, const auto& serves) {
    const at::Tensor& tensor = kept.tensor();
    if (!tensor.defined() || role == Role::view_for_work) {
      return;
    }
    const char* const name = role == Role::matrix                                  ? "matrix"
                             : role == Role::saved || role == Role::saved_for_work ? "saved"
                             : role == Role::output_grad || task.kind() == ZBP_TASK_ROOT
                                 ? "output gradient"
                             : tensor.dim() > 1 ? "kept gradient"
                                                : "light gradient";
    THPObjectPtr ends = new_list();
    for (size_t f = 0; f < task.face.size(); ++f) {
      if (serves(f)) {
        append(ends, Py_BuildValue("ii", task.plan(f).weight, task.plan(f).outside));
      }
    }
    add_tensor(tensors, name, tensor, ends);
  });
  const zbp_task& plan = task.plan();
  return Py_BuildValue("siiNOO", task.name().c_str(), works_of(task).empty() ? plan.kind : -1,
                       plan.why, PyBool_FromLong(plan.leaves_packed), faces.get(), tensors.get());
}

PyObject* describe_outside(Node& node, int number) {
  bool is_packed = false;
  variable_list saved;  // no Python object is made under the node's lock
  for_each_saved_outside(node, [&](const SavedVariable& one) {
    is_packed |= one.has_hooks();
    if (const auto tensor = one.get_raw_data(); tensor && tensor->defined()) {
      saved.push_back(*tensor);
    }
  });
  THPObjectPtr tensors = new_list(), ends = checked(Py_BuildValue("[(ii)]", -1, number));
  for (const at::Tensor& tensor : saved) {
    add_tensor(tensors, "saved", tensor, ends);
  }
  return Py_BuildValue("sszN[]O", node.name().c_str(), "outside", nullptr,
                       PyBool_FromLong(is_packed), tensors.get());
}

PyObject* describe_waiting(const at::Tensor& grad, int number) {
  THPObjectPtr tensors = new_list(), ends = checked(Py_BuildValue("[(ii)]", number, -1));
  add_tensor(tensors, "waiting gradient", grad, ends);
  return Py_BuildValue("zszO[]O", nullptr, "waiting", nullptr, Py_False, tensors.get());
}

bool reads_weights(const Task& task) {
  const auto works = works_of(task);
  return task.kind() == ZBP_TASK_DEFERRED || task.plan().leaves_packed ||
         std::any_of(works.begin(), works.end(), [](const Work& work) {
           return work.call && work.call->parameters.size() + work.call->views.size();
         });
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
    } else if (task.node && count(*task.node) > 1) {
      return false;
    } else if (task.node) {
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
  int stop = 0;
  const auto visit_both = [&](const c10::SafePyObject& one, const c10::SafePyObject& other) {
    for (const c10::SafePyObject* object : {&one, &other}) {
      stop = stop != 0 ? stop : visit(object->ptr(getPyInterpreter()), arg);
    }
  };
  const auto visit_packed = [&](const Packed& packed) {
    visit_both(packed.unpack_hook, packed.data);
  };
  for (const Task& task : group_of(group).tasks) {
    for (const Work& work : works_of(task)) {
      if (work.call) {
        visit_both(work.call->function, work.call->arguments);
      }
    }
    for_each_packed(task, visit_packed);  // the node that shares it is the task's alone
  }
  const auto& outside = group_of(group).packed_outside;
  if (!outside.empty() && has_outside_alone(group_of(group))) {
    for (const PackedPtr& packed : outside) {
      visit_packed(*packed);
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
PyObject* zbp_group_bytes_held(zbp_group* group, zbp_error* error) {
  return guarded_object(error, [&] {
    size_t bytes = 0;
    std::set<const void*> seen;
    if (!zbp_book_is_claimed(&group->book)) {
      for (const Task& task : group_of(group).tasks) {
        for_each_kept(task, [&](const Kept& kept, Role role, const auto&) {
          const bool costs =
              role != Role::view_for_work && seen.insert(storage_of(kept.tensor())).second;
          bytes += costs ? bytes_of(kept.tensor()) : 0;
        });
      }
    }
    return PyLong_FromSize_t(bytes);
  });
}

PyObject* zbp_group_weights(zbp_group* group, zbp_error* error) {
  return guarded_object(error, [&] {
    const auto claimed = claim(*group);
    return zbp_book_is_complete(&group->book) ? PyTuple_New(0)
                                              : wrap_tensors(group_of(group).variables());
  });
}

PyObject* zbp_group_describe(zbp_group* handle, zbp_error* error) {
  return guarded_object(error, [&] {
    const auto claimed = claim(*handle);
    const Group& group = group_of(handle);
    THPObjectPtr weights = checked(wrap_tensors(group.variables())), hops = new_list(),
                 tasks = new_list();
    for (uint32_t h = 0; h < group.layout.hop_count; ++h) {
      const zbp_hop& hop = group.layout.hop[h];
      append(hops, Py_BuildValue("Iii", static_cast<unsigned int>(hop.outside), hop.to_weight,
                                 hop.to_outside));
    }
    for (const Task& task : group.tasks) {
      append(tasks, describe_task(task));
    }
    for (size_t o = 0; o < group.outside.size(); ++o) {
      if (!saves_nothing(*group.outside[o].node)) {
        append(tasks, describe_outside(*group.outside[o].node, static_cast<int>(o)));
      }
    }
    for (size_t w = 0; w < group.weights.size(); ++w) {
      if (group.weights[w].grad.defined()) {
        append(tasks, describe_waiting(group.weights[w].grad, static_cast<int>(w)));
      }
    }
    return checked(Py_BuildValue("OOO", weights.get(), hops.get(), tasks.get()));
  });
}

PyObject* zbp_group_reads_weights(zbp_group* handle, zbp_error* error) {
  return guarded_object(error, [&] {
    const auto claimed = claim_if_free(*handle);
    const Group& group = group_of(handle);
    return PyBool_FromLong(
        claimed &&
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
    if (!impl::get_autograd_meta(*tensor)) {
      return Py_NewRef(Py_False);
    }
    return PyBool_FromLong(!impl::hooks(*tensor).empty() ||
                           impl::post_acc_grad_hooks(*tensor) != nullptr ||
                           (accumulator && has_hooks(*accumulator)));
  });
}
