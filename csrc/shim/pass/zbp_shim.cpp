// A group as Python sees it: the dictionary that torch's own module has.

#include "shim/pass/zbp_shim.h"

#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "shim/torch/python.h"

namespace {

using namespace zbp;

/// Whatever makes Python objects may run other Python code, and that a W: what is asked for is gathered first.
const Group& unspent(const zbp_group* handle, const char* key) {
  if (zbp_book_is_claimed(&handle->group->book)) {
    refuse(PyExc_RuntimeError, "'", key, "' cannot be read while the group's weight pass runs");
  }
  if (handle->group->book.state != ZBP_BOOK_OPEN) {
    refuse(PyExc_KeyError, key, ": the weight pass of this group has already run");
  }
  return *handle->group;
}

/// The output gradients of a task, one per input of its node. A whole node's are gone.
variable_list output_grads_of(const Task& task) {
  const size_t inputs = task.node ? task.node->num_inputs() : 1;
  variable_list grads(inputs);
  for (size_t i = 0; i < task.output_grads.size(); ++i) {
    const size_t nr = task.kind() == Kind::root ? task.input_nr : i;
    grads[nr] = task.output_grads[i].tensor();
  }
  return grads;
}

/// As a whole node's gradients read: given back like that they change nothing.
bool is_tuple_of_none(PyObject* value) {
  if (!value) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) {
    if (PyTuple_GET_ITEM(value, i) != Py_None) {
      return false;
    }
  }
  return true;
}

SmallVector<Watched, 1> parse_grads(const Task& task, PyObject* value, PyObject* seq,
                                    size_t index) {
  const Node& node = *task.node;
  if (!seq) {
    refuse(PyExc_TypeError, "grads[", index, "] is a ", type_name(value),
           "; expected a tuple with a tensor or None per output of ", node.name());
  }
  if (static_cast<size_t>(size_of(seq)) != node.num_inputs()) {
    refuse(PyExc_ValueError, "grads[", index, "] has ", size_of(seq), " entries; ", node.name(),
           " has ", node.num_inputs(), " outputs");
  }
  SmallVector<Watched, 1> grads;
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    PyObject* entry = item(seq, i);
    const at::Tensor* tensor = as_tensor(entry);
    if (!tensor && entry != Py_None) {
      refuse(PyExc_TypeError, "grads[", index, "][", i, "] is a ", type_name(entry),
             "; expected a tensor or None");
    }
    const Edge edge(task.node, i);
    if (tensor && !fits(*tensor, edge)) {
      refuse(PyExc_ValueError, "grads[", index, "][", i, "] is a gradient of ", describe(*tensor),
             "; ", node.name(), " needs one of ", describe(edge));
    }
    grads.emplace_back(tensor ? *tensor : at::Tensor());
  }
  return grads;
}

void set_grads(Task& task, SmallVector<Watched, 1>&& grads) {
  if (task.kind() == Kind::root) {
    task.output_grads[0] = std::move(grads[task.input_nr]);
    return;
  }
  task.output_grads = std::move(grads);
  if (task.kind() == Kind::whole) {
    task.set_kind(Kind::deferred);
    task.kept.clear();
  }
}

}  // namespace

zbp_turn zbp_group_turn(const zbp_group* group) {
  return {&group->group->layout, &group->group->book, held_by(*group->group)};
}

void zbp_group_free(zbp_group* group) {
  delete group;
}

// A W that runs without the GIL changes the group: nothing of it may be looked at meanwhile.
int zbp_group_state(const zbp_group* handle) {
  if (zbp_book_is_claimed(&handle->group->book)) {
    return ZBP_GROUP_RUNNING;
  }
  return handle->group->book.state == ZBP_BOOK_OPEN ? ZBP_GROUP_READY : ZBP_GROUP_SPENT;
}

int zbp_group_get_info(const zbp_group* handle, zbp_group_info* info_out, zbp_error* error) {
  return guarded(error, [&] {
    *info_out = {};
    if (!zbp_book_is_claimed(&handle->group->book)) {
      const Group& group = *handle->group;
      *info_out = {group.weights.size(), group.tasks.size(), group.bytes_held()};
    }
  });
}

PyObject* zbp_group_params(const zbp_group* handle, zbp_error* error) {
  return guarded_object(error, [&] {
    std::vector<NodePtr> nodes;
    for (const Weight& weight : unspent(handle, "params").weights) {
      nodes.emplace_back(weight.accumulator);
    }
    THPObjectPtr set(PySet_New(nullptr));
    for (const NodePtr& wanted : nodes) {
      THPObjectPtr node(wrap_node(wanted));
      if (!set || PySet_Add(set, node) < 0) {
        throw python_error();
      }
    }
    return set.release();
  });
}

PyObject* zbp_group_intermediates(const zbp_group* handle, zbp_error* error) {
  return guarded_object(error, [&] {
    std::vector<NodePtr> nodes;
    for (const Task& task : unspent(handle, "intermediates").tasks) {
      nodes.push_back(task.node);
    }
    THPObjectPtr list = new_list();
    for (const NodePtr& wanted : nodes) {
      append(list, wrap_node(wanted));
    }
    return list.release();
  });
}

PyObject* zbp_group_grads(const zbp_group* handle, zbp_error* error) {
  return guarded_object(error, [&] {
    std::vector<variable_list> grads;
    for (const Task& task : unspent(handle, "grads").tasks) {
      grads.push_back(output_grads_of(task));
    }
    THPObjectPtr list = new_list();
    for (const variable_list& of_task : grads) {
      append(list, wrap_tensors(of_task));
    }
    return list.release();
  });
}

int zbp_group_set_grads(zbp_group* handle, PyObject* value, zbp_error* error) {
  return guarded(error, [&] {
    THPObjectPtr seq(PySequence_Tuple(value));
    if (!seq) {
      PyErr_Clear();
      refuse(PyExc_TypeError, "grads is a ", type_name(value),
             "; expected a list with a tuple per intermediate");
    }
    std::vector<THPObjectPtr> entries;  // null for what is no sequence
    for (Py_ssize_t i = 0; i < size_of(seq); ++i) {
      entries.emplace_back(PySequence_Tuple(item(seq, i)));
      PyErr_Clear();
    }
    unspent(handle, "grads");
    auto& tasks = handle->group->tasks;
    if (static_cast<size_t>(size_of(seq)) != tasks.size()) {
      refuse(PyExc_ValueError, "grads has ", size_of(seq), " entries; the group has ", tasks.size(),
             " intermediates");
    }
    std::vector<SmallVector<Watched, 1>> grads;
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (tasks[i].kind() == Kind::whole && is_tuple_of_none(entries[i])) {
        grads.emplace_back();
        continue;
      }
      if (!tasks[i].node || !tasks[i].can_run_again) {
        refuse(PyExc_ValueError, "grads[", i, "] is for ",
               tasks[i].node ? tasks[i].node->name() : "a node",
               " that ran whole in the input pass and let go of what it had saved; its weights' "
               "gradients cannot be computed again");
      }
      grads.push_back(parse_grads(tasks[i], item(seq, static_cast<Py_ssize_t>(i)), entries[i], i));
    }
    for (size_t i = 0; i < tasks.size(); ++i) {
      if (!grads[i].empty()) {
        set_grads(tasks[i], std::move(grads[i]));
      }
    }
  });
}
