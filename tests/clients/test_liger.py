"""Liger's kernels: Functions that know nothing of zbpipe and run whole in I, and the products around them. They are
Triton's, which a CPU runs where TRITON_INTERPRET=1 is set before Triton is imported, as `make clients` does."""

import copy
import os
import types

import pytest
import torch
from support.oracle import close, needs_zbpipe
from torch import nn

import zbpipe
from zbpipe._tasks import tasks_of  # which pass computes a weight's gradient

pytest.importorskip("triton", reason="needs Triton")
liger = pytest.importorskip("liger_kernel.transformers", reason="needs liger-kernel")

pytestmark = [needs_zbpipe, pytest.mark.filterwarnings("ignore")]
WIDTH, ROWS, WORDS = 64, 16, 128
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Head(nn.Module):
    """A product, then the fused product and loss. It computes its gradients in its forward, and keeps them."""

    def __init__(self):
        super().__init__()
        self.up, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WORDS, WIDTH) / WIDTH)
        self.loss = liger.LigerFusedLinearCrossEntropyLoss()

    def forward(self, x):
        return self.loss(self.weight, self.up(x), torch.arange(ROWS, device=x.device) * 7 % WORDS)


def swiglu():
    sizes = types.SimpleNamespace(hidden_size=WIDTH, intermediate_size=2 * WIDTH, hidden_act="silu")
    return liger.LigerSwiGLUMLP(sizes)


def between(norm):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Linear(WIDTH, WIDTH))


# What makes a stage, and the kinds of its weights' tasks.
STAGES = {
    "fused linear cross entropy": (Head, {"product", "whole"}),
    "SwiGLU": (swiglu, {"product"}),
    "RMSNorm": (lambda: between(liger.LigerRMSNorm), {"product", "whole"}),
    "LayerNorm": (lambda: between(liger.LigerLayerNorm), {"product", "whole"}),
}
# The interpreter hands the others a float where they expect a scalar.
INTERPRETED = {"fused linear cross entropy"} if os.environ.get("TRITON_INTERPRET") == "1" else ()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in INTERPRETED else pytest.mark.cuda) for name in STAGES]
)
def test_gradients_and_who_computes_them(name):
    torch.manual_seed(0)
    make, expected = STAGES[name]
    stage = make().to(DEVICE)
    whole = copy.deepcopy(stage)
    xs = [torch.randn(ROWS, WIDTH, device=DEVICE, requires_grad=True) for _ in range(2)]
    refs = [x.detach().clone().requires_grad_() for x in xs]
    outputs = [stage(x) for x in xs]
    groups = []
    for x, output in zip(xs, outputs, strict=True):
        groups += zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], stage.parameters())[1]
    assert {task[1] for group in groups for task in tasks_of(group)} == expected
    zbpipe.stage_backward_weight(stage.parameters(), groups)
    for ref in refs:
        output = whole(ref)
        output.backward(torch.ones_like(output))
    close([x.grad for x in xs], [ref.grad for ref in refs], "inputs")
    close([w.grad for w in stage.parameters()], [w.grad for w in whole.parameters()], "weights")
