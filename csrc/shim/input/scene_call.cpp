// A call of I as the bindings make it: its arguments checked and converted; and its end.

#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/input/scene.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;

/// The edge of output number `i`; nothing for None, and for a view that was made under no_grad: it
/// requires a gradient as its base does, and has no node.
std::optional<Edge> edge_of(PyObject* output, size_t i) {
  if (const at::Tensor* tensor = as_tensor(output)) {
    Edge edge = tensor->requires_grad() ? impl::gradient_edge(*tensor) : Edge();
    return edge.is_valid() ? std::optional(std::move(edge)) : std::nullopt;
  }
  if (output == Py_None) {
    return std::nullopt;
  }
  std::optional<Edge> edge = as_gradient_edge(output);
  if (!edge) {
    refuse(PyExc_TypeError, "stage_outputs_or_loss[", i, "] is a ", type_name(output),
           "; expected a tensor, a GradientEdge or None");
  }
  return edge;
}

/// `given`: null where no gradients were given at all. False for an output that could take a
/// gradient and was given none.
bool add_output(InputPassArgs& args, size_t i, PyObject* output, PyObject* given) {
  const at::Tensor* tensor = as_tensor(output);
  std::optional<Edge> edge = edge_of(output, i);
  const at::Tensor* grad = given ? as_tensor(given) : nullptr;
  if (given && !grad && given != Py_None && given != Py_False) {
    refuse(PyExc_TypeError, "output_grads[", i, "] is a ", type_name(given),
           "; expected a tensor or None");
  }
  if (edge && !tensor && !grad) {
    refuse(PyExc_AssertionError, "stage_outputs_or_loss[", i,
           "] is a GradientEdge, which requires output gradients from the next stage, but "
           "output_grads",
           given ? c10::str("[", i, "]") : "", " is None");
  }
  if (edge && tensor && !tensor->is_leaf()) {
    args.outputs.push_back(*tensor);
  }
  if (!edge || given == Py_False) {
    return true;
  }
  if (grad && !fits(*grad, *edge)) {
    refuse(PyExc_ValueError, "output_grads[", i, "] is a gradient of ", describe(*grad),
           "; stage_outputs_or_loss[", i, "] needs one of ", describe(*edge));
  }
  if (!grad && given && tensor->sym_numel() != 1) {
    return false;
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

void add_weight(InputPassArgs& args, size_t i, PyObject* weight) {
  const at::Tensor* tensor = as_tensor(weight);
  if (!tensor) {
    refuse(PyExc_TypeError, "weights[", i, "] is a ", type_name(weight), "; expected a tensor");
  }
  if (!tensor->is_leaf()) {
    refuse(PyExc_ValueError, "weights[", i, "] of ", describe(*tensor),
           " is not a leaf; pass the parameters that it is computed from");
  }
  if (tensor->requires_grad()) {
    args.weights.insert(tensor->unsafeGetTensorImpl());
  } else {
    args.frozen.push_back(*tensor);
  }
}

void add_outputs(InputPassArgs& args, PyObject* outputs, PyObject* grads) {
  const Py_ssize_t count = PyTuple_GET_SIZE(outputs);
  size_t unused = 0;
  if (grads && PyTuple_GET_SIZE(grads) != count) {
    refuse(PyExc_ValueError, "output_grads has ", PyTuple_GET_SIZE(grads),
           " entries; expected one for each of the ", count, " stage outputs");
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const grad = grads ? PyTuple_GET_ITEM(grads, i) : nullptr;
    unused += !add_output(args, static_cast<size_t>(i), PyTuple_GET_ITEM(outputs, i), grad);
  }
  if (args.roots.empty() && unused > 0) {
    refuse(PyExc_ValueError, "output_grads holds no gradient for any of the ", unused,
           " stage outputs that require one; the backward would lose them all");
  }
}

void add_inputs(Scene& scene, PyObject* inputs) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
    const at::Tensor* tensor = as_tensor(PyTuple_GET_ITEM(inputs, i));
    if (tensor && tensor->requires_grad()) {
      scene.args.inputs.push_back(*tensor);
      scene.position.push_back(static_cast<size_t>(i));
    }
  }
}

void add_arguments(Scene& scene, const zbp_input_args& given) {
  scene.args.policy = given.policy;
  scene.args.all_leaves = given.weights == Py_None;
  add_outputs(scene.args, given.outputs, given.grads == Py_None ? nullptr : given.grads);
  add_inputs(scene, given.inputs);
  for (Py_ssize_t i = 0; !scene.args.all_leaves && i < PyTuple_GET_SIZE(given.weights); ++i) {
    add_weight(scene.args, static_cast<size_t>(i), PyTuple_GET_ITEM(given.weights, i));
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given.excluded); ++i) {
    if (const at::Tensor* tensor = as_tensor(PyTuple_GET_ITEM(given.excluded, i))) {
      scene.args.excluded.insert(tensor->unsafeGetTensorImpl());
    }
  }
}

}  // namespace

PyObject* zbp_input_call(const zbp_input_args* given, zbp_wrap wrap, void* arg, bool* has_begun_out,
                         zbp_error* error) {
  Scene scene;  // out here: its end may run Python code, which must find no error set
  *has_begun_out = guarded(error, [&] { add_arguments(scene, *given); }) == ZBP_OK;
  if (!*has_begun_out) {
    return nullptr;
  }
  return guarded_object(error, [&] {
    {
      RECORD_USER_SCOPE("zbpipe::input_pass");
      run_input_pass(scene);
    }
    THPObjectPtr groups = checked(PyList_New(0));
    for (GroupPtr& group : scene.groups) {
      Group* const handed_over = group.get();
      handed_over->owned = std::move(group);  // its own, until the Python object frees it
      append(groups, wrap(arg, handed_over));
    }
    variable_list grads(static_cast<size_t>(PyTuple_GET_SIZE(given->inputs)));
    for (size_t i = 0; i < scene.position.size(); ++i) {
      grads[scene.position[i]] = std::move(scene.input_grads[i]);
    }
    return checked(Py_BuildValue("NO", wrap_tensors(grads), groups.get())).release();
  });
}

PyObject* zbp_distrust(PyObject* node_type, zbp_error* error) {
  return guarded_object(error, [&] {
    const char* const name = PyUnicode_AsUTF8(node_type);
    if (!name) {
      throw_error();
    }
    distrust(name);
    return Py_NewRef(Py_None);
  });
}
