#include "shim/stores/zbp_stores.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "shim/torch/nodes.h"
#include "shim/torch/python.h"
#include "shim/pass/stand_in.h"

namespace {

using namespace zbp;
namespace impl = torch::autograd::impl;
using Hook = std::unique_ptr<torch::autograd::FunctionPreHook>;

// Note [A detour]
// A module's inputs need a node behind them for the time of its forward. A view in their place would not
// do: computing in place on a view leaves out what lies between it and its base. So the tensor itself gets
// another edge and, if nothing was computed in place, has its own again when the forward is over: whoever
// uses it before or afterwards sees no difference. A leaf stays one: meanwhile the node is what
// accumulates its gradient. Hooks stay where they are: those of before at the node of before, where the
// whole gradient arrives. retain_grad()'s is hidden meanwhile, as libtorch insists on finding it at the
// present node when it computes in place. It also insists on views being their node's first output, hence
// a node for each tensor.
class Passage : public Node {
 public:
  Passage(const Edge& edge, const at::Tensor& tensor) : Node(edge_list{edge}) {
    add_input_metadata(tensor);
  }

  std::string name() const override { return "zbpipe::Passage"; }

 protected:
  variable_list apply(variable_list&& grads) override { return std::move(grads); }
};

struct Detour {
  at::Tensor tensor;
  Edge before;  // to nothing, if it required no gradient
  Edge during;
  bool is_leaf = false;  // that requires a gradient
  bool retained = false;
};

const char* const capsule_name = "zbpipe.Detour";

torch::autograd::AutogradMeta& meta_of(const at::Tensor& tensor) {
  return *impl::materialize_autograd_meta(tensor);
}

/// As it is stored: for a view, asking for it could compute it anew.
bool has_edge(const at::Tensor& tensor, const Edge& edge) {
  const auto& meta = meta_of(tensor);
  return meta.grad_fn_ == edge.function && meta.output_nr_ == edge.input_nr;
}

void set_accumulator(const at::Tensor& leaf, const NodePtr& node) {
  auto& meta = meta_of(leaf);
  const std::lock_guard<std::mutex> lock(meta.mutex_);
  meta.grad_accumulator_ = decltype(meta.grad_accumulator_)(node);
}

/// A view's edge is as up to date as it was.
void set_edge(const at::Tensor& tensor, const Edge& edge) {
  auto* view = impl::get_view_autograd_meta(tensor);
  const bool is_view = view && view->has_bw_view();
  const auto version = is_view ? view->get_attr_version() : 0;
  impl::set_gradient_edge(tensor, edge);
  if (is_view) {
    view->set_attr_version(version);
  }
}

/// libtorch's way to ask, pop, leaves an empty entry behind.
Hook take_retains_grad_hook(const Edge& edge) {
  const auto& hooks = edge.function->retains_grad_hooks();
  return hooks.count(edge.input_nr) ? edge.function->pop_retains_grad_hook(edge.input_nr) : nullptr;
}

void give_retains_grad_hook(Hook&& hook, const Edge& edge) {
  if (size_t* place = place_of(*hook)) {
    *place = edge.input_nr;
  }
  edge.function->add_retains_grad_hook(std::move(hook), edge.input_nr);
}

/// Hooks that the tensor got during the detour are owed its whole gradient, too.
void move_hooks(const Detour& detour) {
  if (!detour.before.function) {
    return;
  }
  auto& hooks = detour.during.function->tensor_pre_hooks();
  for (Hook& hook : hooks) {
    if (size_t* place = place_of(*hook); place && *place == detour.during.input_nr) {
      *place = detour.before.input_nr;
      detour.before.function->add_tensor_pre_hook(std::move(hook));
    }
  }
  hooks.erase(std::remove(hooks.begin(), hooks.end(), nullptr), hooks.end());
  if (Hook hook = take_retains_grad_hook(detour.during); hook && !detour.retained) {
    give_retains_grad_hook(std::move(hook), detour.before);
  }
}

bool end(const Detour& detour) {
  auto& meta = meta_of(detour.tensor);
  if (detour.is_leaf) {
    set_accumulator(detour.tensor, detour.before.function);
    return !meta.grad_fn_;
  }
  const bool is_as_it_was = has_edge(detour.tensor, detour.during);
  move_hooks(detour);
  if (is_as_it_was) {
    set_edge(detour.tensor, detour.before);
  } else if (detour.retained && meta.grad_fn_ && !meta.retains_grad_) {
    if (Hook hook = take_retains_grad_hook(detour.before)) {
      give_retains_grad_hook(std::move(hook), Edge(meta.grad_fn_, meta.output_nr_));
    }
  }
  meta.retains_grad_ = meta.retains_grad_ || detour.retained;
  return is_as_it_was;
}

Detour begin(PyObject* object, PyObject* like) {
  const at::Tensor* tensor = as_tensor(object);
  const at::Tensor* other = as_tensor(like);
  if (!tensor || !other) {
    refuse(PyExc_TypeError, "detour() was called with a ", Py_TYPE(object)->tp_name, " and a ",
           Py_TYPE(like)->tp_name, "; expected two tensors");
  }
  if (!other->grad_fn()) {
    refuse(PyExc_ValueError, "like is a leaf of ", describe(*other),
           "; expected a tensor that was computed");
  }
  Detour detour{*tensor, {}, Edge(make_node<Passage>(impl::gradient_edge(*other), *other), 0)};
  detour.is_leaf = tensor->is_leaf() && tensor->requires_grad();
  if (tensor->requires_grad()) {
    detour.before = impl::gradient_edge(*tensor);
  }
  if (detour.is_leaf) {
    set_accumulator(*tensor, detour.during.function);
    return detour;
  }
  detour.retained = std::exchange(meta_of(*tensor).retains_grad_, false);
  set_edge(*tensor, detour.during);
  return detour;
}

void free_detour(PyObject* capsule) {
  delete static_cast<Detour*>(PyCapsule_GetPointer(capsule, capsule_name));
}

}  // namespace

PyObject* zbp_detour(PyObject* tensor, PyObject* like, zbp_error* error) {
  Detour* detour = nullptr;
  THPObjectPtr capsule;
  const int status = guarded(error, [&] {
    auto empty = std::make_unique<Detour>();
    capsule = PyCapsule_New(empty.get(), capsule_name, free_detour);
    if (!capsule) {
      throw python_error();
    }
    detour = empty.release();  // the capsule's from here on
    *detour = begin(tensor, like);
  });
  if (status == ZBP_OK) {
    return capsule.release();
  }
  if (detour && detour->tensor.defined()) {
    // A warning is an error; that one stays.
    guarded(error, [&] { end(std::exchange(*detour, {})); });
  }
  return nullptr;
}

int zbp_end_detour(PyObject* capsule, int* out, zbp_error* error) {
  return guarded(error, [&] {
    auto* detour = static_cast<Detour*>(PyCapsule_GetPointer(capsule, capsule_name));
    if (!detour) {
      throw python_error();
    }
    const Detour ending = std::exchange(*detour, {});
    *out = ending.tensor.defined() && end(ending) ? 1 : 0;
  });
}

PyObject* zbp_weights_here(zbp_error* error) {
  return guarded_object(error, [&] {
    THPObjectPtr list = new_list();
    const NodePtr current = torch::autograd::get_current_node();
    if (!current || typeid(*current) != typeid(StandIn)) {
      return list.release();
    }
    auto& stand_in = static_cast<StandIn&>(*current);
    if (stand_in.is_retired()) {
      return list.release();
    }
    for (const Weight& weight : stand_in.group().weights) {
      append(list, THPVariable_Wrap(weight.accumulator->variable));
    }
    return list.release();
  });
}
