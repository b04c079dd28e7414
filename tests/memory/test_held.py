"""memory.held(groups) is what dropping the groups gives back, to the byte: every kind of model under every policy.

Where something that nobody sees is held besides, less, and it says so.

Each test lets go of all that is its own first (input, output, gradients), so that the groups alone hold what is left.
"""

import functools
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from bench.stages import Block, Experts
from support import oracle
from support.functions import Handing, function_of
from support.program_names import keep_products
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe import memory

pytestmark = [pytest.mark.drops_groups, pytest.mark.usefixtures("quick_collections")]

N, D = 6, 8
IMAGES = (2, 3, 6, 6)
TOKENS = torch.arange(N)  # nobody's to free

POLICIES = {
    "default": {},
    "all": {"defer": "all"},
    "nothing": {"defer": "nothing"},
    "recompute": {"checkpoint": "recompute"},
    "all, recompute": {"defer": "all", "checkpoint": "recompute"},
    "input_pass": {"checkpoint": "input_pass"},
}


class Stage(oracle.Stage):
    """One that knows its input's shape."""

    def __init__(self, forward, shape=(N, D), **parts):
        super().__init__(forward, **parts)
        self.shape = shape


weight = functools.partial(oracle.weight, dtype=torch.float32)


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


def in_place(m, x):
    w = m.w.clone()
    w[0] = m.row * 2.0  # CopySlices, between the task and the weights
    h = x * 1.0
    h[:, :2].mul_(m.scale[:2])
    return (h @ w).relu_() + m.b.view(1, -1)[:, torch.arange(D)]


def within(context):
    def forward(m, x):
        with context():
            return m.f(x).float()

    return forward


def in_parts(t):
    return [t.detach()[:1].clone(), t.detach()[1:].clone()]


def of(f, shape=(N, D)):
    return Stage(lambda m, x: m.f(x), shape, f=f)


def recurrent(f, again=False, length=N):
    return Stage(lambda m, x: (recomputed(m.f, x) if again else m.f(x))[0], (length, 3, D), f=f)


MODELS = {
    "mlp": lambda: of(nn.Sequential(mlp(), nn.LayerNorm(D))),
    "embedding": lambda: Stage(lambda m, x: m.f(x + m.e(TOKENS.clone())), e=nn.Embedding(N, D), f=mlp()),
    "embedding of the input's rank": lambda: Stage(lambda m, x: x @ m.e(TOKENS.clone()).t(), e=nn.Embedding(N, D)),
    "embedding bag": lambda: Stage(
        lambda m, x: m.f(x + m.e(torch.arange(2 * N).view(N, 2) % 4)), e=nn.EmbeddingBag(4, D, mode="mean"), f=mlp()
    ),
    "sparse embedding": lambda: Stage(lambda m, x: x * m.e(TOKENS.clone()), e=nn.Embedding(N, D, sparse=True)),
    "gru": lambda: recurrent(nn.GRU(D, D, bidirectional=True)),
    "lstm": lambda: recurrent(nn.LSTM(D, D, num_layers=2, bidirectional=True, dropout=0.5)),
    "convolution": lambda: of(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), IMAGES
    ),
    "normed, not training": lambda: of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), IMAGES),
    "attention": lambda: of(Block(D, heads=2), (2, N, D)),
    "transformer": lambda: of(nn.TransformerEncoderLayer(D, 2, 2 * D), (2, N, D)),
    "experts": lambda: of(Experts(D, experts=3)),
    "tied": lambda: Stage(lambda m, x: m.f(m.f(x).tanh()) @ m.f.weight, f=nn.Linear(D, D)),
    "checkpointed": lambda: Stage(lambda m, x: recomputed(m.b, recomputed(m.a, x)), a=mlp(), b=mlp()),
    "checkpointed, reentrant": lambda: Stage(
        lambda m, x: m.b(checkpoint(m.a, x, use_reentrant=True)), a=mlp(), b=mlp()
    ),
    "checkpointed, nested": lambda: Stage(nested, a=mlp(), b=mlp(), c=nn.Linear(D, D)),
    "checkpointed, selective": lambda: Stage(lambda m, x: recomputed(m.f, x, context_fn=keep_products), f=mlp()),
    "checkpointed, embedding": lambda: Stage(
        lambda m, x: recomputed(lambda h: m.f(h + m.e(TOKENS.clone())), x), e=nn.Embedding(N, D), f=mlp()
    ),
    "checkpointed, convolution": lambda: Stage(
        lambda m, x: recomputed(m.f, x), IMAGES, f=nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    ),
    "checkpointed, recurrent": lambda: recurrent(nn.GRU(D, D), again=True),
    "function": lambda: Stage(lambda m, x: m.f(Scaled.apply(x, m.w)), w=weight(D), f=mlp()),
    "function of weights alone": lambda: Stage(lambda m, x: x @ Scaled.apply(m.w, m.v), w=weight(D, D), v=weight(D)),
    "function that defers": lambda: Stage(lambda m, x: Handing.apply(x, m.w), w=weight(D, D)),
    "complex": lambda: Stage(
        lambda m, x: torch.view_as_real((x + 0j) @ m.w).sum(-1), w=weight(D, D, dtype=torch.complex64)
    ),
    "bfloat16": lambda: Stage(lambda m, x: m.f(x.bfloat16()).float(), f=mlp().bfloat16()),
    "autocast": lambda: Stage(within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)), f=mlp()),
    "views and writes in place": lambda: Stage(in_place, w=weight(D, D), row=weight(D), scale=weight(D), b=weight(D)),
    "weight norm": lambda: of(parametrizations.weight_norm(nn.Linear(D, D))),
    "spectral norm": lambda: of(parametrizations.spectral_norm(nn.Linear(D, D))),
    "pruned": lambda: of(prune.l1_unstructured(nn.Linear(D, D), "weight", amount=0.5)),
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
        frozen=weight(D, D).requires_grad_(False),
    ),
    "compiled": lambda: of(zbpipe.compile(nn.Sequential(mlp(), nn.LayerNorm(D)), backend="aot_eager", dynamic=False)),
    "packed": lambda: Stage(within(lambda: saved_tensors_hooks(in_parts, torch.cat)), f=mlp()),
    "offloaded": lambda: Stage(within(save_on_cpu), f=nn.Sequential(mlp(), nn.LayerNorm(D))),
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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_held_is_what_dropping_the_groups_frees(model, policy):
    held, freed = check_exact(MODELS[model](), **POLICIES[policy])
    on_context = model == "function of weights alone" and policy != "nothing"  # it keeps tensors there for W
    is_sparse = (model, policy) == ("sparse embedding", "nothing")
    if held.incomplete or on_context:
        assert held.incomplete in ("", PACKED) or is_sparse
        assert held.bytes < freed, str(held)
    else:
        assert held.bytes == freed, str(held)
    assert bool(held.incomplete) == (is_sparse or ("recompute" in policy and model in PACKING))


# ---- by hand

X, WIDE, WEIGHT = N * D * 4, N * 2 * D * 4, D * D * 4  # bytes


def two(m, x):
    h = x.tanh()
    return m.a(h) + m.b(h)


def tied():
    layer = nn.Linear(D, D, bias=False)
    return Stage(lambda m, x: m.b(m.a(x).tanh()), a=layer, b=layer)


def kinds():
    """A matrix behind a node that runs whole, and an output without an input."""
    parts = {"conv": nn.Conv1d(2, 3, 3, bias=False), "table": weight(3, 6), "late": weight(3, 6)}
    return Stage(lambda m, x: (m.conv(x) * m.table, m.late * m.late), (N, 2, 8), **parts)


# Roles; of each parameter the bytes in all, and alone; modules.
BY_HAND = {
    "a bias has its output gradient, which is the weight's, too": (
        MODELS["mlp"],
        {"matrix": X + WIDE, "output gradient": X + WIDE, "light gradient": 8 * D},
        {
            **dict.fromkeys(("f.1.weight", "f.1.bias"), (4 * D, 4 * D)),
            "f.0.0.weight": (X + WIDE, X),
            "f.0.0.bias": (WIDE, 0),
            "f.0.3.weight": (X + WIDE, WIDE),
            "f.0.3.bias": (X, 0),
        },
        {"f": 2 * (X + WIDE) + 8 * D, "f.0": 2 * (X + WIDE), "f.0.0": X + WIDE, "f.0.3": X + WIDE, "f.1": 8 * D},
    ),
    "two that read one X and one dY": (
        lambda: Stage(two, a=nn.Linear(D, D, bias=False), b=nn.Linear(D, D, bias=False)),
        {"matrix": X, "output gradient": X},
        {"a.weight": (2 * X, 0), "b.weight": (2 * X, 0)},
        {"a": 2 * X, "b": 2 * X},
    ),
    "one that is tied, of both modules": (
        tied,
        {"matrix": 2 * X, "output gradient": 2 * X},
        {"a.weight": (4 * X, 4 * X)},
        {"a": 4 * X, "b": 4 * X},
    ),
    "kinds of tensors": (
        kinds,
        {"output gradient": N * 3 * 6 * 4 + 72, "matrix": N * 2 * 8 * 4, "kept gradient": 72},
        {"conv.weight": (N * (3 * 6 + 2 * 8) * 4,) * 2, "table": (72, 72), "late": (72, 72)},
        {"conv": N * (3 * 6 + 2 * 8) * 4},
    ),
    "weights behind other nodes": (
        lambda: Stage(lambda m, x: x @ (m.a.sin() + m.b.sin()), a=weight(D, D), b=weight(D, D)),
        {"matrix": X, "output gradient": X},
        {"a": (2 * X, 0), "b": (2 * X, 0)},
        {},
    ),
}


@pytest.mark.parametrize(("make", "roles", "parameters", "modules"), BY_HAND.values(), ids=BY_HAND)
def test_to_whom_held_bytes_belong(make, roles, parameters, modules):
    net = make()
    groups = groups_of(net)
    held = memory.held(groups, net)
    assert held.by_role == roles and held.bytes == sum(roles.values())
    assert {row.name: (row.bytes, row.alone) for row in held.parameters} == parameters
    assert held.by_parameter == {name: size for name, (size, _) in parameters.items()}
    assert held.by_module == {"": held.bytes, **modules}
    assert [row.bytes for row in held.parameters] == sorted((row.bytes for row in held.parameters), reverse=True)
    assert (held.groups, held.spent, held.incomplete) == (len(groups), 0, "")
    assert sum(group.bytes_held for group in groups) >= held.bytes
    assert all(row.name in str(held) and str(list(row.shape)) in str(held) for row in held.parameters)
    unknown = memory.held(groups, of(mlp()))
    assert sorted(unknown.by_parameter.values()) == sorted(held.by_parameter.values())
    assert unknown.by_module == {} and all(" #" in name for name in unknown.by_parameter)
    other = groups_of(net)
    assert memory.held(groups + other, net).bytes == 2 * held.bytes, "of another microbatch"
    zbpipe.stage_backward_weight(net.parameters(), groups)
    assert memory.held(groups + other, net).bytes == held.bytes


def test_a_storage_says_what_it_is_and_an_unknown_parameter_has_a_number():
    groups = groups_of(kinds())
    held = memory.held(groups)
    assert sorted(held.by_parameter) == ["float32[3, 2, 3] #2", "float32[3, 6] #0", "float32[3, 6] #1"]
    assert {"ConvolutionBackward0", "MulBackward0"} <= {node for storage in held.storages for node in storage.nodes}
    (late,) = (s for s in held.storages if s.bytes == 72 and s.roles == ("output gradient",))
    assert (late.dtype, late.device.type, late.shapes) == (torch.float32, "cpu", ((3, 6),))
    zbpipe.stage_backward_weight(None, groups[:1])
    assert memory.held(groups).spent == 1 and "1 of them spent" in str(memory.held(groups))
    assert memory.held([]).bytes == 0 and str(memory.held([]))


def test_a_weight_pass_that_runs_is_refused_and_what_a_failed_one_could_not_add_is_held():
    net = of(nn.Linear(D, D, bias=False))
    groups = groups_of(net)

    def look(_grad):
        with pytest.raises(RuntimeError, match="cannot be listed while its weight pass runs"):
            memory.held(groups)
        raise KeyError("planted")

    handle = net.f.weight.register_hook(look)
    with pytest.raises(Exception, match="planted"):
        zbpipe.stage_backward_weight(net.parameters(), groups)
    assert memory.held(groups, net).by_role["waiting gradient"] == WEIGHT
    handle.remove()
    zbpipe.stage_backward_weight(net.parameters(), groups)
    assert memory.held(groups).bytes == 0


def test_what_others_hold_too_is_held():
    net, x = nn.Linear(D, D), torch.randn(N, D, requires_grad=True)
    groups = zbpipe.stage_backward_input([net(x)], [torch.randn(N, D)], [x], net.parameters())[1]
    assert memory.held(groups, net).bytes == 2 * X


@pytest.mark.parametrize("bad", [[3], [None], [{"a": 1}], ["group"]])
def test_what_is_no_group_is_refused(bad):
    with pytest.raises(TypeError, match=r"groups\[0\] is a"):
        memory.held(bad)


def test_a_sparse_gradient_is_not_counted_which_is_said():
    sparse = function_of(lambda x, w: x * w.sum(), lambda x, w, grad: (grad, torch.ones(D, D).to_sparse()))
    held = memory.held(groups_of(Stage(lambda m, x: sparse(x, m.w), w=weight(D, D))))
    assert (held.bytes, held.by_parameter) == (0, {"float32[8, 8] #0": 0})
    assert "incomplete: tensors without a storage of their own, such as sparse ones, are not counted" in str(held)


def test_counting_unpacks_nothing_and_is_the_same_on_any_thread():
    unpacked = []

    def unpack(t):
        unpacked.append(1)
        return t

    net = MODELS["convolution"]()
    with saved_tensors_hooks(lambda t: t, unpack):
        groups = groups_of(net)
    before = len(unpacked)
    held = memory.held(groups, net)
    assert held.bytes > 0 and len(unpacked) == before > 0
    with ThreadPoolExecutor() as pool:
        assert pool.submit(memory.held, groups, net).result() == held


# ---- other cases


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
        nets = [recurrent(nn.GRU(D, D), length=length) for length in (3, 4, 5)]
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
