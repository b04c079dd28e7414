// What W will read beside what its groups hold: noted in I, checked in W.

#include <algorithm>

#include "shim/group/facts.h"
#include "shim/group/saved.h"
#include "shim/input/scene.h"
#include "shim/input/walk.h"
#include "shim/torch/detach.h"
#include "shim/torch/nodes.h"
#include "shim/torch/python.h"

namespace zbp {

using torch::autograd::AccumulateGrad;

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
        group.unpinned_outside.push_back({ref_of(node), number});
        continue;
      }
      const at::Tensor tensor = all[number]->unpack(ref_of(saver.node()));
      // A Function's is its backward's to look at, as it was saved.
      if (tensor.defined() && is_generated(saver.node()) && keeps_base_unused(tensor)) {
        group.unpinned_outside.push_back({ref_of(node), number});
      } else if (has_version(tensor)) {
        group.saved_outside.emplace_back(tensor);
      }
    }
  }
}

/// Where W computes regions again: what of the weights it may read, at their versions of now.
/// Whatever a region gives to one of its nodes was computed of what earlier nodes have read.
std::shared_ptr<const Reads> note_reads(const InputPassArgs& args, const Walk& walk,
                                        const zbp_graph& graph) {
  std::vector<uint64_t> first(graph.node_count, UINT64_MAX);
  for (uint32_t i = 0; i < graph.edge_count; ++i) {
    uint64_t& number = first[graph.edge[i].dst];
    number = std::min(number, walk.node(graph.edge[i].src).sequence_nr());
  }
  auto reads = std::make_shared<Reads>();
  const auto note = [&reads](const at::Tensor& weight, uint64_t sequence_nr) {
    if (has_version(weight)) {
      reads->weights.push_back({sequence_nr, Version(weight)});
    }
  };
  for (const at::Tensor& weight : args.frozen) {
    note(weight, 0);  // in no graph
  }
  for (uint32_t id = 0; id < graph.node_count; ++id) {
    if (auto* accumulator = as<AccumulateGrad>(walk.node(id)); accumulator && !walk.is_input(id)) {
      note(accumulator->variable, first[id]);
    }
  }
  std::sort(
      reads->weights.begin(), reads->weights.end(),
      [](const Reads::Read& a, const Reads::Read& b) { return a.sequence_nr < b.sequence_nr; });
  return reads;
}

}  // namespace zbp
