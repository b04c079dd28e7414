#include "shim/pass/start.h"

#include <unordered_set>

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/engine.h>

namespace zbp {

// As libtorch's GraphRoot: with the gradients' metadata the engine finds the streams that they are on.
Start::Start(edge_list&& edges, variable_list&& grads, std::vector<Node*>&& represented,
             std::function<void()>&& first)
    : Node(UINT64_MAX, std::move(edges)),
      grads_(std::move(grads)),
      represented_(std::move(represented)),
      first_(std::move(first)) {
  add_input_metadata(seed());
  for (const at::Tensor& grad : grads_) {
    if (grad.defined()) {
      add_input_metadata(grad);
    }
  }
}

at::Tensor Start::seed() {
  return at::detail::empty_cpu({}, at::kFloat);  // at::zeros would ask the modes that are on
}

std::string Start::name() const {
  return "zbpipe::Start";
}

void Start::compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "zbpipe's passes cannot run under compiled autograd; leave "
                              "torch._dynamo.compiled_autograd off around them");
}

variable_list Start::apply(variable_list&& /*grads*/) {
  run_->has_begun = true;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [end = std::shared_ptr<Run>(run_.get(), [run = run_](Run*) { run->is_over.set_value(); })] {
      });
  // Nothing else runs yet, so nobody reads the set.
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const_cast<std::unordered_set<Node*>*>(nodes)->insert(represented_.begin(), represented_.end());
  if (first_) {
    first_();
  }
  return std::move(grads_);
}

void run_engine(NodeRef<Start> start, bool keep_graph) {
  const auto run = std::make_shared<Run>();
  start->tell(run);
  try {
    // With no `outputs` the engine needs no exec_info: every edge that is left is to be followed.
    torch::autograd::Engine::get_default_engine().execute(
        {Edge(std::move(start), 0)}, {Start::seed()}, keep_graph, /*create_graph=*/false,
        /*accumulate_grad=*/true);
  } catch (...) {
    if (run->has_begun) {
      run->is_over.get_future().wait();
    }
    throw;
  }
}

}  // namespace zbp
