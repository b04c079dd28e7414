"""The oracle: a stage's split backward, held against one ordinary backward on a copy.

A test describes a stage in one line and calls `check`, or is a row of a table of such stages:

    check(Stage(lambda m, x: x @ (m.a + m.b), a=(4, 4), b=(4, 4)), (3, 4))

    @table(case("sum of two weights", lambda m, x: x @ (m.a + m.b)), ...)
    def test_weights(stage, inputs, options):
        check(stage, *inputs, **options)

`check` runs two microbatches of the stage through every order in `ORDERS` (weight passes at once, late, last
microbatch first, group by group, interleaved) and compares weights' and inputs' gradients, what every hook received
and how often, and who owns the gradients' memory.

`ZBPIPE_TEST_MODULE=torch` runs the suite against torch's own module. Tests marked `wrong_on_torch` must fail there,
which is how we know that they can fail at all.
"""

import contextlib
import copy
import gc
import importlib
import itertools
import os

import pytest
import torch
from torch import nn

ON_TORCH = os.environ.get("ZBPIPE_TEST_MODULE") == "torch"
zb = importlib.import_module("torch.distributed.pipelining._backward" if ON_TORCH else "zbpipe")
needs_zbpipe = pytest.mark.skipif(ON_TORCH, reason="tests what torch's module does not have")


def wrong_on_torch(why, always=True):
    """torch's own module fails this test; a test that stops failing there has lost its teeth.

    always: False where torch fails or not by chance (the order of a set, what the compiler has cached).
    """
    return pytest.mark.xfail(ON_TORCH, reason=why, strict=always)


class Stage(nn.Module):
    """A stage from a function of (stage, *inputs). Parts are shapes (of float64 weights), tensors or modules."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        self.microbatch = 0
        self.records = {}
        self.kept = {}
        for name, part in parts.items():
            setattr(self, name, weight(*part) if isinstance(part, tuple) else part)

    def forward(self, *inputs):
        return self.function(self, *inputs)

    def log(self, name, what=lambda *args: args):
        """A hook that changes nothing and remembers what it was given in this microbatch."""

        def hook(*args):
            self.records.setdefault((name, self.microbatch), []).append(snapshot(what(*args)))

        return hook

    def keep(self, name, tensor):
        """Remember a tensor whose `.grad` is compared at the end."""
        tensor.retain_grad()
        self.kept[name, self.microbatch] = tensor


class MainGrad:
    """Among what a stage has kept, lets the oracle compare `main_grad` as it compares a retained gradient."""

    def __init__(self, w):
        self.w = w

    @property
    def grad(self):
        return self.w.main_grad


def weights_of(group):
    """The leaf tensors that a group serves, zbpipe's or torch's."""
    return [node.variable for node in group["params"]] if isinstance(group, dict) else list(group.weights)


def watch_weights(m):
    """Logs every call of a hook of each weight, as a stage's `setup`."""
    for name, w in m.named_parameters():
        w.register_hook(m.log(f"hook {name}"))
        w.register_post_accumulate_grad_hook(m.log(f"post {name}", lambda w: w.grad))


def weight(*shape, dtype=torch.float64):
    return nn.Parameter(torch.randn(shape, dtype=dtype))


def small(forward):
    """A stage whose weights are the matrices a, b, c of 4 x 4 and the vectors s, t of 4. What it does not use stays None."""
    return Stage(forward, a=(4, 4), b=(4, 4), c=(4, 4), s=(4,), t=(4,))


def net(*layers):
    """A stage of layers one after the other."""
    return Stage(lambda m, x: m.net(x), net=nn.Sequential(*layers))


def case(name, stage, *inputs, wrong="", always=True, **options):
    """A row of a table, for `check`: a stage, or the forward of a `small` one; its input is of 3 x 4 unless given.

    wrong, always: see `wrong_on_torch`.
    """
    stage = stage if isinstance(stage, Stage) else small(stage)
    marks = [wrong_on_torch(wrong, always)] if wrong else []
    return pytest.param(stage, inputs or ((3, 4),), options, marks=marks, id=name)


def table(*cases):
    return pytest.mark.parametrize(("stage", "inputs", "options"), cases)


def fresh(*shape):
    """An input, of 3 x 4 unless given."""
    return torch.randn(shape or (3, 4), dtype=torch.float64, requires_grad=True)


def input_pass(m, *inputs):
    """Forward and I of one microbatch. The outputs' gradients are ones."""
    outs = m(*inputs)
    outs = outs if isinstance(outs, (tuple, list)) else [outs]
    return zb.stage_backward_input(outs, [torch.ones_like(out) for out in outs], list(inputs), m.parameters())


def both_passes(m, *inputs):
    """Forward, I and W: the inputs' gradients."""
    dinputs, groups = input_pass(m, *inputs)
    zb.stage_backward_weight(m.parameters(), groups)
    return dinputs


@contextlib.contextmanager
def without_collector():
    """What goes within goes by itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def seed(number):
    """torch.manual_seed, but where no GPU has begun it does not note the whole stack for the time when one does."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def random_input(*shape, dtype=torch.float32):
    """What makes a fresh input for each microbatch."""
    return lambda: torch.randn(shape, dtype=dtype, requires_grad=True)


def snapshot(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (tuple, list)):
        return [snapshot(v) for v in value]
    return value


# Orders of the passes of several microbatches. Each gets a `Run`, whose list `groups` has the groups of each microbatch.


def at_once(run):
    for k in run.microbatches:
        run.forward(k)
        run.input(k)
        run.weight(k)


def late(run):
    run.inputs_of_all()
    for k in run.microbatches:
        run.weight(k)


def last_microbatch_first(run):
    run.inputs_of_all()
    for k in reversed(run.microbatches):
        run.weight(k)


def group_by_group(run):
    for k in run.microbatches:
        run.forward(k)
        run.input(k)
        for group in run.groups[k]:
            run.weight(k, [group])


def groups_reversed(run):
    for k in run.microbatches:
        run.forward(k)
        run.input(k)
        for group in reversed(run.groups[k]):
            run.weight(k, [group])


def interleaved(run):
    run.inputs_of_all()
    for row in itertools.zip_longest(*(run.groups[k] for k in run.microbatches)):
        for k, group in zip(run.microbatches, row, strict=True):
            if group is not None:
                run.weight(k, [group])


def one_weight_pass(run):
    """One call of W for all microbatches. Not among `ORDERS`: W has no microbatch then to which a hook's call belongs."""
    run.inputs_of_all()
    run.weights_of_all()


def sharing(compute):
    """`x @ w`, where `w = compute(stage)` is computed in the first microbatch and serves all: nodes that they share."""

    def forward(m, x):
        if not hasattr(m, "shared"):
            m.shared = compute(m)
        return x @ m.shared

    return forward


ORDERS = (at_once, late, last_microbatch_first, group_by_group, groups_reversed, interleaved)


class Run:
    """One copy of a stage with its microbatches, and the passes that an order calls."""

    def __init__(self, stage, inputs, impl, output_grads, weights, forward_context, untouched=True):
        self.stage = stage
        self.inputs = inputs
        self.impl = impl
        self.grads_for = output_grads
        self.weights = weights
        self.context = forward_context
        self.untouched = untouched
        self.microbatches = list(range(len(inputs)))
        self.outputs = [None] * len(inputs)
        self.output_grads = [None] * len(inputs)
        self.groups = [None] * len(inputs)
        self.dinputs = [None] * len(inputs)
        self.order = []
        self.after_first = None

    def forward(self, k):
        self.stage.microbatch = k
        seed(k)
        with self.context():
            outputs = self.stage(*self.inputs[k])
        self.outputs[k] = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        self.output_grads[k] = self.grads_for(self.outputs[k])

    def input(self, k):
        self.stage.microbatch = k
        before = snapshot([w.grad for w in self.stage.parameters()])
        given = snapshot(self.output_grads[k])
        self.dinputs[k], self.groups[k] = self.impl.stage_backward_input(
            self.outputs[k], self.output_grads[k], self.inputs[k], self.given_weights()
        )
        assert type(self.dinputs[k]) is tuple
        assert type(self.groups[k]) is list
        same(self.output_grads[k], given, "output gradients given to I")
        if self.untouched:
            same([w.grad for w in self.stage.parameters()], before, "weights' .grad after I")

    def weight(self, k, groups=None):
        self.stage.microbatch = k
        given = snapshot(self.output_grads[k])
        self.impl.stage_backward_weight(self.given_weights(), self.groups[k] if groups is None else groups)
        same(self.output_grads[k], given, "output gradients given to I, after W")
        if k not in self.order:
            self.order.append(k)
        if groups is None and self.after_first is None:
            self.after_first = snapshot([w.grad for w in self.stage.parameters()])

    def inputs_of_all(self):
        for step in (self.forward, self.input):
            for k in self.microbatches:
                step(k)

    def weights_of_all(self):
        """In one call."""
        self.order = list(self.microbatches)
        self.weight(0, [group for groups in self.groups for group in groups])

    def full_backward(self, k):
        self.stage.microbatch = k
        roots = [
            (out, grad)
            for out, grad in zip(self.outputs[k], self.output_grads[k] or itertools.repeat(None))
            if isinstance(out, torch.Tensor) and out.requires_grad and (grad is not None or out.dim() == 0)
        ]
        if roots:
            torch.autograd.backward([out for out, _ in roots], [grad for _, grad in roots])
        if self.after_first is None:
            self.after_first = snapshot([w.grad for w in self.stage.parameters()])

    def given_weights(self):
        """As torch's stages give them: a fresh iterator each time."""
        given = None if self.weights is None else list(self.weights(self.stage))
        return iter(given) if given else given  # I takes an empty iterator for one that is used up


def random_grads(outputs):
    """One gradient for each output that can have one. The same numbers for the same microbatch."""
    return [
        torch.randn_like(out, requires_grad=False) if isinstance(out, torch.Tensor) and out.requires_grad else None
        for out in outputs
    ]


def no_grads(outputs):
    """For a stage that ends in its loss."""
    return None


def bfloat16_autocast():
    """On the device of what the tests make."""
    return torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16)


def make_input(spec):
    if isinstance(spec, tuple):
        return torch.randn(spec, dtype=torch.float64, requires_grad=True)
    if callable(spec):
        return spec()
    return spec.to(torch.get_default_device()) if isinstance(spec, torch.Tensor) else spec


def twin(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def check(
    stage,
    *inputs,
    impl=None,
    orders=ORDERS,
    microbatches=2,
    setup=lambda stage: None,
    output_grads=random_grads,
    weights=lambda stage: stage.parameters(),
    existing=False,
    exact=False,
    untouched=True,
    inexact_inputs=False,
    forward_context=torch.enable_grad,
    **tolerances,
):
    """Hold I and W of `stage` against an ordinary backward on a copy, for each order.

    inputs: shapes (of a float64 input that requires grad), functions that make an input, or the input itself.
    setup: called with each copy before it runs, to register hooks.
    output_grads: from the outputs to their gradients (`random_grads`, `no_grads`, or your own).
    weights: from the stage to the weights given to I and W; None gives them None.
    existing: the weights have a gradient already.
    exact: the weights' gradients of the first microbatch must be equal bit for bit.
    untouched: I must leave the weights' `.grad` alone.
    inexact_inputs: the inputs' gradients need be equal within the tolerances only: the two sides run other kernels.
    """
    if torch.get_default_device().type != "cpu":  # a table's stages were made before there was one
        stage = copy.deepcopy(stage).to(torch.get_default_device())
    batches = [[make_input(spec) for spec in inputs] for _ in range(microbatches)]
    for order in orders:
        runs = []
        for _ in range(2):
            copied = copy.deepcopy(stage)
            if existing:
                for w in copied.parameters():
                    w.grad = torch.ones_like(w) if w.requires_grad else None
            setup(copied)
            args = [[twin(value) for value in batch] for batch in batches]
            runs.append(Run(copied, args, impl or zb, output_grads, weights, forward_context, untouched))
        split, whole = runs
        split.inexact_inputs = inexact_inputs
        try:
            order(split)
            for k in whole.microbatches:
                whole.forward(k)
            for k in split.order or whole.microbatches:
                whole.full_backward(k)
            compare(split, whole, exact, tolerances)
        except AssertionError as error:
            raise AssertionError(f"order {order.__name__}: {error}") from error
        finally:  # what is kept may have hooks that refer to the stage: a cycle that Python's collector cannot see
            for run in runs:
                run.stage.kept.clear()


def compare(split, whole, exact, tolerances):
    names = dict(split.stage.named_parameters())
    twins = dict(whole.stage.named_parameters())
    given = set(names) if split.weights is None else {n for n, w in names.items() if contains(split, w)}
    for name, w in names.items():
        if name in given:
            close(w.grad, twins[name].grad, f"gradient of weight {name}", **tolerances)
        else:
            close(w.grad, None, f"gradient of {name}, which is not among the weights")
    if exact and split.after_first is not None and split.order[0] == 0:
        same(split.after_first, whole.after_first, "weights' gradients after the first microbatch")
    for k in split.microbatches:
        compare_inputs(split, whole, k, tolerances if split.inexact_inputs else {"rtol": 0, "atol": 0})
    assert_records_equal(split.stage, whole.stage, tolerances)
    assert_grads_own_memory(split)


def contains(run, wanted):
    return any(w is wanted for w in run.weights(run.stage))


def compare_inputs(split, whole, k, tolerances):
    assert len(split.dinputs[k]) == len(split.inputs[k])
    for i, (inp, ref, grad) in enumerate(zip(split.inputs[k], whole.inputs[k], split.dinputs[k], strict=True)):
        expected = ref.grad if isinstance(ref, torch.Tensor) else None
        close(grad, expected, f"dinputs[{i}] of microbatch {k}", **tolerances)
        if isinstance(inp, torch.Tensor):
            close(inp.grad, expected, f"input {i}.grad of microbatch {k}", **tolerances)


def assert_records_equal(split, whole, tolerances):
    calls = {key: len(values) for key, values in split.records.items()}
    assert calls == {key: len(values) for key, values in whole.records.items()}, "(hook, microbatch): calls"
    for key, values in whole.records.items():
        close(split.records[key], values, f"what hook {key} received", **tolerances)
    assert split.kept.keys() == whole.kept.keys()
    for key, tensor in whole.kept.items():
        close(split.kept[key].grad, tensor.grad, f"retained gradient {key}", **tolerances)


def assert_grads_own_memory(run):
    owners = {}
    for name, w in run.stage.named_parameters():
        if w.grad is not None:
            assert w.grad.grad_fn is None
            claim(owners, w.grad, f"{name}.grad")
    others = [g for grads in (*run.dinputs, *run.output_grads) if grads for g in grads]
    for other in others:
        if isinstance(other, torch.Tensor) and other.layout == torch.strided:
            assert other.untyped_storage().data_ptr() not in owners, (
                "a weight's .grad shares memory with another gradient"
            )


def claim(owners, tensor, name):
    if tensor.layout == torch.strided and tensor.numel():
        address = tensor.untyped_storage().data_ptr()
        assert address not in owners, f"{name} and {owners[address]} share memory"
        owners[address] = name


def close(got, expected, what, **tolerances):
    if expected is None or got is None:
        assert (got is None) == (expected is None), f"{what}: got {got}, expected {expected}"
    elif isinstance(expected, (tuple, list)):
        assert len(got) == len(expected), what
        for g, e in zip(got, expected, strict=True):
            close(g, e, what, **tolerances)
    elif isinstance(expected, torch.Tensor):
        strided = expected.layout == torch.strided
        torch.testing.assert_close(
            got, expected, check_stride=False, equal_nan=True, msg=lambda m: f"{what}: {m}", **tolerances
        )
        if strided and "gradient of weight" in what:
            assert got.stride() == expected.stride(), f"{what}: strides {got.stride()} != {expected.stride()}"
    else:
        assert got == expected, what


def same(got, expected, what):
    close(got, expected, what, rtol=0, atol=0)
