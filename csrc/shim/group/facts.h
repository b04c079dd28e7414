// What is known about nodes, for the core to decide on. Called with the GIL held, but for
// is_plain_step().
#pragma once

#include "shim/group/group.h"

namespace zbp {

/// Of a split node, and of a node between it and the weights. See zbp_kind.h.
zbp_fact fact_of_split(Node& node);
zbp_fact fact_of_outside(Node& node);

/// True for the edge to a weight, or to what is computed from one, that is a matrix or more.
bool is_matrix(const Edge& edge);

/// True for a node that only lays one gradient out anew, copies or casts it.
bool is_layout(Node& node);

/// True for such a node that has no expanded elements to add up, and that no hook sees.
bool is_plain_step(Node& node);

/// True for a node of a kind that saves no tensor.
bool saves_nothing(Node& node);

/// True if a node that has not run yet has no saved tensors that running it would release; false
/// where this is not known.
bool has_saved_nothing(Node& node);

/// The plain steps behind an edge, the first `count` of them.
SmallVector<Node*, 4> path_behind(const Edge& edge, size_t count);

/// Those between a face and its weight. Alive as long as the face.
inline SmallVector<Node*, 4> path_of(const Task& task, size_t f) {
  const zbp_face& plan = task.plan(f);
  return path_behind(task.face[f].edge, zbp_layout_has_path(&plan) ? plan.steps : 0);
}

/// `grad`, which has the shape of the face's edge, laid out as the weight behind its path, by
/// operations of our own: libtorch's nodes ask the run of the engine that the thread is in.
at::Tensor along_path(const Task& task, size_t f, at::Tensor grad);

}  // namespace zbp
