"""zbpipe.explain says what the input pass of a stage leaves to the weight pass, truly, and changes nothing."""

import json

import pytest
import torch
from support.functions import Asks, Product
from support.oracle import Stage, needs_zbpipe, weight
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe

pytestmark = [pytest.mark.drops_groups, needs_zbpipe]
f64 = torch.float64


def plans(stage, *shapes, **kwargs):
    explained = zbpipe.explain(stage, [torch.randn(shape, dtype=f64) for shape in shapes or ((3, 4),)], **kwargs)
    return {plan.name: plan for plan in explained.parameters}


def only_use(plan):
    (use,) = plan.uses
    return use


def test_a_linear_layer():
    explained = zbpipe.explain(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.randn(3, 5, 4))
    first, first_bias, second, _ = explained.parameters
    assert [plan.name for plan in explained.parameters] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert all(plan.runs_in == "W" and plan.note == "" for plan in explained.parameters)
    assert only_use(first).node == "AddmmBackward0"
    assert only_use(first).product == "[4, 15] @ [15, 6]"  # of the transposed weight, as the node sees it
    assert (first.flops, first_bias.flops, second.flops) == (2 * 4 * 15 * 6, 0, 2 * 6 * 15 * 2)
    assert explained.flops_in_w == first.flops + second.flops
    assert explained.groups == 2
    assert first.bytes == 4 * (15 * 4 + 15 * 6) and first.alone == 4 * 15 * 4
    assert explained.bytes_held == 4 * 15 * (4 + 6 + 6 + 2)


class Plain(Product):
    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.mT, x.mT @ grad


def matrix_alone(x, w, grad):
    """The matrix's gradient is handed over, the vector's returned."""
    return zbpipe.defer(lambda x, grad: x.mT @ grad, 1, (x, grad)), grad.sum(0)


def post_hook(m, x):
    h = x @ m.a
    h.grad_fn.register_hook(lambda *args: None)
    return h


I_REASONS = {
    "a custom Function": (
        lambda m, x: Plain.apply(x, m.a),
        {},
        "custom Function that defers nothing: runs whole in I",
    ),
    "a post hook": (post_hook, {}, "a hook on its node is owed all of its gradients at once"),
    "the policy": (lambda m, x: x @ m.a, {"defer": "nothing"}, "policy defer='nothing'"),
    "an unknown node": (
        lambda m, x: torch.nn.functional.bilinear(x, x, m.a[None].expand(2, 4, 4)),
        {},
        "the node is not known to compute its weights' gradients apart",
    ),
    "checkpointing": (
        lambda m, x: checkpoint(lambda x: x @ m.a, x, use_reentrant=False),
        {"checkpoint": "input_pass"},
        "the policy leaves what is checkpointed or packed to I (checkpoint)",
    ),
}


@pytest.mark.parametrize("name", I_REASONS)
def test_why_a_gradient_is_computed_in_the_input_pass(name):
    forward, choices, why = I_REASONS[name]
    with zbpipe.policy(**choices):
        plan = plans(Stage(forward, a=(4, 4)))["a"]
    assert plan.runs_in == "I"
    assert why in {use.why for use in plan.uses}
    assert plan.flops == 0


def test_vectors_wait_only_if_the_policy_says_so():
    stage = Stage(lambda m, x: torch.nn.functional.layer_norm(x, (4,), m.s, m.b) @ m.a, s=(4,), b=(4,), a=(4, 4))
    light = plans(stage)
    assert light["a"].runs_in == "W"
    assert {only_use(light[name]).why for name in "sb"} == {"a vector: policy defer='matrices'"}
    with zbpipe.policy(defer="all"):
        assert {plan.runs_in for plan in plans(stage).values()} == {"W"}


def test_a_function_that_hands_over():
    found = plans(Stage(lambda m, x: Asks.apply(x, m.a, m.b, matrix_alone), a=(4, 5), b=(5,)))
    assert only_use(found["a"]).why == "handed over by zbpipe.defer"
    assert found["a"].runs_in == "W" and found["a"].flops is None
    assert found["a"].bytes == 8 * (3 * 4 + 3 * 5)
    assert only_use(found["b"]).runs_in == "I"


def cast_twice(m, x):
    return x.float() @ m.a.half().float()


def cast_once_for_two(m, x):
    w = m.a.float()
    return (x.float() @ w).sin() @ w


def hooked(m, x):
    w = m.a.mT
    w.register_hook(lambda grad: None)
    return x @ w


WAYS = {
    "it is cast twice on its way": cast_twice,
    "it is computed by SinBackward0": lambda m, x: x @ m.a.sin(),
    "several gradients meet before its cast": cast_once_for_two,
    "a hook watches ": hooked,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_lies_between_a_weight_and_its_use(way):
    plan = plans(Stage(WAYS[way], a=(4, 4)))["a"]
    assert plan.runs_in == "W"
    assert plan.note.startswith(way)


def test_a_weight_that_moves_to_another_device_is_the_engines():
    x = torch.ones(3, 4, device="meta", requires_grad=True)
    w = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
    out = x @ w.to("meta", torch.float32)
    _, (group,) = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])
    (task,) = (task for task in group._described[2] if task[1] == 0)  # a product
    assert task[4][0][2] == "it is computed by ToCopyBackward0"


def test_hooks_that_watch_a_weight_are_named_and_not_called():
    stage = Stage(lambda m, x: x @ m.a + x @ m.b, a=(4, 4), b=(4, 4))
    called = []
    stage.a.register_hook(called.append)
    found = plans(stage)
    assert (found["a"].note, found["b"].note) == ("hooks watch it", "")
    assert called == []


def test_parameters_that_get_no_gradient():
    stage = Stage(lambda m, x: x @ m.a + (x @ m.c).detach(), a=(4, 4), b=weight(4).requires_grad_(False), c=(4, 4))
    found = plans(stage)
    assert (found["b"].note, found["c"].note) == ("frozen", "no gradient reaches it")
    assert found["b"].runs_in == found["c"].runs_in == ""
    assert found["b"].bytes == 0


def test_a_view_made_under_no_grad_takes_no_gradient():
    def forward(m, x):
        out = x @ m.a
        with torch.no_grad():
            view = out[:2]
        return out.sin(), view

    assert plans(Stage(forward, a=(4, 4)))["a"].runs_in == "W"
    with pytest.raises(TypeError, match="none of which requires a gradient"):
        plans(Stage(lambda m, x: forward(m, x)[1], a=(4, 4)))


def test_several_uses_of_one_weight():
    plan = plans(Stage(lambda m, x: Plain.apply(x @ m.a, m.a), a=(4, 4)))["a"]
    assert {use.runs_in for use in plan.uses} == {"I", "W"}
    assert plan.runs_in == "I and W"


def test_tied_weights_have_one_row():
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    (plan,) = zbpipe.explain(net, torch.randn(3, 4)).parameters
    assert plan.name == "0.weight"
    assert len(plan.uses) == 2


def test_a_weight_that_is_the_sum_of_two_shares_one_product():
    explained = zbpipe.explain(Stage(lambda m, x: x @ (m.a + m.b), a=(4, 5), b=(4, 5)), torch.randn(3, 4, dtype=f64))
    a, b = explained.parameters
    assert a.flops == b.flops == explained.flops_in_w == 2 * 3 * 4 * 5
    assert a.note == "it is computed by AddBackward0"


def test_a_first_stage():
    stage = Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4))
    explained = zbpipe.explain(stage, torch.randn(3, 4, dtype=f64), first_stage=True)
    assert {use.why for plan in explained.parameters for use in plan.uses} == {
        "no stage input is behind it: W runs its whole backward"
    }
    assert explained.notes == ()
    assert explained.bytes_held == 8 * 3 * 4 * 4, "what the three nodes have saved, and the output's gradient"


def test_what_the_module_does_not_list_is_counted():
    others = [torch.randn(4, 4, dtype=f64, requires_grad=True) for _ in range(2)]
    stage = Stage(lambda m, x: x @ m.a @ others[0] @ others[1], a=(4, 4))
    explained = zbpipe.explain(stage, torch.randn(3, 4, dtype=f64))
    assert [plan.name for plan in explained.parameters] == ["a"]
    (note,) = explained.notes
    assert note.startswith("2 more leaves of the graph, not among the module's parameters, which a patched stage's")


def test_excluded_parameters_are_the_modules_own():
    stage = Stage(lambda m, x: (x @ m.a).sin() @ m.b, a=(4, 4), b=(4, 4))
    with zbpipe.policy(exclude=[stage.b]):
        found = plans(stage)
    assert (found["a"].runs_in, found["b"].runs_in) == ("W", "I")
    assert {use.why for use in found["b"].uses} == {"policy exclude= names one of its parameters"}


def test_what_is_told_of_excluded_parameters_copies_none():
    stage = Stage(lambda m, x: x @ m.a, a=(4, 4))
    with zbpipe.policy(exclude=[stage.a]):
        explained = zbpipe.explain(stage, torch.randn(3, 4, dtype=f64))
    assert explained.policy.exclude[0] is stage.a
    with zbpipe.memory.record() as rec:
        assert explained.as_dict()["policy"]["exclude"]
    assert rec.allocated == 0


def test_as_dict_is_plain_data_and_str_is_a_table():
    stage = Stage(lambda m, x: Asks.apply(x @ m.c, m.a, m.b, matrix_alone).sin(), a=(4, 5), b=(5,), c=(4, 4))
    with zbpipe.policy(defer="all", exclude=[nn.Parameter(torch.ones(2))]):
        explained = zbpipe.explain(stage, torch.randn(3, 4, dtype=f64))
    data = json.loads(json.dumps(explained.as_dict()))
    assert data["bytes_held"] == explained.bytes_held
    assert [p["name"] for p in data["parameters"]] == ["a", "b", "c"]
    assert data["parameters"][0]["flops"] is None and data["parameters"][2]["runs_in"] == "W"
    assert data["policy"]["exclude"] == ["(2,) torch.float32"]
    text = str(explained)
    assert "handed over by zbpipe.defer" in text and "MmBackward0" in text and "?" in text
    assert text.startswith("W computes the gradients of 2 of 3 parameters in 2 groups")
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("width", "said", "header"),
    [(4, "1.080 kFLOP; 1.080 kB", "held, bytes FLOP"), (400, "72.360 kFLOP; 24.840 kB", "held, kB kFLOP")],
)
def test_units_fit_what_is_told(width, said, header):
    module, x = nn.Sequential(nn.Linear(width, 6), nn.Linear(6, 2)), torch.randn(15, width)
    text = str(zbpipe.explain(module, x))
    words = " ".join(text.split())
    assert said in words and header in words
    out = module(x.requires_grad_())
    groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], module.parameters())[1]
    text = str(zbpipe.memory.held(groups, module))
    assert text.startswith(f"{said.partition('; ')[2]} held in ")
    assert header.rpartition(" ")[0] in text
