// I: what the backward of a Python autograd.Function hands over. See Note [Who takes work], work.h.

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_function.h>

#include "shim/torch/nodes.h"
#include "shim/torch/python.h"
#include "shim/group/facts.h"
#include "shim/engine/stand_in.h"
#include "shim/input/zbp_input.h"

using namespace zbp;

namespace {

// ---- Which Function runs, and which of its edges are meant

/// The Function whose backward runs on this thread, as its node. In I a stand-in may run it, in W a
/// proxy does; then what is asked for is what they follow.
struct Running {
  NodePtr node;                 // null if no Function runs
  StandIn* stand_in = nullptr;  // I's
  const Node* proxy = nullptr;  // W's
};

Running running_here() {
  const NodePtr current = torch::autograd::get_current_node();
  if (!current) {
    return {};
  }
  Running running{ref_of(original_of(*current))};
  if (!is_python_function(*running.node)) {
    return {};
  }
  // What a vmap within the backward computes on ends with it, before W.
  const bool is_transformed =
      c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
  running.stand_in = is_transformed ? nullptr : as<StandIn>(*current);
  const bool is_proxy = current.get() != running.node.get() && !as<StandIn>(*current) &&
                        current->num_outputs() > 0;  // no capture
  running.proxy = is_proxy ? current.get() : nullptr;
  return running;
}

/// Where the gradients go that work computes.
struct Targets {
  bool are_all = false;           // to all weights: the work adds them itself
  SmallVector<int32_t, 2> slots;  // the node's edges; -1 for what takes no gradient
};

/// From the positions of weights among the arguments of the Function's forward, or None.
Targets targets_of(PyObject* weights, const Running& running) {
  Targets targets;
  targets.are_all = weights == Py_None;
  if (targets.are_all) {
    return targets;
  }
  if (!PyTuple_Check(weights)) {
    refuse(PyExc_TypeError, "weights: expected a tuple of ints, or None");
  }
  targets.slots.assign(static_cast<size_t>(PyTuple_GET_SIZE(weights)), -1);
  if (!running.node) {
    return targets;
  }
  THPObjectPtr context = context_of(*running.node);
  const auto& is_tensor = reinterpret_cast<const THPFunction*>(context.get())->is_variable_input;
  for (size_t i = 0; i < targets.slots.size(); ++i) {
    const Py_ssize_t position = as_position(PyTuple_GET_ITEM(weights, static_cast<Py_ssize_t>(i)));
    if (position < 0 || static_cast<size_t>(position) >= is_tensor.size()) {
      refuse(PyExc_ValueError, "weights names argument ", position, " of the forward of ",
             running.node->name(), ", which has ", is_tensor.size(), ", the first of which is 0");
    }
    const auto slot = std::count(is_tensor.begin(), is_tensor.begin() + position, true);
    // No tensor: None, for a weight that there may be or not.
    if (is_tensor[position] && running.node->next_edge(slot).is_valid()) {
      targets.slots[i] = static_cast<int32_t>(slot);
    }
  }
  return targets;
}

enum class Verdict : uint8_t { at_once, hand_over, skip };

/// What becomes of work, and per weight its face, -1 where it is not I's to compute.
struct Answer {
  Verdict verdict = Verdict::at_once;
  SmallVector<int32_t, 2> faces;
};

Answer answer_of(StandIn& stand_in, const Targets& targets) {
  const Task& task = stand_in.task();
  Answer answer;
  bool is_for_weights = false, is_for_inputs = false, has_matrix = false;
  const auto add = [&](int32_t slot) {
    const int32_t face = slot < 0 ? -1 : task.face_at(static_cast<uint32_t>(slot));
    answer.faces.push_back(face);
    is_for_weights |= face >= 0;
    has_matrix |= face >= 0 && is_matrix(task.face[face].edge);
    is_for_inputs |= slot >= 0 && face < 0 && stand_in.next_edge(slot).is_valid();
  };
  std::for_each(targets.slots.begin(), targets.slots.end(), add);
  for (size_t f = 0; targets.are_all && f < task.face.size(); ++f) {
    add(static_cast<int32_t>(task.plan(f).slot));
  }
  const uint8_t takes = task.plan().takes_work;
  const bool is_taken = takes == ZBP_DEFER_ALL || (takes == ZBP_DEFER_MATRICES && has_matrix);
  // Post hooks are owed all gradients when the node has run.
  const bool is_watched = !original_of(stand_in).post_hooks().empty();
  if (!is_for_weights && !is_for_inputs) {
    answer.verdict = Verdict::skip;
  } else if (!is_for_inputs && !is_watched && is_taken) {
    answer.verdict = Verdict::hand_over;
  }
  return answer;
}

Answer answer_to(const Targets& targets, const Running& running) {
  if (running.stand_in) {
    return answer_of(*running.stand_in, targets);
  }
  const auto is_asked_for = [&](int32_t slot) {
    return slot >= 0 && (running.proxy ? running.proxy->next_edge(slot).is_valid()
                                       : running.node->task_should_compute_output(slot));
  };
  const bool is_wanted = targets.are_all || !running.node ||
                         std::any_of(targets.slots.begin(), targets.slots.end(), is_asked_for);
  return {is_wanted ? Verdict::at_once : Verdict::skip, {}};
}

// ---- What is kept for W

SmallVector<Kept, 2> kept_in(PyObject* list) {
  const variable_list tensors = tensors_in(list);
  return SmallVector<Kept, 2>(tensors.begin(), tensors.end());
}

/// Makes `function(*saved)` a work of the task, which gives the gradients at the faces that are not
/// -1.
void keep_work(StandIn& stand_in, PyObject* function, PyObject* saved,
               SmallVector<int32_t, 2> faces, size_t count) {
  THPObjectPtr weights = checked(wrap_tensors(stand_in.group().variables()));
  THPObjectPtr is_copied = checked(PyBool_FromLong(stand_in.may_unpack_refilled()));
  const THPObjectPtr taken = call_python("zbpipe._work", "take", {saved, weights, is_copied});
  const auto part = [&](Py_ssize_t i) { return PyTuple_GET_ITEM(taken.get(), i); };
  const auto owned = [](PyObject* object) {
    return c10::SafePyObject(Py_NewRef(object), getPyInterpreter());
  };
  Task& task = stand_in.task();
  Work& work = std::get<Given>(task.work).emplace_back();
  work.call = std::make_unique<const Work::Call>(Work::Call{owned(function), owned(part(0)),
                                                            owned(part(1)), count, kept_in(part(2)),
                                                            kept_in(part(3)), kept_in(part(4))});
  work.faces = std::move(faces);
  task.plan().has_work = true;
}

}  // namespace

PyObject* zbp_defer(PyObject* function, PyObject* weights, PyObject* saved, zbp_error* error) {
  return guarded_object(error, [&] {
    const Running running = running_here();
    const Targets targets = targets_of(weights, running);
    variable_list grads(targets.slots.size());
    Answer answer = answer_to(targets, running);
    if (function == Py_None) {
      return PyBool_FromLong(answer.verdict == Verdict::hand_over);
    }
    if (answer.verdict == Verdict::hand_over) {
      keep_work(*running.stand_in, function, saved, std::move(answer.faces), grads.size());
    }
    if (answer.verdict == Verdict::at_once) {
      THPObjectPtr returned = checked(PyObject_CallObject(function, saved));
      grads = tensors_in(call_python("zbpipe._work", "gradients_in",
                                     {returned, checked(PyLong_FromSize_t(grads.size()))}));
      for (size_t i = 0; running.node && i < grads.size(); ++i) {
        if (targets.slots[i] < 0) {
          grads[i].reset();  // as libtorch insists
        }
      }
    }
    return wrap_tensors(grads);
  });
}
