// What libtorch keeps to itself of a saved variable behind hooks, and what it thereby holds.
//
// Note [Private members]
// That members are private is not checked where a template is instantiated explicitly: so a
// function that hands out a pointer to one can be made a friend there. A torch that has renamed one
// does not compile.
#pragma once

#include <optional>

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_saved_variable_hooks.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "shim/torch/compat.h"
#include "shim/torch/names.h"

namespace zbp {

struct HooksOfSaved {
  friend auto member(HooksOfSaved);
};

struct HistoryOfSaved {
  friend auto member(HistoryOfSaved);
};

struct AccumulatorOfSaved {
  friend auto member(AccumulatorOfSaved);
};

struct PackHook {
  friend auto member(PackHook);  // of another type from torch 2.15 on
};

template <class Of, auto place>
struct Opened {
  friend auto member(Of) { return place; }
};

inline PyObject* object_in(PyObject* object) {
  return object;
}
inline PyObject* object_in(const std::optional<c10::SafePyObject>& object) {
  return object ? object->ptr(getPyInterpreter()) : nullptr;
}

template struct Opened<HooksOfSaved, &torch::autograd::SavedVariable::hooks_>;
template struct Opened<HistoryOfSaved, &torch::autograd::SavedVariable::grad_fn_>;
template struct Opened<AccumulatorOfSaved, &torch::autograd::SavedVariable::grad_accumulator_>;
template struct Opened<PackHook, &torch::autograd::PySavedVariableHooks::pack_hook_>;

/// The hook that has packed, which libtorch keeps though it is not called again; borrowed. Null for
/// a hook of C++.
inline PyObject* pack_hook_of(const torch::autograd::SavedVariable& saved) {
  using torch::autograd::PySavedVariableHooks;
  const auto& hooks = saved.*member(HooksOfSaved());
  const auto* python = hooks ? as_hidden<const PySavedVariableHooks>(*hooks) : nullptr;
  return python ? object_in(python->*member(PackHook())) : nullptr;
}

/// The history of what is saved behind hooks; else null.
inline const Node* history_of(const torch::autograd::SavedVariable& saved) {
  return (saved.*member(HistoryOfSaved())).get();
}

/// The accumulator of a leaf that is saved behind hooks, also when it has been let go of; else
/// null.
inline const Node* accumulator_of(const torch::autograd::SavedVariable& saved) {
  return (saved.*member(AccumulatorOfSaved())).get();
}

}  // namespace zbp
