// What nodes between tasks and weights have saved: noted and pinned in I.

#include <c10/core/StreamGuard.h>

#include "shim/group/facts.h"
#include "shim/group/saved.h"
#include "shim/torch/detach.h"
#include "shim/torch/gil.h"
#include "shim/torch/nodes.h"

namespace zbp {

void for_each_saved_outside(Node& node, c10::function_ref<void(const SavedVariable&)> visit) {
  if (const Saver saver(node, /*waits=*/false); saver.is_locked()) {
    for (const SavedVariable* one : saver.all()) {
      visit(*one);
    }
  }
}

/// What the group's outside nodes have saved. Behind hooks: I unpacks it, lest W computes a region
/// again. Views that keep their bases for nothing: I makes them let go. Other tensors: their
/// versions, which W's run would find wrong only after it has added some gradients.
void note_saved_outside(Group& group) {
  for (const Outside& outside : group.outside) {
    Node& node = *outside.node;
    if (saves_nothing(node)) {
      continue;
    }
    // Another microbatch's I may exchange what the node has saved, its W release it.
    const Saver saver(node);
    const auto all = saver.all();
    for (size_t number = 0; number < all.size(); ++number) {
      if (all[number]->has_hooks()) {
        group.unpinned_outside.emplace_back(ref_of(node), number);
        continue;
      }
      const at::Tensor tensor = all[number]->unpack(ref_of(saver.node()));
      // A Function's is its backward's to look at, as it was saved.
      if (tensor.defined() && is_generated(saver.node()) && keeps_base_unused(tensor)) {
        group.unpinned_outside.emplace_back(ref_of(node), number);
      } else if (has_version(tensor)) {
        group.saved_outside.emplace_back(tensor);
      }
    }
  }
}

namespace {

/// Leaves it packed for W; false, and nothing was done, if W cannot unpack it. A checkpoint's is
/// unpacked here all the same: its region, once computed in I, would keep the tensor until somebody
/// unpacks it. A Function's stays as it is: its backward may look at what it unpacks.
bool leave_outside(Saver& saver, SavedVariable& saved, Group& group) {
  const PackedPtr packed = packed_in(saved);
  if (!packed) {
    return false;
  }
  group.packed_outside.push_back(packed);
  if (!is_python_function(saver.node())) {
    saver.leave(saved, packed);
  }
  const AcquireGil gil;
  if (is_checkpoints(packed->unpack_hook)) {
    packed->unpack();
  }
  group.outside_recomputed_for = std::max(group.outside_recomputed_for, saver.node().sequence_nr());
  return true;
}

void pin_one(Group& group, Node& node, size_t number) {
  // Another microbatch's I may see to the same node, and its W may have released it.
  Saver saver(node);
  const auto all = [&] {
    const AcquireGil gil;
    return saver.all();
  }();
  TORCH_CHECK(number < all.size(), torch::autograd::ERR_BACKWARD_TWICE);
  SavedVariable& saved = *all[number];
  if (saved.has_hooks() && group.reads && leave_outside(saver, saved, group)) {
    return;
  }
  at::Tensor tensor = saver.unpack(saved);
  if (tensor.defined() && keeps_base_unused(tensor)) {
    tensor = saver.pin(saved);
  }
  if (has_version(tensor)) {
    group.saved_outside.emplace_back(tensor);
  }
}

}  // namespace

void pin_outside(Group& group) {
  const auto unpinned = [&group] {
    const std::lock_guard<std::mutex> lock(group.mutex);
    return std::exchange(group.unpinned_outside, {});
  }();
  std::optional<c10::Stream> here, there;  // of the last node
  const auto come_back = [&] {
    if (there) {
      order(*there, *here);
    }
  };
  for (const auto& [node, number] : unpinned) {
    if (const auto its = stream_of(*node); its != there) {
      come_back();
      there = its;
      here = its ? std::optional(current_stream(its->device())) : its;
      if (there) {
        order(*here, *there);
      }
    }
    const c10::OptionalStreamGuard on_its_stream(there);
    pin_one(group, *node, number);
  }
  come_back();
}

}  // namespace zbp
