"""torchao's float8 linear layers, whose Function knows nothing of zbpipe and runs whole in I."""

import copy

import pytest
import torch
from support.oracle import needs_zbpipe
from torch import nn

import zbpipe

pytestmark = [needs_zbpipe, pytest.mark.filterwarnings("ignore")]

float8 = pytest.importorskip("torchao.float8", reason="needs torchao")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("emulates", [True, False])
def test_gradients_of_float8_layers(dtype, emulates):
    layers = nn.Sequential(nn.Linear(64, 128, bias=False), nn.GELU(), nn.Linear(128, 64, bias=False)).to(dtype)
    config = float8.Float8LinearConfig(emulate=emulates)
    stage = float8.convert_to_float8_training(layers, config=config)
    whole = copy.deepcopy(stage)
    assert type(stage[0]).__name__ == "Float8Linear"
    for _ in range(2):
        x = torch.randn(32, 64, dtype=dtype, requires_grad=True)
        ref = x.detach().clone().requires_grad_()
        output = stage(x)
        grad = torch.randn_like(output)
        _, groups = zbpipe.stage_backward_input([output], [grad], [x], stage.parameters())
        zbpipe.stage_backward_weight(stage.parameters(), groups)
        whole(ref).backward(grad)
        assert torch.equal(x.grad, ref.grad)
        for got, expected in zip(stage.parameters(), whole.parameters(), strict=True):
            assert torch.equal(got.grad, expected.grad)
