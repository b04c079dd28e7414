"""The cut through a traced backward graph, on graphs written by hand and at random."""

import itertools
import operator
import random

import pytest
import torch
from torch import fx

from zbpipe._compile.cut import CannotSplitError  # the cut of graphs that no compiler traces
from zbpipe._compile.nodes import classify  # of a kernel that needs a GPU
from zbpipe._compile.split import split  # the same

aten = torch.ops.aten


class Trace:
    """An fx graph of square matrices, built operation by operation, with what a tracer notes of each value."""

    def __init__(self):
        self.graph = fx.Graph()

    def input(self, value):
        node = self.graph.placeholder(f"arg_{len(self.graph.nodes)}")
        node.meta["val"] = value
        return node

    def op(self, target, *args, **kwargs):
        node = self.graph.call_function(target, args, kwargs)
        values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*values[0], **values[1])
        return node

    def returning(self, *results):
        self.graph.output(list(results))
        return fx.GraphModule(torch.nn.Module(), self.graph)


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def names(graph):
    return [n.target.name() for n in graph.graph.nodes if n.op == "call_function"]


def inputs_of(graph):
    return [n.name for n in graph.graph.nodes if n.op == "placeholder"]


def linear():
    """The backward of y = gelu(x @ w): (dx, dw, db)."""
    t = Trace()
    x, w, h, dy = (t.input(meta(*s)) for s in [(4, 8), (8, 16), (4, 16), (4, 16)])
    dh = t.op(aten.gelu_backward.default, dy, h)
    dx = t.op(aten.mm.default, dh, t.op(aten.t.default, w))
    dw = t.op(aten.mm.default, t.op(aten.t.default, x), dh)
    db = t.op(aten.sum.dim_IntList, dh, [0])
    return t.returning(dx, dw, db)


def test_two_matrices_of_a_product_are_held_and_the_bias_waits_with_them():
    halves = split(linear(), {1, 2})
    assert halves.input_outputs == (0,)
    assert halves.weight_outputs == (1, 2)
    assert halves.input_inputs == (1, 2, 3)  # w, h, dy: not x
    assert halves.weight_inputs == (0,)  # x
    assert halves.kept_count == 1  # dh
    assert names(halves.weight_half).count("aten::mm") == 1
    assert names(halves.input_half) == ["aten::gelu_backward", "aten::t", "aten::mm"]


def test_vectors_gradient_is_computed_in_i_where_its_matrices_are_not_held_anyway():
    t = Trace()
    x, w, dy, scale = (t.input(meta(*s)) for s in [(4, 8), (8, 16), (4, 16), (8,)])
    dh = t.op(aten.mm.default, dy, t.op(aten.t.default, w))
    dx = t.op(aten.mul.Tensor, dh, scale)
    dscale = t.op(aten.sum.dim_IntList, t.op(aten.mul.Tensor, dh, x), [0])
    dw = t.op(aten.mm.default, t.op(aten.t.default, x), dy)
    graph = t.returning(dx, dw, dscale)
    halves = split(graph, {1, 2})
    assert halves.input_outputs == (0, 2)
    assert halves.kept_count == 0
    everything = split(graph, {1, 2}, everything=True)
    assert everything.input_outputs == (0,)
    assert everything.kept_count == 1  # dh


def test_convolutions_gradients_are_taken_apart():
    t = Trace()
    x, w, dy = t.input(torch.randn(2, 3, 8, 8)), t.input(torch.randn(4, 3, 3, 3)), t.input(torch.randn(2, 4, 8, 8))
    options = ([4], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
    both = t.op(aten.convolution_backward.default, dy, x, w, *options)
    graph = t.returning(*(t.op(operator.getitem, both, i) for i in range(3)))
    halves = split(graph, {1, 2})
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    whole, split_apart = graph(*values), run(halves, values)
    torch.testing.assert_close(split_apart, list(whole))
    convolutions = [n.args[-1] for g in (halves.input_half, halves.weight_half) for n in g.graph.nodes if n.args[9:]]
    assert convolutions == [[True, False, False], [False, True, True]]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda t, x: t.op(aten.relu.default, x), "no gradient of a weight is a product of its own"),
        (lambda t, x: t.op(aten.add_.Tensor, x, x), r"changes a tensor in place \(aten.add_.Tensor\)"),
    ],
)
def test_what_cannot_be_split_says_why(make, reason):
    t = Trace()
    x = t.input(meta(4, 4))
    graph = t.returning(t.op(aten.mm.default, x, x), make(t, x))
    with pytest.raises(CannotSplitError, match=reason):
        split(graph, {1})


def test_random_numbers_between_products_are_refused():
    t = Trace()
    x = t.input(meta(4, 4))
    drawn = t.op(aten.bernoulli.default, t.op(aten.mm.default, x, x))
    graph = t.returning(t.op(aten.sin.default, x), t.op(aten.mm.default, x, drawn))
    with pytest.raises(CannotSplitError, match="random numbers are drawn"):
        split(graph, {1})


def run(halves, values):
    """Both halves, one after the other, as backward.py does."""
    results = list(halves.input_half(*(values[i] for i in halves.input_inputs)))
    count = len(halves.input_outputs)
    late = halves.weight_half(*(values[i] for i in halves.weight_inputs), *results[count:])
    outputs = [None] * halves.output_count
    for i, result in (*zip(halves.input_outputs, results), *zip(halves.weight_outputs, late, strict=True)):
        outputs[i] = result
    return outputs


def test_a_kernel_whose_results_are_a_dictionary_is_no_arithmetic_on_sizes():
    """As those of users' Triton kernels are."""
    t = Trace()
    node = t.graph.call_function(sorted, (t.input(torch.randn(4, 4)),))
    node.meta["val"] = {"out": torch.randn(4, 4)}
    assert classify(node) == "heavy"


# The slow, obviously right way to find the cut: try every distribution of the nodes.

VIEW, LIGHT, HEAVY = (
    {aten.t.default, aten.view.default},
    {aten.mul.Tensor, aten.sin.default, aten._to_copy.default, aten.sum.dim_IntList, aten.native_layer_norm.default},
    {aten.mm.default},
)


def random_graph(seed):
    choose = random.Random(seed)
    torch.manual_seed(seed)
    t = Trace()
    values = [t.input(torch.randn(4, 4, dtype=choose.choice([torch.float32, torch.float64]))) for _ in range(4)]
    for _ in range(choose.randint(8, 14)):
        a, b = choose.choice(values), choose.choice(values)
        kind = choose.choice(["mm", "mm", "mul", "sin", "cast", "t", "view", "norm", "sum", "zeros"])
        same = [v for v in values if v.meta["val"].dtype == a.meta["val"].dtype]
        if kind == "mm":
            values.append(t.op(aten.mm.default, a, choose.choice(same)))
        elif kind == "mul":
            values.append(t.op(aten.mul.Tensor, a, b))
        elif kind == "cast":
            values.append(t.op(aten._to_copy.default, a, dtype=choose.choice([torch.float32, torch.float64])))
        elif kind == "view":
            values.append(t.op(aten.view.default, t.op(aten.sin.default, a), [4, 4]))
        elif kind == "norm":
            both = t.op(aten.native_layer_norm.default, a, [4], None, None, 1e-5)
            values.append(t.op(operator.getitem, both, 0))
        elif kind == "sum":
            values.append(t.op(aten.mul.Tensor, a, t.op(aten.sum.dim_IntList, b, [0], True)))
        elif kind == "zeros":
            values.append(t.op(aten.mul.Tensor, a, t.op(aten.zeros.default, [4, 4])))
        else:
            values.append(t.op({"sin": aten.sin.default, "t": aten.t.default}[kind], a))
    results = [*choose.sample(values[4:], 4), values[-1]]
    deferred = set(choose.sample(range(5), choose.randint(1, 3)))
    return t.returning(*results), deferred, choose


def real(node):
    """The nodes behind views and constants."""
    if node.op == "placeholder":
        return {node}
    if node.target in VIEW:
        return real(node.args[0])
    return set() if node.target is aten.zeros.default else {node}


def reads(node):
    return {r for source in node.all_input_nodes for r in real(source)}


def upstream(nodes):
    return set(nodes).union(*(upstream(reads(n)) for n in nodes)) if nodes else set()


def fewest_bytes(graph, deferred, everything, recompute):
    outputs = next(iter(reversed(graph.graph.nodes))).args[0]
    results = {r for i in deferred for r in real(outputs[i])}
    by_i = upstream({r for i, out in enumerate(outputs) if i not in deferred for r in real(out)})
    by_w, may = set(), []
    for node in upstream(results):
        taken_out = node.target is operator.getitem
        light = node.target in LIGHT or taken_out
        if node.op == "placeholder" or (node in by_i and not (light and recompute)):
            continue
        if taken_out or (light and not (everything and node not in by_i)):
            may.append(node)
        else:
            by_w.add(node)
    best = None
    for chosen in itertools.product([False, True], repeat=len(may)):
        weight = by_w | {n for n, c in zip(may, chosen, strict=True) if c}
        available = by_i | (upstream(results) - weight)
        if not all(reads(n) <= available for n in available):
            continue
        held = {n for w in weight for n in reads(w)} | results
        held -= weight
        if all(isinstance(n.meta["val"], torch.Tensor) for n in held):
            cost = sum(n.meta["val"].nbytes for n in held)
            best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(60))
def test_random_graph(seed):
    """Both halves together give what the whole gives, and no other distribution of the work holds less."""
    for attempt in itertools.count(1000 * seed):
        graph, deferred, choose = random_graph(attempt)
        everything, recompute = choose.random() < 0.3, choose.random() < 0.5
        try:
            halves = split(graph, deferred, everything=everything, recompute=recompute)
            break
        except CannotSplitError as error:
            assert "no gradient of a weight is a product" in str(error)
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    for got, expected in zip(run(halves, values), graph(*values), strict=True):
        assert torch.equal(got, expected)
    assert held_bytes(graph, halves, deferred) == fewest_bytes(graph, deferred, everything, recompute)


def held_bytes(graph, halves, deferred):
    """What the halves hold, each tensor's memory once: what W reads, and deferred gradients that I computed."""
    nodes = {n.name: n for n in graph.graph.nodes}
    outputs = next(iter(reversed(graph.graph.nodes))).args[0]
    names = set(inputs_of(halves.weight_half))
    names |= {r.name for i in deferred if i not in halves.weight_outputs for r in real(outputs[i])}
    return sum(nodes[name].meta["val"].nbytes for name in names)
