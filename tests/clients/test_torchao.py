"""torchao's float8 linear layers, whose Function knows nothing of zbpipe, split by policy(split_functions=True)."""

import copy

import pytest
import torch
from support.oracle import needs_zbpipe
from torch import nn

import zbpipe

pytestmark = [needs_zbpipe, pytest.mark.filterwarnings("ignore")]

float8 = pytest.importorskip("torchao.float8", reason="needs torchao")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("emulates", "held"), [(True, torch.float32), (False, torch.float8_e4m3fn)])
def test_products_of_float8_layers_run_in_w(dtype, emulates, held):
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
        with zbpipe.policy(split_functions=True):
            _, groups = zbpipe.stage_backward_input([output], [grad], [x], stage.parameters())
        accounts = [task for group in groups for task in group._account()]
        assert [kind for _, kind, _ in accounts] == ["handed over"] * 2
        assert all(held in {tensor[4] for tensor in tensors} for _, _, tensors in accounts)
        zbpipe.stage_backward_weight(stage.parameters(), groups)
        whole(ref).backward(grad)
        assert torch.equal(x.grad, ref.grad)
        for got, expected in zip(stage.parameters(), whole.parameters(), strict=True):
            assert torch.equal(got.grad, expected.grad)
