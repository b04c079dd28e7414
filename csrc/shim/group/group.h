// What I leaves for W: parameter groups, their weight tasks and the weights that they serve.
//
// C knows a group by its layout and book (zbp_book.h); tasks, weights and outside nodes have the
// layout's indices.
//
// Ownership contract: a Group owns everything that its W needs: the matrices and gradients
// (detached, so that none of them keeps the graph), the nodes that W runs again, the edges towards
// the weights and the accumulators behind them. What refers back to a Group is `owned`, until the
// caller lets go, and perhaps what Functions have handed over. During a run, and only then,
// stand-ins, task nodes and sinks share ownership of the Group, so that a worker thread of the
// engine that is still busy when another one failed does not write into freed memory.
//
// Threads: a Group is used by one pass at a time; the bindings see to that.
#pragma once

#include <algorithm>
#include <variant>

#include <c10/core/SafePyObject.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "core/pass/zbp_book.h"
#include "core/pass/zbp_kind.h"
#include "shim/group/kept.h"

namespace zbp {

/// One edge of a task towards the weights: the record beside its zbp_face.
struct Face {
  Edge edge;  // where it leads
  Kept grad;  // its gradient; undefined while W has still to compute it
};

/// What a node has saved behind hooks (checkpointing, offloading), left packed until W.
struct Packed {
  c10::SafePyObject unpack_hook;
  c10::SafePyObject data;
  std::vector<Version> arguments;  // what computing it again reads

  /// Takes the GIL. Raises what the hook raises.
  at::Tensor unpack() const;
};
using PackedPtr = std::shared_ptr<const Packed>;

/// What the backward of a Function handed over in I: a Python callable that computes in W the
/// gradients at some of its task's faces. See work.h.
struct Work {
  struct Call {
    c10::SafePyObject function;
    c10::SafePyObject arguments;      // a tuple
    c10::SafePyObject autocast;       // as it was there: see zbpipe/_work.py
    size_t count;                     // of the gradients that it returns
    SmallVector<Kept, 2> saved;       // the tensors in it that have memory of their own
    SmallVector<Kept, 2> views;       // those with a parameter's, which cost nothing to keep
    SmallVector<Kept, 2> parameters;  // those that are one, and the weights behind the views
  };
  std::unique_ptr<const Call> call;  // null once it has run, unless it is to run again
  SmallVector<int32_t, 2> faces;     // per gradient: its face, -1 where nobody wants it
  SmallVector<Kept, 2> grads;        // what it returned, per entry of `faces`
  bool is_done = false;
  bool is_checked = false;  // the gradients fit their faces

  /// Whether it computes a gradient at face number `face`.
  bool serves(size_t face) const {
    return std::count(faces.begin(), faces.end(), static_cast<int32_t>(face)) != 0;
  }
};

/// A factor that an operation insists on and W does not read: only its shape is kept.
struct Blank {
  torch::autograd::SavedVariable* saved;  // a deferred node's, borrowed
  at::Tensor weight;                      // it is a weight itself, which costs nothing to keep
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::TensorOptions options;
};

/// A tensor that the node has saved; or W unpacks it.
using Saved = std::variant<Kept, PackedPtr>;

/// W computes the weight's gradient by one operation on the node's output gradient and the other
/// factor: matrices, grouped or not, or a convolution's input.
struct Product {
  Kept output_grad;
  Saved other;
  Saved offsets;                        // of a grouped product's rows
  std::unique_ptr<const Blank> weight;  // a convolution's
  uint32_t matrix_slot;                 // the edge of the weight matrix
  bool weight_is_left;                  // the weight is the left factor
  variable_list made;  // a convolution's gradients, by its edges, until their faces ask for them
};

/// W runs the node again.
struct Deferred {
  SmallVector<Kept, 1> output_grads;  // per input of the node
  SmallVector<Kept, 1> saved;         // by the node, and W will read it
  SmallVector<PackedPtr, 1> packed;   // by the node, which shares it
  std::vector<Blank> blanks;
  bool is_alone = false;  // I is through with the node: nobody else runs it
};

/// W starts from gradients that the faces have, and from work; also a root's.
using Given = std::vector<Work>;

struct Task {
  Task(zbp_layout& of_layout, uint32_t of_number, NodePtr of_node);

  zbp_task& plan() const { return layout->task[number]; }
  zbp_face& plan(size_t f) const { return layout->face[plan().face_begin + f]; }
  uint8_t kind() const { return plan().kind; }  // ZBP_TASK_*
  std::string name() const { return node ? node->name() : name_of_gone; }
  /// The number of the face that is this edge of the node; -1 if none is.
  int32_t face_at(uint32_t slot) const { return zbp_layout_face_at(layout, number, slot); }

  zbp_layout* layout;  // the group's, where the task's numbers are; borrowed
  uint32_t number;
  NodePtr node;              // once I is over, null for one that W does not run or ask
  std::string name_of_gone;  // that node's
  SmallVector<Face, 2> face;
  std::variant<Given, Product, Deferred> work;
  // Has its device and stream, where what is kept is not on the CPU. See Note [Streams].
  std::unique_ptr<const torch::autograd::InputMetadata> device;
};

/// None for products and deferred tasks.
inline c10::ArrayRef<Work> works_of(const Task& task) {
  const auto* given = std::get_if<Given>(&task.work);
  return given ? c10::ArrayRef<Work>(*given) : c10::ArrayRef<Work>();
}

inline std::optional<c10::Stream> stream_of(const Task& task) {
  return task.device ? std::optional(task.device->stream()) : std::nullopt;
}

/// What a tensor is to the task that holds it.
enum class Role : uint8_t {
  matrix,
  output_grad,
  saved,
  kept_grad,
  saved_for_work,
  view_for_work,  // of a parameter, whose memory it is
  grad_of_work,
};

/// Calls `visit(kept, role, serves)` with every tensor that the task's W reads. serves(f): the
/// gradient at face number f is computed from it.
template <class Visit>
void for_each_kept(const Task& task, const Visit& visit) {
  const auto visit_all = [&visit](c10::ArrayRef<Kept> list, Role role, const auto& serves) {
    for (const Kept& kept : list) {
      visit(kept, role, serves);
    }
  };
  const auto all_faces = [](size_t) { return true; };
  if (const auto* product = std::get_if<Product>(&task.work)) {
    const auto at_matrix = [&](size_t f) { return task.plan(f).slot == product->matrix_slot; };
    if (const auto* matrix = std::get_if<Kept>(&product->other)) {
      visit(*matrix, Role::matrix, at_matrix);
    }
    if (const auto* offsets = std::get_if<Kept>(&product->offsets)) {
      visit(*offsets, Role::saved, at_matrix);
    }
    visit(product->output_grad, Role::output_grad, all_faces);
  } else if (const auto* deferred = std::get_if<Deferred>(&task.work)) {
    visit_all(deferred->output_grads, Role::output_grad, all_faces);
    visit_all(deferred->saved, Role::saved, all_faces);
  }
  for (size_t f = 0; f < task.face.size(); ++f) {
    visit(task.face[f].grad, Role::kept_grad, [f](size_t other) { return other == f; });
  }
  for (const Work& work : works_of(task)) {
    const auto serves = [&work](size_t f) { return work.serves(f); };
    if (work.call) {
      visit_all(work.call->saved, Role::saved_for_work, serves);
      visit_all(work.call->views, Role::view_for_work, serves);
    }
    visit_all(work.grads, Role::grad_of_work, serves);
  }
}

/// Calls `visit` with what of the task stays packed until W.
template <class Visit>
void for_each_packed(const Task& task, const Visit& visit) {
  if (const auto* deferred = std::get_if<Deferred>(&task.work)) {
    for (const PackedPtr& packed : deferred->packed) {
      visit(*packed);
    }
  } else if (const auto* product = std::get_if<Product>(&task.work)) {
    for (const Saved* saved : {&product->other, &product->offsets}) {
      if (const auto* packed = std::get_if<PackedPtr>(saved)) {
        visit(**packed);
      }
    }
  }
}

struct Weight {
  NodeRef<torch::autograd::AccumulateGrad> accumulator;
  at::Tensor grad;  // the sum of its gradients, while it waits to be added: see zbp_book_weight
  at::Tensor main_grad;  // for the time of a W: where it adds instead of .grad
};

/// The one that it adds on.
inline std::optional<c10::Stream> stream_of(const Weight& weight) {
  return runs_late(weight.accumulator->variable.device()) ? stream_of(*weight.accumulator)
                                                          : std::nullopt;
}

/// A node between the tasks and the weights. Other groups may share it.
struct Outside {
  Node* node;  // borrowed: alive as long as the faces of the group
  // It has outputs that are stage inputs: see Note [Other outputs of an input's node].
  bool makes_input = false;
};

struct Group : zbp_group, std::enable_shared_from_this<Group> {
  Group() : zbp_group{} {}
  ~Group();
  C10_DISABLE_COPY_AND_ASSIGN(Group);

  std::shared_ptr<Group> owned;  // itself, while the caller owns it: until zbp_group_free
  bool was_captured = false;     // I ran within a capture of the device's: see Note [Streams]
  SmallVector<Task, 1> tasks;
  Streams streams;
  SmallVector<Weight, 2> weights;
  std::vector<Outside> outside;
  // What I has still to see to: what such a node has saved behind hooks, or as a view that keeps
  // its base for nothing; by its number among the saver's.
  std::vector<std::pair<NodePtr, size_t>> unpinned_outside;
  std::vector<PackedPtr> packed_outside;  // what W computes again for such nodes
  std::vector<Version> saved_outside;     // by nodes outside the closure
  std::shared_ptr<const Reads> reads;     // only if W may compute regions again
  // Sequence number of the last node outside for which W computes a region again.
  uint64_t outside_recomputed_for = 0;
  std::mutex mutex;  // of what several stand-ins of an I use: unpinned_outside, missing, waiting
  // In I, where there are several tasks: per weight, and per outside node behind these, how many
  // faces' gradients have still to come; and gradients, by their faces, that wait for the last one.
  // See Note [Whose memory a gradient has].
  std::vector<uint32_t> missing, waiting;
  bool adds_to_main_grad = false;  // the policy says so
  // Stage outputs that W may read: a node has saved them, or W computes a region again. The last
  // group that shares one detaches it, after its W.
  using Output = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::vector<std::shared_ptr<const Output>> outputs;

  /// Once the layout is there, before I runs.
  void expect();
  /// The task has run in I, and the gradients at these of its faces are to be owned: those of them,
  /// and of what waits, to which no other is still to come.
  SmallVector<uint32_t, 2> arrive(const Task& task, c10::ArrayRef<uint32_t> faces);
  /// Gives the gradients at the faces memory of their own, if others than `known` have it, too.
  void own(c10::ArrayRef<uint32_t> faces, c10::ArrayRef<at::Tensor> known);

  /// The weights themselves, in their order.
  variable_list variables() const;
  /// Lets go of everything that W read; so do the nodes that only W could still run, whoever refers
  /// to them.
  void release() noexcept;
  /// Of the stage outputs that no other group reads. Takes the GIL.
  void detach_outputs() noexcept;
  /// True if W may run what Python hooks have packed: a region computed again may read any tensor
  /// of the forward.
  bool leaves_packed() const;
  /// Of the nodes for which W computes a region again, the highest sequence number; 0 if there are
  /// none. What is computed for a node has been computed before it in the forward.
  uint64_t recomputed_for() const;
  /// At the end of I: finds the streams of its tasks, of what they keep, and of its weights.
  void find_streams();
};

using GroupPtr = std::shared_ptr<Group>;

/// The group that C knows by its beginning.
inline Group& group_of(zbp_group* group) {
  return static_cast<Group&>(*group);
}
inline const Group& group_of(const zbp_group* group) {
  return static_cast<const Group&>(*group);
}

}  // namespace zbp
