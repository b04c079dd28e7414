"""torchao's float8 and MXFP8 layers, by its emulation: their Functions know nothing of zbpipe and run whole in I. What
zbpipe.compile makes of them is split."""

import copy
import functools

import pytest
import torch
from support.oracle import needs_zbpipe
from support.pipelines import Case, Model, assert_close, pipelined, ranks_of, unpipelined
from torch import nn

import zbpipe
from zbpipe._tasks import tasks_of  # which pass computes a weight's gradient

float8 = pytest.importorskip("torchao.float8", reason="needs torchao")
mx = pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear", reason="needs torchao's MXFP8")
grouped = pytest.importorskip("torchao.prototype.moe_training.mxfp8_grouped_mm", reason="needs torchao's MXFP8")
EMULATED, RCEIL = mx.KernelPreference.EMULATED, mx.ScaleCalculationMode.RCEIL
WIDTH, ROWS, WORLD = 64, 64, 2


def float8_layers(recipe, dtype):
    layers = nn.Sequential(nn.Linear(WIDTH, 128, bias=False), nn.GELU(), nn.Linear(128, WIDTH, bias=False)).to(dtype)
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    return float8.convert_to_float8_training(layers, config=config)


class MxLinear(nn.Linear):
    def forward(self, x):
        return mx._to_mxfp8_then_scaled_mm(x, self.weight, EMULATED, RCEIL)


class MxExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, WIDTH, WIDTH, dtype=torch.bfloat16) / WIDTH)

    def forward(self, x):
        ends = torch.tensor([x.shape[0] // 2, x.shape[0]], dtype=torch.int32)
        return grouped._to_mxfp8_then_scaled_grouped_mm(
            x, self.weight.transpose(-2, -1), offs=ends, kernel_preference=EMULATED, scale_calculation_mode=RCEIL
        )


def mx_layers():
    first, last = MxLinear(WIDTH, 128, bias=False), MxLinear(128, WIDTH, bias=False)
    return nn.Sequential(first, nn.GELU(), last).to(torch.bfloat16)


LAYERS = {
    "tensorwise": functools.partial(float8_layers, "tensorwise", torch.bfloat16),
    "tensorwise, float32": functools.partial(float8_layers, "tensorwise", torch.float32),
    "rowwise": functools.partial(float8_layers, "rowwise", torch.bfloat16),
    "rowwise_with_gw_hp": functools.partial(float8_layers, "rowwise_with_gw_hp", torch.bfloat16),
    "mxfp8": mx_layers,
    "mxfp8 experts": MxExperts,
}


compiled = functools.partial(zbpipe.compile, backend="aot_eager")


def stages_of(make, count):
    torch.manual_seed(1)
    return [make() for _ in range(count)]


def batch(dtype, step):
    torch.manual_seed(100 + step)
    return torch.randn(2 * ROWS, WIDTH, dtype=dtype), torch.randn(2 * ROWS, WIDTH, dtype=dtype)


def model(name):
    dtype = torch.float32 if name.endswith("float32") else torch.bfloat16
    return Model(functools.partial(stages_of, LAYERS[name]), batch=functools.partial(batch, dtype), microbatches=2)


CASES = {
    f"{name}, {how}": Case(functools.partial(pipelined, model(name), "ScheduleInterleavedZeroBubble", **wrap))
    for name in LAYERS
    for how, wrap in (("eager", {}), ("compiled", {"wrap": compiled}))
}
ranks = ranks_of(__file__, CASES, WORLD)
pytestmark = [needs_zbpipe, pytest.mark.filterwarnings("ignore"), pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_and_who_computes_them(name, how):
    torch.manual_seed(0)
    stage = LAYERS[name]()
    whole = copy.deepcopy(stage)
    run = compiled(stage) if how == "compiled" else stage
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH, dtype=next(whole.parameters()).dtype, requires_grad=True)
        ref = x.detach().clone().requires_grad_()
        output = run(x)
        grad = torch.randn_like(output)
        _, groups = zbpipe.stage_backward_input([output], [grad], [x], stage.parameters())
        kinds = {task[1] for group in groups for task in tasks_of(group)}
        assert kinds == ({"handed over"} if how == "compiled" else {"whole"})
        zbpipe.stage_backward_weight(stage.parameters(), groups)
        whole(ref).backward(grad)
        assert torch.equal(x.grad, ref.grad)
        for got, expected in zip(stage.parameters(), whole.parameters(), strict=True):
            assert torch.equal(got.grad, expected.grad)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_as_the_model_does(case, ranks):
    assert_close(ranks.together(case), unpipelined(model(case.rpartition(",")[0]), 2 * WORLD))
