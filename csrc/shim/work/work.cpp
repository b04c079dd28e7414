#include "shim/work/work.h"

#include <algorithm>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "core/pass/zbp_verdict.h"
#include "shim/torch/gil.h"
#include "shim/torch/python.h"
#include "shim/torch/ranges.h"
#include "shim/pass/kinds.h"
#include "shim/pass/stand_in.h"
#include "shim/work/targets.h"
#include "shim/work/work_arguments.h"
#include "shim/work/zbp_work.h"

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
    for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
      const auto* found = std::find_if(there.begin(), there.end(), [&](const Autocast& autocast) {
        return autocast.device == device;
      });
      const bool is_on_there = found != there.end();
      const bool is_on_here = at::autocast::is_autocast_enabled(device);
      if (is_on_there || is_on_here) {
        here_.push_back({{device, at::autocast::get_autocast_dtype(device)}, is_on_here});
        at::autocast::set_autocast_enabled(device, is_on_there);
      }
      if (is_on_there) {
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

 private:
  bool is_cached_;
  SmallVector<std::pair<Autocast, bool>, 2> here_;
};

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
  const ProfiledRange range("zbpipe::work");
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
    work.grads[i] = Watched(grad[0]);
  }
  work.is_checked = true;
}

void run(Work& work, const Task& task, bool retain) {
  if (!work.is_done) {
    SmallVector<Watched, 2> grads(work.faces.size());
    variable_list results = call(*work.call, work.faces.size());
    // Nothing throws before all are stored: the callable is not called a second time.
    std::transform(results.begin(), results.end(), grads.begin(),
                   [](at::Tensor& grad) { return Watched::with_history(std::move(grad)); });
    work.grads = std::move(grads);
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
  if (task.kind() != Kind::whole) {
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

/// What becomes of the work that is offered, and per weight its face, -1 where it is not I's to compute.
struct Answer {
  zbp_verdict verdict = ZBP_VERDICT_AT_ONCE;
  SmallVector<int32_t, 2> faces;
};

Answer answer_of(StandIn& stand_in, const Targets& targets) {
  const Task& task = stand_in.task();
  SmallVector<bool, 4> is_matrix_face, leads;
  for (const Face& face : task.face) {
    is_matrix_face.push_back(is_matrix(face.edge));
  }
  for (const int32_t slot : targets.slots) {
    leads.push_back(slot >= 0 && stand_in.next_edge(slot).is_valid());
  }
  zbp_offer offer{};
  offer.are_all = targets.are_all;
  offer.is_watched = !stand_in.original().post_hooks().empty();
  offer.slot = targets.slots.data();
  offer.leads = leads.data();
  offer.slot_count = targets.slots.size();
  offer.is_matrix = is_matrix_face.data();
  Answer answer;
  answer.faces.resize(targets.are_all ? task.face.size() : targets.slots.size());
  answer.verdict = zbp_verdict_of(task.layout, task.number, &offer, answer.faces.data());
  return answer;
}

Answer answer_to(const Targets& targets, const Running& running) {
  if (running.stand_in) {
    return answer_of(*running.stand_in, targets);
  }
  return {asks_for_weights(targets, running) ? ZBP_VERDICT_AT_ONCE : ZBP_VERDICT_SKIP, {}};
}

std::vector<Autocast> autocast_here() {
  std::vector<Autocast> there;
  for (const c10::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (at::autocast::is_autocast_enabled(device)) {
      there.push_back({device, at::autocast::get_autocast_dtype(device)});
    }
  }
  return there;
}

/// Makes `function(*saved)` a work of the task, which gives the gradients at the faces that are not -1.
void keep_work(StandIn& stand_in, PyObject* function, PyObject* saved,
               SmallVector<int32_t, 2> faces, bool is_single) {
  WorkArguments held(stand_in.group());
  THPObjectPtr arguments = held.take(saved);
  Task& task = stand_in.task();
  Work& work = task.works.emplace_back();
  work.call = std::make_unique<const Work::Call>(
      Work::Call{c10::SafePyObject(Py_NewRef(function), getPyInterpreter()),
                 c10::SafePyObject(arguments.release(), getPyInterpreter()),
                 std::move(held.tensors), std::move(held.parameters), autocast_here(), is_single});
  work.faces = std::move(faces);
  task.plan().has_work = true;
}

/// New reference: `grads` as the backward returns them.
PyObject* wrap(const variable_list& grads, const Targets& targets) {
  if (targets.are_all) {
    return Py_NewRef(Py_None);
  }
  return targets.is_single ? wrap_tensor(grads[0]) : wrap_tensors(grads);
}

}  // namespace

}  // namespace zbp

using namespace zbp;

PyObject* zbp_defer(PyObject* function, PyObject* weights, PyObject* saved, zbp_error* error) {
  return guarded_object(error, [&] {
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
    Answer answer = answer_to(targets, running);
    if (answer.verdict == ZBP_VERDICT_HAND_OVER) {
      keep_work(*running.stand_in, function, saved, std::move(answer.faces), targets.is_single);
    }
    if (answer.verdict == ZBP_VERDICT_AT_ONCE) {
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
    return wrap(grads, targets);
  });
}

int zbp_will_defer(PyObject* weights, int* out, zbp_error* error) {
  return guarded(error, [&] {
    const Running running = running_here();
    *out = answer_to(parse_weights(weights, running), running).verdict == ZBP_VERDICT_HAND_OVER;
  });
}

int zbp_group_traverse(const zbp_group* handle, visitproc visit, void* arg) {
  // While another owner has the group (an I, a W), what it holds is no business of the collector's.
  if (zbp_book_is_claimed(&handle->book) || group_of(handle).owned.use_count() != 1) {
    return 0;
  }
  c10::impl::PyInterpreter* const interpreter = getPyInterpreter();
  for (const zbp::Task& task : group_of(handle).tasks) {
    for (const zbp::Work& work : task.works) {
      if (work.call) {
        Py_VISIT(work.call->function.ptr(interpreter));
        Py_VISIT(work.call->arguments.ptr(interpreter));
      }
    }
    for (const auto& packed : task.packed) {  // the node that shares it is the task's alone
      Py_VISIT(packed->unpack_hook.ptr(interpreter));
      Py_VISIT(packed->data.ptr(interpreter));
    }
  }
  return 0;
}

void zbp_group_clear(zbp_group* handle) {
  if (zbp_book_is_claimed(&handle->book) || group_of(handle).owned.use_count() != 1) {
    return;  // as where it is traversed
  }
  zbp_book_close(&handle->book);
  group_of(handle).release();  // which reads the layout
  zbp_layout_fini(&handle->layout);
}
