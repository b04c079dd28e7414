#include "shim/engine/engine.h"

#include <atomic>
#include <future>
#include <unordered_set>

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/engine.h>

namespace zbp {

namespace {

/// A run of the engine, and when the last thread has left it.
///
/// Note [A run that raised]
/// On an error the engine returns at once. A thread of another device may still be running a node,
/// one of ours or of the user's graph, whose edges I puts back and whose task W's next call reads.
/// So whoever ran it waits for such threads: the engine's own record of the run, which each of them
/// holds, holds a callback for its end, which holds this.
struct Run {
  std::atomic<bool> has_begun = false;
  std::promise<void> is_over;
};

at::Tensor seed() {
  return at::detail::empty_cpu({}, at::kFloat);  // at::zeros would ask the modes that are on
}

/// Where a run starts.
///
/// Unlike a root that the engine makes, it lets go of the gradients as it sends them, and it tells
/// the engine which nodes are `represented` in the run by stand-ins: hooks that count (as
/// torch.autograd.graph.register_multi_grad_hook does) ask whether a node will run.
class Start : public Node {
 public:
  // As libtorch's GraphRoot: with the gradients' metadata the engine finds the streams that they
  // are on.
  Start(edge_list&& edges, variable_list&& grads, std::vector<Node*>&& represented,
        std::function<void()>&& first, std::shared_ptr<Run> run)
      : Node(UINT64_MAX, std::move(edges)),
        grads_(std::move(grads)),
        represented_(std::move(represented)),
        first_(std::move(first)),
        run_(std::move(run)) {
    add_input_metadata(seed());
    for (const at::Tensor& grad : grads_) {
      if (grad.defined()) {
        add_input_metadata(grad);
      }
    }
  }

  std::string name() const override { return "zbpipe::Start"; }

  /// Compiled autograd asks every node for its arguments first; ours cannot be compiled.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "zbpipe's passes cannot run under compiled autograd; leave "
                                "torch._dynamo.compiled_autograd off around them");
  }

 protected:
  variable_list apply(variable_list&& /*grads*/) override {
    namespace ag = torch::autograd;
    run_->has_begun = true;
    ag::Engine::get_default_engine().queue_callback(
        [end = std::shared_ptr<Run>(run_.get(), [run = run_](Run*) { run->is_over.set_value(); })] {
        });
    // Nothing else runs yet, so nobody reads the set.
    auto* nodes =
        const_cast<std::unordered_set<Node*>*>(ag::get_current_graph_task_nodes_in_graph());
    nodes->insert(represented_.begin(), represented_.end());
    if (first_) {
      first_();
    }
    return std::move(grads_);
  }

 private:
  variable_list grads_;
  std::vector<Node*> represented_;  // borrowed for the run
  std::function<void()> first_;
  std::shared_ptr<Run> run_;
};

}  // namespace

void run_engine(edge_list&& edges, variable_list&& grads, std::vector<Node*>&& represented,
                bool keep_graph, std::function<void()>&& first) {
  const auto run = std::make_shared<Run>();
  auto start = make_node<Start>(std::move(edges), std::move(grads), std::move(represented),
                                std::move(first), run);
  try {
    // With no `outputs` the engine needs no exec_info: every edge that is left is to be followed.
    // The gradient for the start itself goes nowhere.
    torch::autograd::Engine::get_default_engine().execute({Edge(std::move(start), 0)}, {seed()},
                                                          keep_graph, /*create_graph=*/false,
                                                          /*accumulate_grad=*/true);
  } catch (...) {
    if (run->has_begun) {
      run->is_over.get_future().wait();
    }
    throw;
  }
}

}  // namespace zbp
