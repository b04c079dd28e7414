"""``run_node`` (csrc/shim/engine/stand_in.cpp) restates the engine's ``call_function``: both run 200 random nodes, with
hooks of every kind, undefined gradients and anomaly mode, and make the same calls, in one order, with the same result."""

import contextlib
import random

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook

import zbpipe

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection")


class Several(torch.autograd.Function):
    """Three outputs; its backward sees which gradients are undefined."""

    @staticmethod
    def forward(ctx, x, w, log, materializes):
        ctx.save_for_backward(x, w)
        ctx.log = log
        ctx.set_materialize_grads(materializes)
        return x * w, x + w, x - w

    @staticmethod
    def backward(ctx, *grads):
        ctx.log("backward", grads)
        x, w = ctx.saved_tensors
        a, b, c = (torch.zeros_like(x) if grad is None else grad for grad in grads)
        return a * w + b + c, a * x + b - c, None, None


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, log):
        ctx.log = log
        ctx.mark_dirty(x)
        return x.add_(w)

    @staticmethod
    def backward(ctx, grad):
        ctx.log("backward", (grad,))
        return grad, grad * 2, None


def in_a_view(x, w):
    base = x * 1.0
    base[1:].mul_(w[1:])
    return base


NODES = {
    "mul": lambda x, w, log: (x * w,),
    "mm": lambda x, w, log: (x.mm(w),),
    "addmm": lambda x, w, log: (w.addmm(x, w.detach(), alpha=2),),
    "where": lambda x, w, log: (torch.where(x.detach() > 0, x, w),),
    "cat": lambda x, w, log: (torch.cat([x, w, x]),),
    "lerp": lambda x, w, log: (torch.lerp(x, w, 0.25),),
    "layer norm": lambda x, w, log: torch.native_layer_norm(x, [3], w.mean(0), None, 1e-5)[:1],
    "Function": lambda x, w, log: Several.apply(x, w, log, True),
    "Function, undefined": lambda x, w, log: Several.apply(x, w, log, False),
    "in place": lambda x, w, log: (InPlace.apply(x * 1.0, w, log),),
    "in a view": lambda x, w, log: (in_a_view(x, w),),
}


class Calls:
    """What hooks and backwards were given, in order."""

    def __init__(self):
        self.made = []

    def __call__(self, name, grads):
        self.made.append((name, [None if grad is None else grad.tolist() for grad in grads]))


def hook(calls, name, change):
    """Of a tensor. change: keeps the gradient, gives another one, or the same one again."""

    def run(grad):
        calls(name, (grad,))
        return {"keeps": None, "doubles": None if grad is None else grad * 2, "returns": grad}[change]

    return run


def node_hook(calls, name, doubles):
    def run(*grads):
        calls(name, [grad for group in grads for grad in group])
        given = grads[0]
        return tuple(None if g is None else g * 2 for g in given) if doubles else None

    return run


def drawn(values, *shape):
    return torch.randn(shape, generator=values, device="cpu").to(torch.get_default_device())


def program(seed, backward):
    """Builds the node of this seed, lets ``backward`` run it, and returns the calls, and what came of it."""
    draw, calls = random.Random(seed), Calls()
    values = torch.Generator().manual_seed(seed)
    x, w = (drawn(values, 3, 3).requires_grad_() for _ in range(2))
    outputs = NODES[draw.choice(list(NODES))](x, w, calls)
    node = outputs[0].grad_fn
    used = [o for o in outputs if draw.random() < 0.6] or [outputs[0]]
    retained = []
    for i, output in enumerate(outputs):
        for kind in draw.choices(["hook", "retains", "none"], k=2):
            if kind == "hook":
                change = draw.choice(["keeps", "doubles", "returns"])
                output.register_hook(hook(calls, f"hook of output {i}", change))
            elif kind == "retains":
                output.retain_grad()
                retained.append(output)
    for i in range(draw.randrange(3)):
        node.register_prehook(node_hook(calls, f"pre hook {i}", draw.random() < 0.3))
    for i in range(draw.randrange(3)):
        node.register_hook(node_hook(calls, f"post hook {i}", draw.random() < 0.3))
    if draw.random() < 0.3:
        mode = draw.choice(["any", "all"])
        give = (lambda grads: calls("all", grads)) if mode == "all" else (lambda grad: calls("any", (grad,)))
        register_multi_grad_hook(outputs, give, mode=mode)
    if draw.random() < 0.5:
        x.register_hook(hook(calls, "hook of the input", draw.choice(["keeps", "doubles"])))
    if draw.random() < 0.5:
        x.register_post_accumulate_grad_hook(lambda leaf: calls("behind the input", (leaf.grad,)))
    grads = [drawn(values, *output.shape) for output in used]
    ends = [output * 1.0 for output in used]  # of a node at which it begins the engine would not tell "all" and "any"
    with torch.autograd.detect_anomaly() if draw.random() < 0.3 else contextlib.nullcontext():
        backward(ends, grads, x, w)
    return calls.made, [tensor.grad for tensor in (x, w, *retained)]


def by_the_engine(outputs, grads, x, w):
    torch.autograd.backward(outputs, grads)


def in_i(outputs, grads, x, w):
    _, groups = zbpipe.stage_backward_input(outputs, grads, [x], [w])
    zbpipe.stage_backward_weight([w], groups)


def in_w(outputs, grads, x, w):
    """W runs the whole node, since no input is behind it."""
    _, groups = zbpipe.stage_backward_input(outputs, grads, [], [x, w])
    zbpipe.stage_backward_weight([x, w], groups)


@pytest.mark.parametrize("split", [in_i, in_w], ids=["I", "W"])
@pytest.mark.parametrize("seeds", [range(i, 200, 10) for i in range(10)], ids=str)
def test_a_random_node_runs_as_the_engine_runs_it(seeds, split):
    for seed in seeds:
        calls, expected = program(seed, by_the_engine)
        with zbpipe.policy(defer="nothing"):
            made, found = program(seed, split)
        assert made == calls, seed
        for ours, theirs in zip(found, expected, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs), seed


def test_the_seeds_have_nodes_and_calls_of_every_kind():
    seen = {}
    for seed in range(200):
        for name, grads in program(seed, by_the_engine)[0]:
            seen.setdefault(name.rstrip(" 012"), []).append(None in grads)
    assert seen.keys() == {
        "hook of output",
        "pre hook",
        "post hook",
        "all",
        "any",
        "hook of the input",
        "behind the input",
        "backward",
    }
    assert any(seen["pre hook"]) and any(seen["post hook"]) and any(seen["backward"]) and any(seen["all"])
