"""Both passes of a split backward in one captured CUDA graph, and W on a stream of its own. Needs a GPU.

python examples/cuda_graph.py
"""

import copy
import sys

import torch
from torch import nn

import zbpipe

if not torch.cuda.is_available():
    print("no GPU here: nothing was run")
    sys.exit()

torch.manual_seed(0)
stage = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).cuda()
reference = copy.deepcopy(stage)
x = torch.randn(16, 64, device="cuda", requires_grad=True)
grad = torch.ones(16, 64, device="cuda")
for weight in stage.parameters():
    weight.grad = torch.zeros_like(weight)  # a graph adds to the same memory each time


def step():
    output = stage(x)
    dinputs, groups = zbpipe.stage_backward_input([output], [grad], [x], stage.parameters())
    # ... send dinputs[0] ...
    zbpipe.stage_backward_weight(stage.parameters(), groups)
    return dinputs[0]


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    step()  # a warm-up: the first call makes what a capture cannot make
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for weight in stage.parameters():
    weight.grad.zero_()
for _ in range(2):
    graph.replay()

# Without a graph W may run on any stream or thread: W starts behind its caller's stream, which waits for W.
output = stage(x)
_, groups = zbpipe.stage_backward_input([output], [grad], [x], stage.parameters())
with torch.cuda.stream(side):
    zbpipe.stage_backward_weight(stage.parameters(), groups)
torch.cuda.current_stream().wait_stream(side)

for _ in range(3):
    reference(x.detach()).backward(grad)
for weight, wanted in zip(stage.parameters(), reference.parameters(), strict=True):
    torch.testing.assert_close(weight.grad, wanted.grad)
print("gradients of 3 steps equal those of ordinary backwards")
