// What is known of torch.utils.checkpoint: its hooks, its frames, its reentrant Function. Called
// with the GIL held.
#pragma once

#include <Python.h>

#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include "shim/torch/compat.h"

namespace zbp {

/// Whose unpack hook it is.
enum class UnpackHook : uint8_t {
  other,
  checkpoint,  // torch.utils.checkpoint's: computes a region again in each run that unpacks
  selective_checkpoint,  // one with a policy: torch computes such a region again only once
};
UnpackHook recognise(PyObject* unpack_hook);

/// True for a hook whose region torch computes again only once: a selectively checkpointed one, or
/// one within such a region.
bool is_computed_only_once(PyObject* unpack_hook);
/// True for the node of torch's reentrant checkpoint, given one of a Python Function.
bool is_reentrant_checkpoint(Node& node);

/// Calls `visit` with the tensors that torch's checkpointing gives a region when it computes it
/// again: its arguments, and what its function has closed over but for leaves that require a
/// gradient; those of the regions around it too. None for other hooks. Raises libtorch's error for
/// an argument that has been modified already.
void for_each_argument(PyObject* unpack_hook, c10::function_ref<void(const at::Tensor&)> visit);

/// True within a torch.utils.checkpoint.GraphExecGroup, whose runs share one recomputation.
bool in_graph_exec_group();

}  // namespace zbp
