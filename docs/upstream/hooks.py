"""A hook on a tensor inside the stage runs once per engine run: twice or more, or never.

    python hooks.py

I runs the engine once, and W once more per group of weights, over the same nodes: a hook on a tensor between two
layers is called in I and again in W. A hook that scales a gradient scales
what I and W compute, each time it runs. Silent.

The minimal patch: W starts behind what I has computed, from gradients that I keeps, and runs no node twice.
"""

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


def calls(split):
    torch.manual_seed(0)
    stage, counted = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), []
    x = torch.ones(2, 4, requires_grad=True)
    hidden = stage[0](x)
    hidden.register_hook(lambda grad: counted.append(1))
    out = stage[2](stage[1](hidden))
    if split:
        _, groups = stage_backward_input([out.sum()], None, [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    else:
        out.sum().backward()
    return len(counted)


if __name__ == "__main__":
    print(f"torch {torch.__version__}: calls of the hook: right {calls(False)}, torch's module {calls(True)}")
