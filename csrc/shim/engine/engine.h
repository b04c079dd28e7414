// One run of libtorch's engine over a graph that zbpipe has changed.
#pragma once

#include <functional>
#include <vector>

#include "shim/torch/compat.h"

namespace zbp {

/// Runs the engine: sends `grads` along `edges`, one each, accumulating. `represented`: nodes of
/// the user's graph in whose place others run. `first`, if any, is called within the run before
/// anything else. Called without the GIL. No thread works for the run any more when this returns or
/// throws.
void run_engine(edge_list&& edges, variable_list&& grads, std::vector<Node*>&& represented,
                bool keep_graph, std::function<void()>&& first = {});

}  // namespace zbp
