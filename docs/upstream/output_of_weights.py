"""A stage output that depends on weights alone, a regularizer for example, gives no gradient.

    python output_of_weights.py

No path leads from such an output to a stage input, so I never comes by, and no group of W's begins there. Silent.

The minimal patch: a group for each root that reaches no input, from which W runs the engine.
"""

import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight


def gradient(split):
    weight, scale = torch.ones(4, 4, requires_grad=True), torch.ones(4, requires_grad=True)
    x = torch.ones(2, 4, requires_grad=True)
    outputs = [(x @ weight).sum(), (scale * scale).sum()]
    if split:
        _, groups = stage_backward_input(outputs, None, [x], iter([weight, scale]))
        stage_backward_weight(iter([weight, scale]), groups)
    else:
        torch.autograd.backward(outputs)
    return None if scale.grad is None else scale.grad[0].item()


if __name__ == "__main__":
    print(f"torch {torch.__version__}: scale.grad: right {gradient(False)}, torch's module {gradient(True)}")
