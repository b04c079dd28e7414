// How an operator becomes a task of the current stream: Note [How an operator becomes a task] in kernels.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "backend.h"

namespace late {

inline bool is_late(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == LATE;
}

/// A CPU tensor with the memory of a late one, which it does not keep alive.
at::Tensor in_place_of(const at::Tensor& tensor);

/// What a task reads of a tensor: a late one when it runs, another as it is now.
at::Tensor for_task(const at::Tensor& tensor);

void add_use(std::vector<Use>& uses, const at::Tensor& tensor, bool writes);

/// Nothing of the thread that waits has a part in what a task computes: no mode, no autograd, no profiler.
struct Plain {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
  at::DisableRecordFunctionGuard no_profiler;
};

/// Takes the operator's arguments from the stack and puts on it what it returns, as the device's tensors.
void run_boxed(const c10::OperatorHandle& op, c10::Stack* stack);

}  // namespace late
