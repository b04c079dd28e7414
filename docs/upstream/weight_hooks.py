"""Hooks of a weight's accumulation never run in W: an optimizer in a post-accumulate hook never steps.

    python weight_hooks.py

stage_backward_weight asks the engine for gradients and adds them to .grad itself, so no AccumulateGrad node runs, and
with it no register_post_accumulate_grad_hook. Silent.

The minimal patch: run the accumulators, torch.autograd.backward(..., inputs=weights), instead of torch.autograd.grad.
"""

import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


def steps(split):
    stage, counted = nn.Linear(4, 4, bias=False), []
    stage.weight.register_post_accumulate_grad_hook(lambda weight: counted.append(1))
    x = torch.ones(2, 4, requires_grad=True)
    out = stage(x)
    if split:
        _, groups = stage_backward_input([out.sum()], None, [x], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    else:
        out.sum().backward()
    return len(counted)


if __name__ == "__main__":
    print(f"torch {torch.__version__}: calls of the hook: right {steps(False)}, torch's module {steps(True)}")
