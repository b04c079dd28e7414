"""I and W copy nothing that nobody else has: they allocate what an ordinary backward allocates, to the byte.

A copy, by whatever operation, is memory that torch's allocator hands out: so the bytes of I and W are compared with
those of an ordinary backward of a copy, over two microbatches in flight. A difference is named where there is one.
"""

import copy
import functools

import pytest
import torch
from support.functions import Handing, function_of, handing_through
from support.oracle import Stage, close, needs_zbpipe
from support.small_blocks import GPT2, T5, TOKENS, WIDTH, Experts, Llama, ResNet
from torch import nn
from torch.distributed.fsdp import fully_shard

import zbpipe
from zbpipe import memory

pytestmark = [pytest.mark.drops_groups, needs_zbpipe]

MICROBATCHES = 2
ROWS = (TOKENS, WIDTH)
BATCH = (2, TOKENS, WIDTH)
PICTURE = (2, WIDTH, 4, 4)


# Of tensor parallel: the identity, whose gradient is all-reduced in place and handed through; an all-reduce.
copies = handing_through(lambda x: x.view_as(x), lambda grad: grad.mul_(1))
reduces = handing_through(lambda x: x * 1, lambda grad: grad)


def doubled(m, x):
    """Its gradients are new tensors, which the hooks do not keep."""
    h = x @ m.w
    h.register_hook(lambda grad: grad * 2)
    h.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    x.register_hook(lambda grad: grad * 2)
    return h.tanh() @ m.u


@functools.partial(function_of, torch.matmul)
def fresh(x, w, grad):
    """Of x @ w: what it made, as views of it, of which it keeps none."""
    return torch.cat([grad @ w.t(), x.t() @ grad]).split([len(x), len(w)])


@functools.partial(function_of, torch.add)
def shared(x, w, grad):
    """Of x + w: one new tensor for both."""
    made = grad * 1
    return made, made


def observed(m, x):
    """Its gradient goes through hooks of each kind, which return what they were given."""
    h = x @ m.w
    h.register_hook(lambda grad: grad)
    h.grad_fn.register_prehook(lambda grads: grads)
    h.grad_fn.register_hook(lambda grads, _: grads)
    x.register_hook(lambda grad: grad)
    return h.tanh() @ m.u


def module_hooked(m, x):
    return m.net(x @ m.w) @ m.u


def with_module_hooks():
    m = of(module_hooked)()
    m.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    for part in m.net:
        part.register_full_backward_pre_hook(lambda part, grads: None)
        part.register_full_backward_hook(lambda part, before, after: None)
    return m


def measured(module, shape, backward):
    """(bytes, blocks) that the backwards of the microbatches allocate."""
    torch.manual_seed(1)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(MICROBATCHES)]
    outputs = [module(x) for x in inputs]
    grads = [torch.randn_like(y) for y in outputs]
    with memory.record(max_events=0) as rec:
        backward(module, inputs, outputs, grads)
    return rec.allocated, rec.allocations, [x.grad for x in inputs], [p.grad for p in module.parameters()]


def whole(module, inputs, outputs, grads):
    while outputs:
        outputs.pop(0).backward(grads.pop(0))


def split(module, inputs, outputs, grads):
    groups = []
    for x in inputs:
        groups.append(zbpipe.stage_backward_input([outputs.pop(0)], [grads.pop(0)], [x], module.parameters())[1])
    while groups:
        zbpipe.stage_backward_weight(module.parameters(), groups.pop(0))


def more(make, shape, split=split):
    """Bytes and blocks that I and W take more than an ordinary backward."""
    torch.manual_seed(0)
    module = make()
    results = [measured(copy.deepcopy(module), shape, backward) for backward in (split, whole)]
    (ours, blocks, *gradients), (theirs, their_blocks, *expected) = results
    close(gradients, expected, "gradients")
    return ours - theirs, blocks - their_blocks


def of(function):
    """How to make a stage of two matrices and a vector."""
    shapes = {"w": (WIDTH, WIDTH), "u": (WIDTH, WIDTH), "v": (WIDTH,)}
    return lambda: Stage(function, **{name: nn.Parameter(torch.randn(shape) / 4) for name, shape in shapes.items()})


# How to make a module, and its input's shape; then bytes and blocks that I and W of two microbatches take more than
# ordinary backwards. In each row 16 bytes in 4 blocks are the numbers from which I starts the engine; where W needs the
# engine, too, there are 16 more. The others are gradients that ordinary backwards add in place, or take from a node.
CASES = {
    "Llama": (Llama, BATCH, 1168, 8),
    "GPT-2": (GPT2, BATCH, 1616, 10),
    "Mixtral": (lambda: Llama(Experts), BATCH, 1168, 8),
    "T5": (T5, BATCH, 1184, 12),
    "ResNet": (ResNet, PICTURE, 16, 4),
    "three blocks": (lambda: nn.Sequential(*(Llama() for _ in range(3))), BATCH, 5520, 20),
    "linear of three dimensions first": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), BATCH, 80, 5),
    "einsum": (of(lambda m, x: torch.einsum("bi,oi->bo", x, m.w).relu() @ m.u), ROWS, 16, 4),
    "einsum of three dimensions": (of(lambda m, x: torch.einsum("bti,oi->bto", x, m.w).relu() @ m.u), BATCH, 16, 4),
    "weight.view": (of(lambda m, x: (x @ m.w.view(WIDTH, WIDTH)).relu() @ m.u), ROWS, 16, 4),
    "added positions at batch 1": (of(lambda m, x: (x + m.w[:TOKENS]) @ m.u + m.v), (1, *ROWS), 96, 9),
    "added weight at batch 1": (of(lambda m, x: (x.view(1, WIDTH) + m.v) @ m.u), (1, WIDTH), 80, 5),
    "chunk": (of(lambda m, x: torch.cat([(x @ m.w).chunk(2, -1)[i].tanh() for i in (1, 0)], -1) @ m.u), ROWS, 32, 8),
    "cat": (of(lambda m, x: torch.cat([x @ m.w, x @ m.u], -1)), ROWS, 16, 4),
    "unbind": (of(lambda m, x: torch.stack([row * m.v for row in (x @ m.w).unbind(0)]) @ m.u), ROWS, 160, 10),
    "one gradient for two weights": (of(lambda m, x: x @ m.w + (m.v + m.u[0])), ROWS, 32, 8),
    "module hooks": (with_module_hooks, ROWS, 80, 5),
    "hooks that return their argument": (of(observed), ROWS, 16, 4),
    "handed through": (of(lambda m, x: reduces(copies(x @ m.w).tanh() @ m.u)), ROWS, 16, 4),
    "handed through first": (of(lambda m, x: reduces(copies(x) @ m.w)), ROWS, 16, 4),
    "a Function's own": (of(lambda m, x: fresh(fresh(x, m.w).tanh(), m.u)), ROWS, 2576, 8),
    "a Function's own for two": (of(lambda m, x: shared(x @ m.w, m.u[:TOKENS]) @ m.u), ROWS, 32, 8),
    "a Function's own for a weight and an input": (of(lambda m, x: shared(x, m.w)), (WIDTH, WIDTH), 16, 4),
    "handed over": (of(lambda m, x: Handing.apply(Handing.apply(x, m.w).tanh(), m.u)), ROWS, 32, 8),
    "hooks that return what they made": (of(doubled), ROWS, 16, 4),
    "handed to a weight": (of(lambda m, x: x @ copies(m.w) + reduces(m.v)), ROWS, 96, 9),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_i_and_w_beside_an_ordinary_backward(name):
    make, shape, bytes_more, blocks_more = CASES[name]
    assert more(make, shape) == (bytes_more, blocks_more)


@pytest.mark.parametrize("name", ["Llama", "einsum", "handed through", "hooks that return their argument"])
def test_a_copy_more_is_seen(name):
    make, shape, bytes_more, blocks_more = CASES[name]

    def copies(module, inputs, *args):
        for x in inputs:
            x.register_hook(lambda grad: grad.clone())
        split(module, inputs, *args)

    copied = 4 * torch.Size(shape).numel()
    expected = bytes_more + MICROBATCHES * copied, blocks_more + MICROBATCHES
    assert more(make, shape, copies) == expected


def taken_by_i(module):
    """(bytes, blocks) that the first I allocates."""
    x = torch.randn(BATCH, requires_grad=True)
    y = module(x)
    grad = torch.randn_like(y)
    with memory.record(max_events=0) as rec:
        zbpipe.stage_backward_input([y], [grad], [x], None)
    return rec.allocated, rec.allocations


@pytest.mark.usefixtures("alone")
def test_i_of_sharded_blocks_takes_what_i_of_whole_ones_takes():
    """Where the weights stay gathered after the forward."""
    torch.manual_seed(0)
    module = nn.Sequential(Llama(), Llama())
    whole = copy.deepcopy(module)
    for part in (*module, module):
        fully_shard(part, reshard_after_forward=False)
    assert taken_by_i(module) == taken_by_i(whole)
