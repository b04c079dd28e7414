// One run of libtorch's engine over a graph that zbpipe has changed.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <vector>

#include "shim/torch/compat.h"

namespace zbp {

/// A run of the engine, and when the last thread has left it.
///
/// Note [A run that raised]
/// On an error the engine returns at once. A thread of another device may still be running a
/// node, one of ours or of the user's graph, whose edges I puts back and whose task W's next call reads. So whoever ran
/// it waits for such threads: the engine's own record of the run, which each of them holds, holds a callback for its
/// end, which holds this.
struct Run {
  std::atomic<bool> has_begun = false;
  std::promise<void> is_over;
};

/// Where a run starts: sends `grads` along `edges`, one each.
///
/// Unlike a root that the engine makes, it lets go of the gradients as it sends them, and it tells
/// the engine which nodes are `represented` in the run by stand-ins: hooks that count (as
/// torch.autograd.graph.register_multi_grad_hook does) ask whether a node will run.
class Start : public Node {
 public:
  /// `first`, if any, is called within the run before anything else.
  Start(edge_list&& edges, variable_list&& grads, std::vector<Node*>&& represented,
        std::function<void()>&& first = {});

  /// To be told, if the run begins, of its end.
  void tell(std::shared_ptr<Run> run) { run_ = std::move(run); }

  /// The gradient that the engine is given for the start itself; it goes nowhere.
  static at::Tensor seed();

  std::string name() const override;
  /// Compiled autograd asks every node for its arguments first; ours cannot be compiled.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override;

 protected:
  variable_list apply(variable_list&& grads) override;

 private:
  variable_list grads_;
  std::vector<Node*> represented_;  // borrowed for the run
  std::function<void()> first_;
  std::shared_ptr<Run> run_;
};

/// Runs the engine from `start`, accumulating. Called without the GIL. No thread works for the run any more when this
/// returns or throws.
void run_engine(NodeRef<Start> start, bool keep_graph);

}  // namespace zbp
