"""Large and deep stages: no crash, and work that grows with the number of nodes and no faster.

Linearity is counted in node runs and operations, not in seconds. What may crash runs in a process of its own.
"""

import gc
import sys
import textwrap

import pytest
import torch
from support.oracle import Stage, needs_zbpipe, wrong_on_torch, zb
from support.processes import in_own_process
from torch import nn

pytestmark = pytest.mark.drops_groups

f64 = torch.float64


CHAINS = {
    "each with a weight": """
        weights = [torch.ones(2, requires_grad=True) for _ in range(4)]
        y, wanted = x, 25_000.0
        for i in range(100_000):
            y = y + weights[i % 4]
    """,
    "without weights": """
        y = x * w
        for i in range(100_000):
            y = y + 1.0
    """,
    "in the weights' own computation": """
        v = w
        for i in range(100_000):
            v = v + 1.0
        y, gradient = x * v, 100_001.0
        del v
    """,
    "in the weights' own computation, saving something": """
        v = w
        for i in range(100_000):
            v = v * 1.0 if i % 2 else torch.neg(v).abs()
        y = x * v
        del v
    """,
}


@wrong_on_torch("segmentation fault: nodes that Python wrapped are freed recursively")
@pytest.mark.parametrize(("chain", "dropped"), [*((chain, False) for chain in CHAINS), (list(CHAINS)[-1], True)])
def test_chain_of_100_000_nodes(chain, dropped):
    start = """
        x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        weights, wanted, gradient = [w], 1.0, 1.0
    """
    end = """
        if DROPPED:
            dinputs, groups = zb.stage_backward_input([y], [torch.ones(2)], [x], weights)
            del groups
        else:
            assert passes(y, x, weights).tolist() == [gradient] * 2
            assert [w.grad.tolist() for w in weights] == [[wanted] * 2] * len(weights)
        del y
    """
    in_own_process(
        "".join(textwrap.dedent(part) for part in (start, CHAINS[chain], end.replace("DROPPED", str(dropped))))
    )


ONES = "torch.ones(1, 1, requires_grad=True)"
BODIES = {
    "100,000 products, whose groups are dropped": f"""
        x = {ONES}
        weights = [{ONES} for _ in range(4)]
        y = x
        for i in range(100_000):
            y = y @ weights[i % 4]
        dinputs, groups = zb.stage_backward_input([y], [torch.ones(1, 1)], [x], weights)
        assert dinputs[0].item() == 1.0
        del groups, y
        assert all(w.grad is None for w in weights)
    """,
    "100,000 weights": """
        x = torch.ones(1, requires_grad=True)
        weights = [torch.ones(1, requires_grad=True) for _ in range(100_000)]
        y = x
        for w in weights:
            y = y * w
        passes(y, x, weights)
        assert all(w.grad.item() == 1.0 for w in weights)
        del y
    """,
    # 20,000 products in one group, each behind a longer chain of nodes outside the closure; and through one cast.
    **{
        f"products whose weights lie behind shared nodes, {defer}": f"""
        import zbpipe

        zbpipe.set_policy(defer={defer!r})
        x = {ONES}
        v, w = (torch.ones(1, 1, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64))
        y, chain, cast = x, v, w.float()
        for _ in range(20_000):
            chain = chain * 1.0
            y = (y @ chain) @ cast
        passes(y, x, [v, w])
        assert v.grad.item() == w.grad.item() == 20_000.0
        del y, chain
        """
        for defer in ("matrices", "all")
    },
    # 50 strands of nodes that meet.
    **{
        f"strands of {2 * length} nodes": f"""
        x = torch.ones(2, requires_grad=True)
        weights = [torch.ones(2, requires_grad=True) for _ in range(50)]
        y = x
        for w in weights:
            strand = x * w
            for _ in range({length} - 1):
                strand = strand + 1.0
                strand = strand + w
            y = y + strand
        dinput = passes(y, x, weights)
        assert dinput.tolist() == [51.0, 51.0]
        assert [w.grad.tolist() for w in weights] == [[float({length})] * 2] * 50
        del y, strand
        """
        for length in (1_000, 10_000)
    },
}


@needs_zbpipe
@pytest.mark.parametrize(
    "body", [pytest.param(b, marks=[pytest.mark.long] if "strands of 20000" in b else []) for b in BODIES]
)
def test_it_ends(body):
    in_own_process(BODIES[body])


def blocks(n):
    net = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True) for _ in range(n))

    def forward(m, x):
        for block in m.net:
            x = block(x)
        return x

    return Stage(forward, net=net)


def activity(function):
    """Runs of graph nodes and operations, counted by torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    counts = {event.key: event.count for event in profile.key_averages()}
    nodes = sum(count for key, count in counts.items() if key.startswith("autograd::engine::evaluate_function"))
    operations = sum(count for key, count in counts.items() if key.startswith("aten::"))
    return nodes, operations


def split_activity(n):
    m, x = blocks(n), torch.randn(1, 3, 4, requires_grad=True)
    out, grad = m(x), torch.ones(1, 3, 4)
    groups = []
    first = activity(lambda: groups.extend(zb.stage_backward_input([out], [grad], [x], m.parameters())[1]))
    second = activity(lambda: zb.stage_backward_weight(m.parameters(), groups))
    return first, second


def whole_activity(n):
    m, x = blocks(n), torch.randn(1, 3, 4, requires_grad=True)
    out, grad = m(x), torch.ones(1, 3, 4)
    return activity(lambda: out.backward(grad))


def test_operations_of_both_passes_grow_linearly_with_the_number_of_blocks():
    (in4, wt4), (in16, wt16) = split_activity(4), split_activity(16)
    for few, many in zip((*in4, *wt4), (*in16, *wt16), strict=True):
        assert many <= 4 * few + 8


@needs_zbpipe
def test_both_passes_together_run_few_operations_more_than_one_backward():
    (_, i), (_, w) = split_activity(8)
    _, whole = whole_activity(8)
    assert i + w <= 1.25 * whole


@needs_zbpipe
def test_one_engine_run_in_the_input_pass_and_at_most_one_in_the_weight_pass():
    m, x = blocks(4), torch.randn(1, 3, 4, requires_grad=True)
    tasks = {"input": set(), "weight": set()}
    now = "input"

    def note(_):
        tasks[now].add(torch._C._current_graph_task_id())

    for w in m.parameters():
        w.register_hook(note)
    x.register_hook(note)
    out = m(x)
    out.register_hook(note)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    now = "weight"
    zb.stage_backward_weight(m.parameters(), groups)
    assert len(tasks["input"] - {-1}) == 1
    assert len(tasks["weight"] - {-1}) <= 1


def blocks_made_by_input_pass(y, x, weights):
    """Python's allocated blocks after I less those before, and its objects for nodes."""
    outputs, grads = [y], [torch.ones(2, 2)]
    gc.collect()
    before = sys.getallocatedblocks()
    result = zb.stage_backward_input(outputs, grads, [x], weights)
    made = sys.getallocatedblocks() - before
    del result
    return made, sum(type(one).__name__.endswith("Backward0") for one in gc.get_objects())


def ones(number):
    return [torch.ones(2, 2, requires_grad=True) for _ in range(number)]


def nodes_between(count):
    x, *weights = ones(9)
    y = x
    for w in weights:
        y = y @ w
        for _ in range(count):
            y = y + 1.0
    return y, x, weights


def nodes_of_a_computed_weight(compute):
    def make(count):
        x, w = ones(2)
        v = w
        for _ in range(count):
            v = compute(v)
        return x @ v, x, [w]

    return make


def weights_of_one_group(count):
    x, *weights = ones(count + 1)
    return x @ torch.stack(weights).sum(0), x, weights


@needs_zbpipe
@pytest.mark.parametrize(
    "make",
    [
        nodes_between,
        nodes_of_a_computed_weight(lambda v: v.sin()),
        nodes_of_a_computed_weight(lambda v: v * 1.0),
        nodes_of_a_computed_weight(lambda v: v[torch.arange(2)]),
        weights_of_one_group,
    ],
    ids=["node", "node that saves a tensor", "node that saves nothing", "node that saves a list", "weight"],
)
def test_no_python_object_per(make):
    blocks_made_by_input_pass(*make(10))
    (few, nodes), (many, of_many) = (blocks_made_by_input_pass(*make(count)) for count in (10, 1_000))
    assert abs(many - few) < 50
    assert of_many == nodes


def test_stack_of_2000_inputs_that_each_have_a_bias():
    xs = [torch.randn(2, dtype=f64, requires_grad=True) for _ in range(2000)]
    biases = [torch.randn(2, dtype=f64, requires_grad=True) for _ in range(2000)]
    for k in (1, 2):
        out = torch.stack([x + b for x, b in zip(xs, biases, strict=True)])
        grad = torch.randn_like(out)
        dinputs, groups = zb.stage_backward_input([out], [grad], xs, biases)
        assert len(groups) == 2000
        before = torch.zeros_like(grad) if k == 1 else torch.stack([b.grad for b in biases])
        zb.stage_backward_weight(biases, groups)
        torch.testing.assert_close(torch.stack([b.grad for b in biases]), before + grad)
        if k == 1:
            torch.testing.assert_close(torch.stack(dinputs), grad)
