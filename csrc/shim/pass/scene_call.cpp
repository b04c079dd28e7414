// A call of I as Python makes it: its arguments checked and converted; and its end.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/pass/scene.h"
#include "shim/pass/walk.h"
#include "shim/pass/zbp_shim.h"
#include "shim/torch/error.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;

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

/// As torch's module has it: an input's .grad becomes its gradient, or is added to in place.
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

void parse(PyObject* outputs, PyObject* output_grads, PyObject* inputs, PyObject* weights,
           zbp_scene& scene) {
  if (output_grads && size_of(output_grads) != size_of(outputs)) {
    refuse(PyExc_ValueError, "output_grads has ", size_of(output_grads),
           " entries; expected one for each of the ", size_of(outputs), " stage outputs");
  }
  Py_ssize_t without_grad = 0;
  for (Py_ssize_t i = 0; i < size_of(outputs); ++i) {
    without_grad += parse_output(outputs, output_grads, i, scene.args) ? 0 : 1;
  }
  if (scene.args.roots.empty() && without_grad > 0) {
    refuse(PyExc_ValueError, "output_grads holds no gradient for any of the ", without_grad,
           " stage outputs that require one; the backward would lose them all");
  }
  parse_inputs(inputs, scene.args, scene.position);
  parse_weights(weights, scene.args);
  scene.input_count = static_cast<size_t>(size_of(inputs));
}

}  // namespace

void zbp_scene::put_back() noexcept {
  cuts.undo();
  detours.undo();
  stand_ins.give_up();
  stand_ins.by_id.clear();
  captures.clear();
  groups.clear();
}

int zbp_scene_begin(std::unique_ptr<zbp_scene> scene, const char* range, zbp_scene** scene_out) {
  int status = range ? guarded([&] { scene->range.emplace(range); }) : ZBP_OK;
  if (status == ZBP_OK) {
    status = scene->barrier.begin();
  }
  if (status == ZBP_OK) {
    *scene_out = scene.release();
  }
  return status;
}

int zbp_scene_new(PyObject* outputs, PyObject* output_grads, PyObject* inputs, PyObject* weights,
                  zbp_policy policy, zbp_scene** scene_out) {
  std::unique_ptr<zbp_scene> scene;
  const int status = guarded([&] {
    scene = std::make_unique<zbp_scene>();
    scene->args.policy = policy;
    parse(outputs, output_grads, inputs, weights, *scene);
  });
  return status == ZBP_OK ? zbp_scene_begin(std::move(scene), "zbpipe::input_pass", scene_out)
                          : status;
}

int zbp_scene_end(zbp_scene* scene, int status, zbp_error* error, PyObject** dinputs_out,
                  zbp_group*** groups_out, size_t* group_count_out) {
  const std::unique_ptr<zbp_scene> owned(scene);
  THPObjectPtr dinputs;
  GroupArray groups;
  owned->range.reset();
  const int result = owned->barrier.end([&] {
    if (status != ZBP_OK) {
      owned->put_back();
      rethrow(*error, status);
    }
    groups.take(owned->groups);
    set_input_grads(owned->args, owned->input_grads);
    variable_list grads(owned->input_count);
    for (size_t i = 0; i < owned->position.size(); ++i) {
      grads[owned->position[i]] = std::move(owned->input_grads[i]);
    }
    dinputs = THPObjectPtr(wrap_tensors(grads));
  });
  if (result == ZBP_OK) {
    *dinputs_out = dinputs.release();
    *group_count_out = groups.count;
    *groups_out = groups.release();
  }
  return result;
}
