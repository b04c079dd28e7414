#include "shim/pass/zbp_shim.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/torch/gil.h"
#include "shim/torch/python.h"
#include "shim/torch/streams.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;

// ---- arguments of I

/// Adds output number `i` to the roots unless it takes no gradient, or its gradient is False: then it
/// is detached with the others and no more. Returns false if it could take one and was given none.
bool parse_output(PyObject* outputs, PyObject* output_grads, Py_ssize_t i, InputPassArgs& args) {
  PyObject* output = item(outputs, i);
  PyObject* given = output_grads ? item(output_grads, i) : Py_None;
  const at::Tensor* tensor = as_tensor(output);
  std::optional<Edge> edge;
  if (!tensor && output != Py_None) {
    edge = as_gradient_edge(output);
    if (!edge) {
      refuse(PyExc_TypeError, "stage_outputs_or_loss[", i, "] is a ", type_name(output),
             "; expected a tensor, a GradientEdge or None");
    }
  }
  const bool is_no_root = given == Py_False;
  const at::Tensor* grad = as_tensor(given);
  if (!grad && given != Py_None && !is_no_root) {
    refuse(PyExc_TypeError, "output_grads[", i, "] is a ", type_name(given),
           "; expected a tensor or None");
  }
  if (edge && !grad) {
    refuse(PyExc_AssertionError, "stage_outputs_or_loss[", i,
           "] is a GradientEdge, which requires output gradients from the next stage, but "
           "output_grads",
           output_grads ? c10::str("[", i, "]") : "", " is None");
  }
  if (!edge) {
    if (!tensor || !tensor->requires_grad()) {
      return true;
    }
    edge = impl::gradient_edge(*tensor);
    if (!tensor->is_leaf()) {
      args.outputs.push_back(*tensor);
    }
  }
  if (is_no_root) {
    return true;
  }
  if (grad && !fits(*grad, *edge)) {
    refuse(PyExc_ValueError, "output_grads[", i, "] is a gradient of ", describe(*grad),
           "; stage_outputs_or_loss[", i, "] needs one of ", describe(*edge));
  }
  if (!grad && output_grads && tensor->sym_numel() != 1) {
    return false;  // an output that the next stage did not use
  }
  if (!grad && tensor->is_complex()) {
    refuse(PyExc_RuntimeError,
           "grad can be implicitly created only for real outputs, and "
           "stage_outputs_or_loss[",
           i, "] is a tensor of ", describe(*tensor), "; give its gradient in output_grads");
  }
  args.roots.push_back(std::move(*edge));
  args.root_grads.push_back(grad ? *grad : at::ones_like(*tensor));
  return true;
}

void parse_inputs(PyObject* inputs, InputPassArgs& args, std::vector<Py_ssize_t>& position) {
  for (Py_ssize_t i = 0; i < size_of(inputs); ++i) {
    const at::Tensor* tensor = as_tensor(item(inputs, i));
    if (tensor && tensor->requires_grad()) {
      args.inputs.push_back(*tensor);
      position.push_back(i);
    }
  }
}

void parse_weights(PyObject* weights, InputPassArgs& args) {
  args.all_leaves = weights == nullptr;
  for (Py_ssize_t i = 0; weights && i < size_of(weights); ++i) {
    const at::Tensor* tensor = as_tensor(item(weights, i));
    if (!tensor) {
      refuse(PyExc_TypeError, "weights[", i, "] is a ", type_name(item(weights, i)),
             "; expected a tensor");
    }
    if (!tensor->is_leaf()) {
      refuse(PyExc_ValueError, "weights[", i, "] of ", describe(*tensor),
             " is not a leaf; pass the parameters that it is computed from");
    }
    (tensor->requires_grad() ? args.weights : args.frozen).push_back(*tensor);
  }
}

// ---- results of I

/// As today: an input's .grad becomes its gradient, or is added to in place.
void set_grad(const at::Tensor& input, const at::Tensor& grad) {
  if (!input.is_leaf() && input.retains_grad()) {
    return;  // its own hook has done it
  }
  const at::AutoGradMode no_grad(false);
  at::Tensor& place = input.mutable_grad();
  if (place.defined()) {
    place.add_(grad);
  } else {
    place = grad;
  }
  if (input.is_leaf()) {
    if (const auto& hook = impl::post_acc_grad_hooks(input)) {
      (*hook)(input);
    }
  }
}

void set_input_grads(const InputPassArgs& args, const variable_list& grads) {
  std::unordered_set<const void*> seen;
  for (size_t i = 0; i < grads.size(); ++i) {
    if (grads[i].defined() && seen.insert(args.inputs[i].unsafeGetTensorImpl()).second) {
      set_grad(args.inputs[i], grads[i]);
    }
  }
}

/// New tuple; None for what is undefined.
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

/// Groups on their way to the caller; frees those that do not get there.
struct GroupArray {
  GroupArray() = default;
  GroupArray(const GroupArray&) = delete;
  GroupArray& operator=(const GroupArray&) = delete;
  ~GroupArray() {
    for (size_t i = 0; i < count; ++i) {
      delete handles[i];
    }
    PyMem_Free(handles);
  }

  void take(std::vector<GroupPtr>& groups) {
    handles = static_cast<zbp_group**>(PyMem_Calloc(groups.size() + 1, sizeof(zbp_group*)));
    if (!handles) {
      throw std::bad_alloc();
    }
    for (GroupPtr& group : groups) {
      handles[count] = new zbp_group{std::move(group)};
      ++count;
    }
  }
  zbp_group** release() {
    count = 0;
    return std::exchange(handles, nullptr);
  }

  zbp_group** handles = nullptr;
  size_t count = 0;
};

// ---- groups

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

PyObject* wrap_node(const NodePtr& node) {
  PyObject* wrapped = node ? torch::autograd::functionToPyObject(node) : Py_NewRef(Py_None);
  if (!wrapped) {
    throw python_error();
  }
  return wrapped;
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

int zbp_input_pass(PyObject* outputs, PyObject* output_grads, PyObject* inputs, PyObject* weights,
                   zbp_policy policy, PyObject** dinputs_out, zbp_group*** groups_out,
                   size_t* group_count_out, int* ran_out) {
  *ran_out = 0;
  // Outside of the barrier: a warning that is an error raises only when the body is through.
  THPObjectPtr dinputs;
  GroupArray groups;
  const int status = guarded([&] {
    if (output_grads && size_of(output_grads) != size_of(outputs)) {
      refuse(PyExc_ValueError, "output_grads has ", size_of(output_grads),
             " entries; expected one for each of the ", size_of(outputs), " stage outputs");
    }
    InputPassArgs args;
    args.policy = policy;
    std::vector<Py_ssize_t> position;
    Py_ssize_t without_grad = 0;
    for (Py_ssize_t i = 0; i < size_of(outputs); ++i) {
      without_grad += parse_output(outputs, output_grads, i, args) ? 0 : 1;
    }
    if (args.roots.empty() && without_grad > 0) {
      refuse(PyExc_ValueError, "output_grads holds no gradient for any of the ", without_grad,
             " stage outputs that require one; the backward would lose them all");
    }
    parse_inputs(inputs, args, position);
    parse_weights(weights, args);

    *ran_out = 1;
    InputPassResult result = run_input_pass(args);
    groups.take(result.groups);
    set_input_grads(args, result.input_grads);
    variable_list grads(size_of(inputs));
    for (size_t i = 0; i < position.size(); ++i) {
      grads[position[i]] = std::move(result.input_grads[i]);
    }
    dinputs = wrap_tensors(grads);
  });
  if (status == ZBP_OK) {
    *dinputs_out = dinputs.release();
    *group_count_out = groups.count;
    *groups_out = groups.release();
  }
  return status;
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

int zbp_group_get_info(const zbp_group* handle, zbp_group_info* info_out) {
  return guarded([&] {
    *info_out = {};
    if (!zbp_book_is_claimed(&handle->group->book)) {
      const Group& group = *handle->group;
      *info_out = {group.weights.size(), group.tasks.size(), group.bytes_held()};
    }
  });
}

PyObject* zbp_group_params(const zbp_group* handle) {
  return guarded_object([&] {
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

PyObject* zbp_group_intermediates(const zbp_group* handle) {
  return guarded_object([&] {
    std::vector<NodePtr> nodes;
    for (const Task& task : unspent(handle, "intermediates").tasks) {
      nodes.push_back(task.node);
    }
    THPObjectPtr list(PyList_New(0));
    for (const NodePtr& wanted : nodes) {
      THPObjectPtr node(wrap_node(wanted));
      if (!list || PyList_Append(list, node) < 0) {
        throw python_error();
      }
    }
    return list.release();
  });
}

PyObject* zbp_group_grads(const zbp_group* handle) {
  return guarded_object([&] {
    std::vector<variable_list> grads;
    for (const Task& task : unspent(handle, "grads").tasks) {
      grads.push_back(output_grads_of(task));
    }
    THPObjectPtr list(PyList_New(0));
    for (const variable_list& of_task : grads) {
      THPObjectPtr tuple(wrap_tensors(of_task));
      if (!list || PyList_Append(list, tuple) < 0) {
        throw python_error();
      }
    }
    return list.release();
  });
}

int zbp_group_set_grads(zbp_group* handle, PyObject* value) {
  return guarded([&] {
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
