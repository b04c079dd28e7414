// A group as Python sees it: the dictionary that torch's own module has.

#include "shim/pass/zbp_shim.h"

#include "shim/pass/group.h"
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

}  // namespace

zbp_turn zbp_group_turn(const zbp_group* group) {
  return turn_of(*group->group);
}

void zbp_group_free(zbp_group* group) {
  delete group;
}

// A W that runs without the GIL changes the group: nothing of it may be looked at meanwhile.
int zbp_group_state(const zbp_group* handle) {
  if (zbp_book_is_claimed(&handle->group->book)) {
    return ZBP_GROUP_RUNNING;
  }
  return zbp_book_is_complete(&handle->group->book) ? ZBP_GROUP_SPENT : ZBP_GROUP_READY;
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
