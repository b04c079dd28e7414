#include "shim/work.h"

#include <algorithm>
#include <typeinfo>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/gil.h"
#include "shim/kinds.h"
#include "shim/python.h"
#include "shim/ranges.h"
#include "shim/stand_in.h"
#include "shim/zbp_work.h"

namespace zbp {

namespace {

// ---- W

/// Autocast as it was where the work was handed over. Its cache is left alone: a cast that is made here has
/// no history, and the next forward would find it.
class AutocastAsThere {
 public:
  explicit AutocastAsThere(c10::ArrayRef<Autocast> there)
      : is_cached_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
    for (const c10::DeviceType device : devices()) {
      here_.push_back({{device, at::autocast::get_autocast_dtype(device)},
                       at::autocast::is_autocast_enabled(device)});
      const auto* found = std::find_if(there.begin(), there.end(), [&](const Autocast& autocast) {
        return autocast.device == device;
      });
      at::autocast::set_autocast_enabled(device, found != there.end());
      if (found != there.end()) {
        at::autocast::set_autocast_dtype(device, found->dtype);
      }
    }
  }
  ~AutocastAsThere() {
    for (const auto& [autocast, is_enabled] : here_) {
      at::autocast::set_autocast_enabled(autocast.device, is_enabled);
      at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
    }
    at::autocast::set_autocast_cache_enabled(is_cached_);
  }
  AutocastAsThere(const AutocastAsThere&) = delete;
  AutocastAsThere& operator=(const AutocastAsThere&) = delete;

  static c10::ArrayRef<c10::DeviceType> devices() {
    static constexpr c10::DeviceType list[] = {c10::DeviceType::CPU, c10::DeviceType::CUDA};
    return list;
  }

 private:
  bool is_cached_;
  SmallVector<std::pair<Autocast, bool>, 2> here_;
};

std::vector<Autocast> autocast_here() {
  std::vector<Autocast> there;
  for (const c10::DeviceType device : AutocastAsThere::devices()) {
    if (at::autocast::is_autocast_enabled(device)) {
      there.push_back({device, at::autocast::get_autocast_dtype(device)});
    }
  }
  return there;
}

/// Throws the Python error that is set, kept safe from the loss of this thread's state.
[[noreturn]] void throw_python_error() {
  python_error error;
  error.persist();
  throw std::move(error);
}

/// The gradients in what a callable returned, `count` of them.
variable_list parse_result(PyObject* result, size_t count, bool is_single) {
  variable_list grads(count);
  if (result == Py_None) {
    return grads;
  }
  TORCH_CHECK_TYPE(count > 0, "a function given to zbpipe.defer with weights=None returned a ",
                   Py_TYPE(result)->tp_name, "; expected None, as it adds the gradients itself");
  const bool is_sequence = PyTuple_Check(result) || PyList_Check(result);
  const size_t size = is_sequence ? static_cast<size_t>(PySequence_Fast_GET_SIZE(result)) : 1;
  TORCH_CHECK_VALUE(size == count, "a function given to zbpipe.defer returned ", size,
                    " gradients; expected ", count, ", one for each of its weights");
  for (size_t i = 0; i < count; ++i) {
    PyObject* item = is_sequence ? PySequence_Fast_GET_ITEM(result, i) : result;
    const at::Tensor* tensor = as_tensor(item);
    TORCH_CHECK_TYPE(tensor || item == Py_None, "a function given to zbpipe.defer returned a ",
                     Py_TYPE(item)->tp_name, is_single ? "" : c10::str(" as gradient ", i),
                     "; expected a tensor or None");
    if (tensor) {
      grads[i] = *tensor;
    }
  }
  return grads;
}

variable_list call(const Work::Call& call, size_t count) {
  const Range range("zbpipe::work");
  const at::AutoGradMode no_grad(false);
  const AutocastAsThere autocast(call.autocast);
  const AcquireGil gil;
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  THPObjectPtr result(
      PyObject_CallObject(call.function.ptr(interpreter), call.arguments.ptr(interpreter)));
  if (!result) {
    throw_python_error();
  }
  return parse_result(result, count, call.is_single);
}

/// As the engine would check it where the Function's own gradients are checked.
void check_grads(Work& work, const Task& task) {
  for (size_t i = 0; i < work.faces.size(); ++i) {
    if (work.faces[i] < 0) {
      work.grads[i].reset();
      continue;
    }
    variable_list grad{work.grads[i].tensor()};
    torch::autograd::validate_outputs(
        {task.face[work.faces[i]].edge}, grad, [](const std::string& message) {
          return "a function given to zbpipe.defer returned an " + message;
        });
    if (!grad[0].is_same(work.grads[i].tensor())) {
      work.grads[i] = Watched(grad[0]);
    }
  }
  work.is_checked = true;
}

void run(Work& work, const Task& task, bool retain) {
  if (!work.is_done) {
    for (at::Tensor& grad : call(*work.call, work.faces.size())) {
      work.grads.emplace_back(std::exchange(grad, {}));
    }
    work.is_done = true;
    if (!retain) {
      work.call = nullptr;
    }
  }
  if (!work.is_checked) {
    check_grads(work, task);
  }
}

bool serves(const Work& work, size_t face) {
  return std::find(work.faces.begin(), work.faces.end(), static_cast<int32_t>(face)) !=
         work.faces.end();
}

/// Calls `visit` with each place where a gradient for the face lies.
template <class AnyTask, class Visit>
void for_each_kept(AnyTask& task, size_t face, const Visit& visit) {
  if (task.kept[face].tensor().defined()) {
    visit(task.kept[face]);
  }
  for (auto& work : task.works) {
    for (size_t i = 0; i < work.grads.size(); ++i) {
      if (work.faces[i] == static_cast<int32_t>(face) && work.grads[i].tensor().defined()) {
        visit(work.grads[i]);
      }
    }
  }
}

}  // namespace

void run_works_for(Task& task, size_t face, bool retain) {
  for (Work& work : task.works) {
    if (serves(work, face)) {
      run(work, task, retain);
    }
  }
}

void run_works(Group& group, bool retain) {
  for (Task& task : group.tasks) {
    std::optional<c10::Stream> stream;
    if (task.place) {
      stream = task.place->stream();
    }
    const c10::OptionalStreamGuard guard(stream);
    for (size_t i = 0; i < task.face.size(); ++i) {
      if (!task.face[i].delivered) {
        run_works_for(task, i, retain);
      }
    }
  }
}

void make_ready_again(Work& work) {
  work.is_done = work.is_done && !work.call;
  work.is_checked = work.is_done;
  if (!work.is_done) {
    work.grads.clear();
  }
}

at::Tensor kept_grad(const Task& task, size_t face) {
  at::Tensor sum;
  for_each_kept(task, face, [&](const Watched& kept) {
    sum = sum.defined() ? sum + kept.tensor() : kept.tensor();
  });
  return sum;
}

Watched* only_kept_grad(Task& task, size_t face) {
  if (task.kind != Kind::whole) {
    return nullptr;
  }
  Watched* only = nullptr;
  size_t count = 0;
  for_each_kept(task, face, [&](Watched& kept) {
    only = &kept;
    ++count;
  });
  return count == 1 ? only : nullptr;
}

namespace {

// ---- I

/// The Function whose backward runs on this thread, as its node; and its stand-in, if an I runs it.
struct Running {
  NodePtr node;
  StandIn* stand_in = nullptr;
};

Running running_here() {
  const NodePtr current = torch::autograd::get_current_node();
  if (!current) {
    return {};
  }
  if (typeid(*current) != typeid(StandIn)) {
    return {is_python_function(*current) ? current : nullptr, nullptr};
  }
  auto& stand_in = static_cast<StandIn&>(*current);
  if (stand_in.is_retired() || !is_python_function(stand_in.original())) {
    return {};
  }
  return {ref_of(stand_in.original()), &stand_in};
}

/// Which of the node's edges the weights are; -1 for one that takes no gradient.
struct Targets {
  SmallVector<int32_t, 2> slots;
  bool is_single = false;
  bool are_all = false;  // all the weights that there are: the callable returns nothing
};

PyObject* item(PyObject* weights, size_t i, bool is_single) {
  return is_single ? weights : PySequence_Fast_GET_ITEM(weights, i);
}

/// "weights" or "weights[i]", for messages.
std::string name_of(size_t i, bool is_single) {
  return is_single ? "weights" : c10::str("weights[", i, "]");
}

bool is_position(PyObject* object) {
  return PyLong_Check(object) && !PyBool_Check(object);
}

void check_types(PyObject* weights, bool is_single, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    PyObject* weight = item(weights, i, is_single);
    if (!is_position(weight) && !as_tensor(weight)) {
      refuse(PyExc_TypeError, name_of(i, is_single), " is a ", Py_TYPE(weight)->tp_name,
             "; expected a tensor that was given to the Function, or its position among the "
             "arguments of forward, as in ctx.needs_input_grad");
    }
  }
}

int32_t slot_of_position(PyObject* weight, const std::vector<bool>& is_tensor, const Node& node,
                         const std::string& name) {
  int overflow = 0;
  const long position = PyLong_AsLongAndOverflow(weight, &overflow);
  if (overflow || position < 0 || static_cast<size_t>(position) >= is_tensor.size()) {
    refuse(PyExc_ValueError, name, " is ", overflow ? "a huge number" : std::to_string(position),
           "; expected the position of an argument of the forward of ", node.name(), ", which has ",
           is_tensor.size(), ", the first of which is 0");
  }
  if (!is_tensor[position]) {
    return -1;  // None, for a weight that there may be or not
  }
  const auto slot = std::count(is_tensor.begin(), is_tensor.begin() + position, true);
  return node.next_edge(slot).is_valid() ? static_cast<int32_t>(slot) : -1;
}

/// True if I has cut an edge of the node for the time of its run: that of a weight that is not its own.
bool has_cut_edge(PyObject* context, const std::vector<bool>& is_tensor, const Node& node) {
  THPObjectPtr needed(PyObject_GetAttrString(context, "needs_input_grad"));
  if (!needed) {
    throw python_error();
  }
  size_t slot = 0;
  for (size_t i = 0; i < is_tensor.size(); ++i) {
    if (is_tensor[i] && !node.next_edge(slot++).is_valid() &&
        PyTuple_GetItem(needed, static_cast<Py_ssize_t>(i)) == Py_True) {
      return true;
    }
  }
  return false;
}

int32_t slot_of_tensor(const at::Tensor& tensor, PyObject* context,
                       const std::vector<bool>& is_tensor, const Node& node,
                       const std::string& name) {
  if (!tensor.requires_grad()) {
    return -1;
  }
  const Edge edge = tensor.is_leaf()
                        ? Edge(torch::autograd::impl::try_get_grad_accumulator(tensor), 0)
                        : torch::autograd::impl::gradient_edge(tensor);
  for (size_t slot = 0; edge.is_valid() && slot < node.num_outputs(); ++slot) {
    if (node.next_edge(slot) == edge) {
      return static_cast<int32_t>(slot);
    }
  }
  if (has_cut_edge(context, is_tensor, node)) {
    return -1;
  }
  refuse(PyExc_ValueError, name, " is a tensor of ", describe(tensor), " that was not given to ",
         node.name(), "; pass the tensor that apply() was given, or its position there");
}

Targets parse_weights(PyObject* weights, const Running& running) {
  Targets targets;
  targets.are_all = weights == Py_None;
  if (targets.are_all) {
    return targets;
  }
  targets.is_single = !PyTuple_Check(weights) && !PyList_Check(weights);
  const size_t count = targets.is_single ? 1 : PySequence_Fast_GET_SIZE(weights);
  if (count == 0) {
    refuse(PyExc_ValueError,
           "weights is empty; expected the weights whose gradients the function "
           "returns, or None if it adds them itself");
  }
  check_types(weights, targets.is_single, count);
  if (!running.node) {
    targets.slots.assign(count, -1);
    return targets;
  }
  THPObjectPtr context(torch::autograd::functionToPyObject(running.node));
  if (!context) {
    throw python_error();
  }
  const auto& is_tensor = reinterpret_cast<THPFunction*>(context.get())->is_variable_input;
  for (size_t i = 0; i < count; ++i) {
    PyObject* weight = item(weights, i, targets.is_single);
    const std::string name = name_of(i, targets.is_single);
    const at::Tensor* tensor = as_tensor(weight);
    targets.slots.push_back(tensor
                                ? slot_of_tensor(*tensor, context, is_tensor, *running.node, name)
                                : slot_of_position(weight, is_tensor, *running.node, name));
  }
  return targets;
}

enum class Verdict : uint8_t { at_once, hand_over, skip };

/// For I: per weight its face, -1 where it is not I's to compute; and what is to be done.
struct Plan {
  Verdict verdict = Verdict::at_once;
  SmallVector<int32_t, 2> faces;
};

Plan plan_for_stand_in(const Targets& targets, StandIn& stand_in) {
  const Task& task = stand_in.task();
  Plan plan;
  bool needed_now = false;
  bool has_heavy = false;
  const auto add = [&](size_t f) {
    plan.faces.push_back(static_cast<int32_t>(f));
    has_heavy = has_heavy || is_heavy(task.face[f]);
  };
  if (targets.are_all) {
    for (size_t f = 0; f < task.face.size(); ++f) {
      add(f);
    }
  }
  for (const int32_t slot : targets.slots) {
    const auto* face = std::find_if(task.face.begin(), task.face.end(), [&](const Face& f) {
      return slot >= 0 && f.slot == static_cast<uint32_t>(slot);
    });
    if (face != task.face.end()) {
      add(face - task.face.begin());
    } else {
      plan.faces.push_back(-1);
      needed_now = needed_now || (slot >= 0 && stand_in.next_edge(slot).is_valid());
    }
  }
  const bool is_wanted =
      std::any_of(plan.faces.begin(), plan.faces.end(), [](int32_t face) { return face >= 0; });
  const bool is_taken =
      task.takes_work == ZBP_DEFER_ALL || (task.takes_work == ZBP_DEFER_MATRICES && has_heavy);
  if (!is_wanted && !needed_now) {
    plan.verdict = Verdict::skip;
  } else if (!needed_now && is_taken && stand_in.original().post_hooks().empty()) {
    plan.verdict = Verdict::hand_over;
  }
  return plan;
}

Plan plan_for(const Targets& targets, const Running& running) {
  if (running.stand_in) {
    return plan_for_stand_in(targets, *running.stand_in);
  }
  const bool is_wanted = !running.node || targets.are_all ||
                         std::any_of(targets.slots.begin(), targets.slots.end(), [&](int32_t slot) {
                           return slot >= 0 && running.node->task_should_compute_output(slot);
                         });
  return {is_wanted ? Verdict::at_once : Verdict::skip, {}};
}

/// Those that a callable is given.
struct Tensors {
  explicit Tensors(const Group& served) : group(served) {}

  /// A stage input is a leaf as well, but it goes when I is over.
  bool is_parameter(PyObject* object, const at::Tensor& tensor) const {
    const auto is_it = [&](const Weight& weight) {
      return weight.accumulator->variable.is_same(tensor);
    };
    return tensor.is_leaf() && tensor.requires_grad() &&
           (PyObject_IsInstance(object, ParameterClass) == 1 ||
            std::any_of(group.weights.begin(), group.weights.end(), is_it));
  }

  const Group& group;
  SmallVector<Watched, 3> saved;
  SmallVector<Watched, 1> parameters;
};

/// What W gives to the callable: a parameter as it is, another tensor without its history, what is in
/// tuples and lists likewise, all else as it is. New reference, or null with an error set.
PyObject* without_history(PyObject* object, Tensors& tensors) {
  if (const at::Tensor* tensor = as_tensor(object)) {
    if (tensors.is_parameter(object, *tensor)) {
      tensors.parameters.emplace_back(*tensor);
      return Py_NewRef(object);
    }
    tensors.saved.emplace_back(*tensor);
    return THPVariable_Wrap(tensors.saved.back().tensor());
  }
  const bool is_tuple = PyTuple_CheckExact(object);
  if (!is_tuple && !PyList_CheckExact(object)) {
    return Py_NewRef(object);
  }
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
  THPObjectPtr copy(is_tuple ? PyTuple_New(size) : PyList_New(size));
  for (Py_ssize_t i = 0; copy && i < size; ++i) {
    PyObject* item = without_history(PySequence_Fast_GET_ITEM(object, i), tensors);
    if (!item) {
      return nullptr;
    }
    is_tuple ? PyTuple_SET_ITEM(copy.get(), i, item) : PyList_SET_ITEM(copy.get(), i, item);
  }
  return copy.release();
}

void hand_over(PyObject* function, PyObject* saved, const Targets& targets, Plan& plan,
               StandIn& stand_in) {
  Tensors tensors(stand_in.group());
  THPObjectPtr tuple(PySequence_Tuple(saved));
  THPObjectPtr arguments(tuple ? without_history(tuple, tensors) : nullptr);
  if (!arguments) {
    throw python_error();
  }
  Task& task = stand_in.task();
  Work& work = task.works.emplace_back();
  work.call = std::make_unique<const Work::Call>(Work::Call{
      c10::SafePyObject(Py_NewRef(function), getPyInterpreter()),
      c10::SafePyObject(arguments.release(), getPyInterpreter()), std::move(tensors.saved),
      std::move(tensors.parameters), autocast_here(), targets.is_single});
  work.faces = std::move(plan.faces);
  task.can_run_again = false;
}

/// New reference: `grads` as the backward returns them.
PyObject* wrap(const variable_list& grads, const Targets& targets) {
  if (targets.are_all) {
    return Py_NewRef(Py_None);
  }
  if (targets.is_single) {
    return THPVariable_Wrap(grads[0]);
  }
  THPObjectPtr tuple(PyTuple_New(static_cast<Py_ssize_t>(grads.size())));
  for (size_t i = 0; tuple && i < grads.size(); ++i) {
    PyObject* wrapped = THPVariable_Wrap(grads[i]);
    if (!wrapped) {
      return nullptr;
    }
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), wrapped);
  }
  return tuple.release();
}

}  // namespace

}  // namespace zbp

using namespace zbp;

PyObject* zbp_defer(PyObject* function, PyObject* weights, PyObject* saved) {
  PyObject* result = nullptr;
  const int status = guarded([&] {
    if (!PyCallable_Check(function)) {
      refuse(PyExc_TypeError, "function is a ", Py_TYPE(function)->tp_name,
             "; expected a callable that returns the gradients of the weights");
    }
    if (!PyTuple_Check(saved) && !PyList_Check(saved)) {
      refuse(PyExc_TypeError, "saved is a ", Py_TYPE(saved)->tp_name,
             "; expected a tuple or list of what the function is called with");
    }
    const Running running = running_here();
    const Targets targets = parse_weights(weights, running);
    variable_list grads(targets.slots.size());
    Plan plan = plan_for(targets, running);
    if (plan.verdict == Verdict::hand_over) {
      hand_over(function, saved, targets, plan, *running.stand_in);
    } else if (plan.verdict == Verdict::at_once) {
      THPObjectPtr arguments(PySequence_Tuple(saved));
      THPObjectPtr returned(arguments ? PyObject_CallObject(function, arguments) : nullptr);
      if (!returned) {
        throw python_error();
      }
      grads = parse_result(returned, grads.size(), targets.is_single);
      for (size_t i = 0; running.node && i < grads.size(); ++i) {
        if (targets.slots[i] < 0) {
          grads[i].reset();  // as libtorch insists
        }
      }
    }
    result = wrap(grads, targets);
    if (!result) {
      throw python_error();
    }
  });
  return status == ZBP_OK ? result : nullptr;
}

int zbp_will_defer(PyObject* weights, int* out) {
  return guarded([&] {
    const Running running = running_here();
    *out = plan_for(parse_weights(weights, running), running).verdict == Verdict::hand_over;
  });
}

int zbp_group_traverse(const zbp_group* handle, visitproc visit, void* arg) {
  // While another owner has the group (an I, a W), what it holds is no business of the collector's.
  if (handle->running || handle->group.use_count() != 1) {
    return 0;
  }
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  for (const zbp::Task& task : handle->group->tasks) {
    for (const zbp::Work& work : task.works) {
      if (work.call) {
        Py_VISIT(work.call->function.ptr(interpreter));
        Py_VISIT(work.call->arguments.ptr(interpreter));
      }
    }
  }
  return 0;
}

void zbp_group_clear(zbp_group* handle) {
  handle->group->state = zbp::Group::State::weight_done;
  handle->group->release();
}
