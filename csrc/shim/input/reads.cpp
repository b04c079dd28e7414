// The weights that W may read where it computes checkpointed regions again: noted in I, checked in
// W.

#include "shim/input/walk.h"

namespace zbp {

using torch::autograd::AccumulateGrad;

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
