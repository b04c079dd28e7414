"""memory.held(groups) is what dropping the groups gives back, to the byte: every kind of model under every policy.

Where something that nobody sees is held besides, less, and it says so.

Each test lets go of all that is its own first (input, output, gradients), so that the groups alone hold what is left.
"""

import gc

import pytest
import torch
import torch.nn.functional as F
from support.functions import Handing
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import zbpipe
from zbpipe import memory

N, D = 6, 8
TOKENS = torch.arange(N)  # nobody's to free

POLICIES = {
    "default": {},
    "all": {"defer": "all"},
    "nothing": {"defer": "nothing"},
    "recompute": {"checkpoint": "recompute"},
    "all, recompute": {"defer": "all", "checkpoint": "recompute"},
    "input_pass": {"checkpoint": "input_pass"},
}


class Stage(nn.Module):
    """Parameters and modules by keyword; forward is a function of the stage and its input."""

    def __init__(self, forward, shape=(N, D), **parts):
        super().__init__()
        self.function, self.shape = forward, shape
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.function(self, x)


def weight(*shape, dtype=torch.float32):
    return nn.Parameter(torch.randn(*shape, dtype=dtype))


def mlp():
    return nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Dropout(0.5), nn.Linear(2 * D, D))


def recomputed(module, x, **options):
    return checkpoint(module, x, use_reentrant=False, **options)


class Scaled(torch.autograd.Function):
    """Keeps tensors in all the ways in which a Function can."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w, torch.full((2 * N,), 2.0))
        ctx.aside = torch.ones(3 * N)
        ctx.nested = {"mask": (torch.ones(N), [torch.zeros(5)])}
        return x * w

    @staticmethod
    def backward(ctx, grad):
        x, w, _ = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


def nested(m, x):
    def inner(h):
        return recomputed(m.b, recomputed(m.a, h).tanh())

    return recomputed(lambda h: m.c(inner(h)), x)


def selective(m, x):
    def choose(_ctx, op, *_args, **_kwargs):
        saves = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return recomputed(m.f, x, context_fn=lambda: create_selective_checkpoint_contexts(choose))


def moe(m, x):
    scores = m.router(x).softmax(-1)
    top, chosen = scores.topk(2, dim=-1)
    out = torch.zeros_like(x)
    for e, expert in enumerate((m.a, m.b, m.c)):
        rows, place = (chosen == e).nonzero(as_tuple=True)
        out = out.index_add(0, rows, expert(x[rows]) * top[rows, place].unsqueeze(-1))
    return out


def attention(m, x):
    q, k, v = m.qkv(x).view(2, N // 2, 2, 3, D // 2).permute(3, 0, 2, 1, 4)
    return m.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(N, D))


def in_place(m, x):
    w = m.w.clone()
    w[0] = m.row * 2.0  # CopySlices, between the task and the weights
    h = x * 1.0
    h[:, :2].mul_(m.scale[:2])
    return (h @ w).relu_() + m.b.view(1, -1)[:, torch.arange(D)]


def autocast(m, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return m.f(x).float()


def kept_elsewhere(m, x):
    with torch.autograd.graph.save_on_cpu():
        return m.f(x)


def of_list(m, x):
    def pack(t):
        return {"parts": [t.detach()[:1].clone(), t.detach()[1:].clone()]}

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda d: torch.cat(d["parts"])):
        return m.f(x)


def pruned():
    net = nn.Linear(D, D)
    prune.l1_unstructured(net, "weight", amount=0.5)
    return net


def compiled(m, x):
    if not hasattr(m, "run"):
        m.run = zbpipe.compile(m.f, backend="aot_eager", dynamic=False)
    return m.run(x)


MODELS = {
    "mlp": lambda: Stage(lambda m, x: m.f(x), f=nn.Sequential(mlp(), nn.LayerNorm(D))),
    "embedding": lambda: Stage(lambda m, x: m.f(x + m.e(TOKENS.clone())), e=nn.Embedding(N, D), f=mlp()),
    "embedding of the input's rank": lambda: Stage(lambda m, x: x @ m.e(TOKENS.clone()).t(), e=nn.Embedding(N, D)),
    "embedding bag": lambda: Stage(
        lambda m, x: m.f(x + m.e(torch.arange(2 * N).view(N, 2) % 4)), e=nn.EmbeddingBag(4, D, mode="mean"), f=mlp()
    ),
    "sparse embedding": lambda: Stage(lambda m, x: x * m.e(TOKENS.clone()), e=nn.Embedding(N, D, sparse=True)),
    "gru": lambda: Stage(lambda m, x: m.f(x)[0], (N, 3, D), f=nn.GRU(D, D, bidirectional=True)),
    "lstm": lambda: Stage(
        lambda m, x: m.f(x)[0], (N, 3, D), f=nn.LSTM(D, D, num_layers=2, bidirectional=True, dropout=0.5)
    ),
    "convolution": lambda: Stage(
        lambda m, x: m.f(x),
        (2, 3, 6, 6),
        f=nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)),
    ),
    "normed, not training": lambda: Stage(
        lambda m, x: m.f(x), (2, 3, 6, 6), f=nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    ),
    "attention": lambda: Stage(attention, qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, D)),
    "transformer": lambda: Stage(lambda m, x: m.f(x), (2, N, D), f=nn.TransformerEncoderLayer(D, 2, 2 * D)),
    "experts": lambda: Stage(moe, router=nn.Linear(D, 3), a=mlp(), b=mlp(), c=mlp()),
    "tied": lambda: Stage(lambda m, x: m.f(m.f(x).tanh()) @ m.f.weight, f=nn.Linear(D, D)),
    "checkpointed": lambda: Stage(lambda m, x: recomputed(m.b, recomputed(m.a, x)), a=mlp(), b=mlp()),
    "checkpointed, reentrant": lambda: Stage(
        lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)), a=mlp(), b=mlp()
    ),
    "checkpointed, nested": lambda: Stage(nested, a=mlp(), b=mlp(), c=nn.Linear(D, D)),
    "checkpointed, selective": lambda: Stage(selective, f=mlp()),
    "checkpointed, embedding": lambda: Stage(
        lambda m, x: recomputed(lambda h: m.f(h + m.e(TOKENS.clone())), x), e=nn.Embedding(N, D), f=mlp()
    ),
    "checkpointed, convolution": lambda: Stage(
        lambda m, x: recomputed(m.f, x), (2, 3, 6, 6), f=nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    ),
    "checkpointed, recurrent": lambda: Stage(lambda m, x: recomputed(m.f, x)[0], (N, 3, D), f=nn.GRU(D, D)),
    "function": lambda: Stage(lambda m, x: m.f(Scaled.apply(x, m.w)), w=weight(D), f=mlp()),
    "function of weights alone": lambda: Stage(lambda m, x: x @ Scaled.apply(m.w, m.v), w=weight(D, D), v=weight(D)),
    "function that defers": lambda: Stage(lambda m, x: Handing.apply(x, m.w), w=weight(D, D)),
    "complex": lambda: Stage(
        lambda m, x: torch.view_as_real((x + 0j) @ m.w).sum(-1), w=weight(D, D, dtype=torch.complex64)
    ),
    "bfloat16": lambda: Stage(lambda m, x: m.f(x.bfloat16()).float(), f=mlp().bfloat16()),
    "autocast": lambda: Stage(autocast, f=mlp()),
    "views and writes in place": lambda: Stage(in_place, w=weight(D, D), row=weight(D), scale=weight(D), b=weight(D)),
    "weight norm": lambda: Stage(lambda m, x: m.f(x), f=parametrizations.weight_norm(nn.Linear(D, D))),
    "spectral norm": lambda: Stage(lambda m, x: m.f(x), f=parametrizations.spectral_norm(nn.Linear(D, D))),
    "pruned": lambda: Stage(lambda m, x: m.f(x), f=pruned()),
    "weights of several parts": lambda: Stage(
        lambda m, x: torch.einsum("nd,hdk->nhk", x, torch.cat([m.a, m.b.expand(2, D, D).sin()])),
        a=weight(1, D, D),
        b=weight(1, D, D),
    ),
    "low rank": lambda: Stage(
        lambda m, x: m.f(x) + F.linear(x, m.b @ m.a) @ m.frozen,
        f=nn.Linear(D, D).requires_grad_(False),
        a=weight(2, D),
        b=weight(D, 2),
        frozen=nn.Parameter(torch.randn(D, D), requires_grad=False),
    ),
    "compiled": lambda: Stage(compiled, f=nn.Sequential(mlp(), nn.LayerNorm(D))),
    "packed": lambda: Stage(of_list, f=mlp()),
    "offloaded": lambda: Stage(kept_elsewhere, f=nn.Sequential(mlp(), nn.LayerNorm(D))),
    "outputs without an input": lambda: Stage(lambda m, x: (m.f(x), m.g(torch.ones(N, D))), f=mlp(), g=mlp()),
}


PACKED = "what saved-tensor hooks (checkpointing, offloading) keep for W is not counted"
PACKING = {
    *("checkpointed", "checkpointed, nested", "checkpointed, embedding", "checkpointed, convolution"),
    *("checkpointed, recurrent", "packed", "offloaded"),
}


def groups_of(net):
    x = torch.randn(net.shape, requires_grad=True)
    out = net(x)
    out = [out] if isinstance(out, torch.Tensor) else list(out)
    grads = [torch.randn(y.shape, dtype=y.dtype) for y in out]
    return zbpipe.stage_backward_input(out, grads, [x], list(net.parameters()))[1]


def check_exact(net, **policy):
    """Returns what held() said and the bytes that went; twice, as the first step of a process makes what stays."""
    with zbpipe.policy(**policy):
        for _ in range(2):
            with memory.record(max_events=0) as rec:
                groups = groups_of(net)
                gc.collect()
                before = rec.live
                held = memory.held(groups, net)
                assert rec.live == before, "looking keeps nothing"
                del groups
                freed = before - rec.live
            net.zero_grad()
        return held, freed


@pytest.fixture(scope="module", autouse=True)
def _quick_collections():
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_held_is_what_dropping_the_groups_frees(model, policy):
    held, freed = check_exact(MODELS[model](), **POLICIES[policy])
    if held.incomplete or model == "function of weights alone":  # which keeps tensors on its context
        assert held.incomplete in ("", PACKED)
        assert held.bytes < freed, str(held)
    else:
        assert held.bytes == freed, str(held)
    assert bool(held.incomplete) == ("recompute" in policy and model in PACKING)


def test_a_group_whose_weight_pass_runs_is_refused():
    net = MODELS["mlp"]()
    groups = groups_of(net)
    refused = []

    def look(_grad):
        with pytest.raises(RuntimeError, match="cannot be listed while its weight pass runs"):
            memory.held(groups)
        refused.append(True)

    next(net.parameters()).register_hook(look)
    zbpipe.stage_backward_weight(net.parameters(), groups)
    assert refused == [True]
    assert memory.held(groups).bytes == 0


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        *(("mlp", "nothing"), ("convolution", "nothing")),
        *((f"checkpointed{of}", p) for of in ("", ", nested", ", convolution") for p in ("input_pass", "nothing")),
    ],
)
def test_one_gradient_per_weight_and_nothing_else(model, policy):
    """torch's schedules hand the stage's input over: nobody but the groups could keep it, and its gradient."""
    net = MODELS[model]()
    held, freed = check_exact(net, **POLICIES[policy])
    assert freed == sum(p.nbytes for p in net.parameters())
    assert set(held.by_role) <= {"kept gradient", "light gradient"}


def test_of_a_recurrent_layer_one_gradient_is_held_per_step():
    with zbpipe.policy(defer="nothing"):
        nets = [Stage(lambda m, x: m.f(x)[0], (length, 3, D), f=nn.GRU(D, D)) for length in (3, 4, 5)]
        sizes = [memory.held(groups_of(net)).bytes for net in nets]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0


def test_a_node_that_is_kept_says_that_it_has_run():
    net = Stage(lambda m, x: recomputed(m.f, x), f=nn.Linear(D, D))
    x = torch.randn(net.shape, requires_grad=True)
    y = net(x)
    node = y.grad_fn
    with zbpipe.policy(defer="nothing"):
        _groups = zbpipe.stage_backward_input([y], [torch.ones_like(y)], [x], list(net.parameters()))[1]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        _ = node._saved_mat1


def test_a_stage_without_an_input_holds_what_its_graph_has_saved():
    """W runs it whole. zbpipe.explain counts the same."""
    net = nn.Sequential(nn.Embedding(10, D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))
    tokens = TOKENS.clone()
    y = net(tokens)
    groups = zbpipe.stage_backward_input([y], [torch.ones_like(y)], [tokens], net.parameters())[1]
    held = memory.held(groups, net)
    saved = tokens.nbytes + 4 * N * (D + 2 * D + 2 * D)  # and what the layers and the activation have read
    assert held.by_role == {"saved": saved, "output gradient": 4 * N * D}
    explained = zbpipe.explain(net, tokens)
    assert (explained.bytes_held, explained.notes) == (held.bytes, ())
