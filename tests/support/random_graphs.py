"""Random stages: each is named by its seed, and drawn from the operations that it may have."""

import random

import torch

from support.functions import Fused, Heeding, Ignoring, SameTensorTwice, TwoOutputs
from support.oracle import Stage, at_once, check, groups_reversed, interleaved, late

ROWS, WIDTH = 3, 4
ORDERS = (at_once, late, groups_reversed, interleaved)

# Each operation takes a stage, a source of choices and a pool of activations, and gives new activations.


def pick(choose, pool):
    return choose.choice(pool)


def matrix(m, choose):
    return getattr(m, choose.choice(m.matrices))


def vector(m, choose):
    return getattr(m, choose.choice(m.vectors))


def product(m, choose, pool):
    return [pick(choose, pool) @ matrix(m, choose)]


def product_with_transposed(m, choose, pool):
    return [pick(choose, pool) @ matrix(m, choose).t()]


def product_with_computed_weight(m, choose, pool):
    kind = choose.randrange(4)
    a, b = matrix(m, choose), matrix(m, choose)
    w = [lambda: a + b, lambda: a @ b, lambda: a.tanh() * b, lambda: a.softmax(-1)][kind]()
    return [pick(choose, pool) @ w]


def linear(m, choose, pool):
    return [torch.nn.functional.linear(pick(choose, pool), matrix(m, choose), vector(m, choose))]


def scale(m, choose, pool):
    return [pick(choose, pool) * vector(m, choose)]


def shift(m, choose, pool):
    return [pick(choose, pool) + vector(m, choose)]


def norm(m, choose, pool):
    return [torch.nn.functional.layer_norm(pick(choose, pool), (WIDTH,), vector(m, choose), vector(m, choose))]


def smooth(m, choose, pool):
    x = pick(choose, pool)
    return [choose.choice([torch.tanh, torch.sin, torch.sigmoid])(x)]


def combine(m, choose, pool):
    x, y = pick(choose, pool), pick(choose, pool)
    return [x + y if choose.random() < 0.5 else x * y.tanh()]


def chunks(m, choose, pool):
    first, second = pick(choose, pool).chunk(2, dim=1)
    return [torch.cat([second, first], 1)] if choose.random() < 0.5 else [torch.cat([first, first], 1)]


def rows(m, choose, pool):
    parts = pick(choose, pool).unbind(0)
    return [torch.stack([choose.choice(parts) for _ in range(ROWS)])]


def several_outputs(m, choose, pool):
    x = pick(choose, pool)
    values, _ = x.sort(dim=-1)
    return [values, x.flip(0)]


def mixed_stack(m, choose, pool):
    x, y = torch.stack([pick(choose, pool), matrix(m, choose)[:ROWS]]).unbind(0)
    return [x, x * y]


def in_place(m, choose, pool):
    x = pick(choose, pool) * 1.0
    x[:, choose.randrange(WIDTH)] += vector(m, choose)[0]
    x[choose.randrange(ROWS)].mul_(0.5)
    return [x.add_(vector(m, choose))]


def attention(m, choose, pool):
    x = pick(choose, pool)
    return [(x @ matrix(m, choose) @ x.t()).softmax(-1) @ (x @ matrix(m, choose))]


def function(m, choose, pool):
    return [choose.choice([Heeding, Ignoring]).apply(pick(choose, pool), matrix(m, choose), m)]


def fused_function(m, choose, pool):
    return [Fused.apply(pick(choose, pool), matrix(m, choose), m)]


def function_with_two_outputs(m, choose, pool):
    first, second = TwoOutputs.apply(pick(choose, pool), matrix(m, choose), vector(m, choose), m)
    return [first, second]


def function_of_weights(m, choose, pool):
    return [pick(choose, pool) @ SameTensorTwice.apply(matrix(m, choose), matrix(m, choose), m)]


def hooked(m, choose, pool):
    x = pick(choose, pool) * 1.0
    m.hooks += 1
    name, kind = m.hooks, choose.randrange(4)
    if not x.requires_grad:
        return [x]
    if kind == 0:
        x.register_hook(m.log(f"tensor {name}"))
    elif kind == 1:
        x.register_hook(lambda grad: grad * 0.5)
    elif kind == 2:
        x.grad_fn.register_prehook(m.log(f"pre {name}"))
    else:
        m.keep(f"retained {name}", x)
    return [x]


def hooked_product(m, choose, pool):
    x = pick(choose, pool) @ matrix(m, choose)
    m.hooks += 1
    if not x.requires_grad:
        return [x]
    x.register_hook(m.log(f"tensor {m.hooks}"))
    if choose.random() < 0.5:
        x.grad_fn.register_hook(m.log(f"post {m.hooks}"))
    return [x]


PLAIN = (
    product,
    product_with_transposed,
    product_with_computed_weight,
    linear,
    scale,
    shift,
    norm,
    smooth,
    combine,
    chunks,
    rows,
    several_outputs,
    attention,
)
ODD = (
    mixed_stack,
    in_place,
    function,
    fused_function,
    function_with_two_outputs,
    function_of_weights,
    hooked,
    hooked_product,
)


def random_stage(seed, operations):
    """The stage's operations are drawn anew, and equally, in each forward: the copies and microbatches agree."""

    def forward(m, *inputs):
        choose = random.Random(seed)
        m.hooks = 0
        pool = list(inputs)
        for _ in range(choose.randint(3, 14)):
            pool += choose.choice(operations)(m, choose, pool)
            del pool[: max(0, len(pool) - 6)]
        outputs = [choose.choice(pool) for _ in range(choose.randint(1, 3))]
        if choose.random() < 0.3:
            outputs.append(matrix(m, choose).sin())
        return [out if out.grad_fn else out * 1.0 for out in outputs]

    choose = random.Random(~seed)
    matrices = {f"w{i}": (WIDTH, WIDTH) for i in range(choose.randint(1, 4))}
    vectors = {f"v{i}": (WIDTH,) for i in range(choose.randint(1, 3))}
    m = Stage(forward, **matrices, **vectors)
    m.matrices, m.vectors = list(matrices), list(vectors)
    return m


def with_main_grads(m):
    for w in m.parameters():
        w.main_grad = torch.zeros_like(w)


def run(seed, operations, order=None, impl=None):
    torch.manual_seed(seed)
    choose = random.Random(seed)
    m = random_stage(seed, operations)
    inputs = [(ROWS, WIDTH)] * choose.randint(1, 2)
    if choose.random() < 0.2:
        inputs.append(torch.ones(ROWS, WIDTH, dtype=torch.float64))
    if choose.random() < 0.15:
        getattr(m, choose.choice(m.matrices)).requires_grad_(False)
    orders = (order or choose.choice(ORDERS),)
    existing = choose.random() < 0.3
    check(m, *inputs, impl=impl, orders=orders, setup=with_main_grads, existing=existing, rtol=1e-6, atol=1e-8)
