// Small questions about nodes and tensors that libtorch has no answer for.
#pragma once

#include <typeinfo>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "shim/torch/compat.h"

namespace zbp {

/// `node` as a T if it is exactly one.
template <class T>
T* as(Node& node) {
  return typeid(node) == typeid(T) ? static_cast<T*>(&node) : nullptr;
}

/// `node` as what accumulates a leaf's gradient, or null. That has no edges: few types are read.
inline torch::autograd::AccumulateGrad* as_accumulator(Node& node) {
  return node.num_outputs() == 0 ? as<torch::autograd::AccumulateGrad>(node) : nullptr;
}

/// True if a hook would see `node` run.
bool has_hooks(Node& node);

/// True for a node that libtorch generated: its apply() computes exactly what its edges ask for,
/// and release_variables() lets go of everything that it saved.
bool is_generated(const Node& node);

/// True for the node of a Python autograd Function.
bool is_python_function(const Node& node);

/// Of nodes of this type, by its name, what zbpipe knows does not hold: see
/// zbpipe/_stage/self_check.py.
void distrust(const char* type);
bool is_distrusted(const Node& node);

/// True for a tensor whose memory is not simply its own: DTensors and other Python subclasses,
/// wrappers of torch.func, sparse tensors.
bool is_subclass(const at::Tensor& tensor);

}  // namespace zbp
