"""Bad input is refused before anything is touched; failures come out as torch's; a weight pass that failed goes on."""

import collections
import inspect
import warnings
import weakref

import pytest
import torch
from support import oracle
from support.functions import FailsAt, Planned, function_of, handing_through, raising
from support.oracle import Stage, check, fresh, input_pass, needs_zbpipe, sharing, small, weights_of, wrong_on_torch, zb
from support.processes import in_own_process
from torch import nn

pytestmark = pytest.mark.drops_groups

f64 = torch.float64


class Case:
    """One microbatch of a two-layer stage, forward done."""

    def __init__(self, forward=lambda m, x: (x @ m.a).sin() @ m.b, **parts):
        self.m = Stage(forward, **(parts or {"a": (4, 4), "b": (4, 4)}))
        self.x = fresh()
        self.out = self.m(self.x)
        self.grad = torch.randn_like(self.out)
        self.expected = list(torch.autograd.grad(self.m(self.x), [self.x, *self.m.parameters()], self.grad))

    def input(self, outputs=None, grads="mine", inputs=None, weights=None):
        grads = [self.grad] if isinstance(grads, str) else grads
        return zb.stage_backward_input(
            [self.out] if outputs is None else outputs,
            grads,
            [self.x] if inputs is None else inputs,
            self.m.parameters() if weights is None else weights,
        )

    def weight(self, groups, weights=None):
        return zb.stage_backward_weight(self.m.parameters() if weights is None else weights, groups)

    def assert_untouched(self):
        assert self.x.grad is None
        assert all(w.grad is None for w in self.m.parameters())
        assert self.out.requires_grad
        self.assert_still_works()

    def assert_still_works(self):
        _, groups = self.input()
        self.weight(groups)
        self.assert_right()

    def assert_right(self):
        torch.testing.assert_close([self.x.grad, *(w.grad for w in self.m.parameters())], self.expected)


# Values of no use for an argument of I, which is named; weights that are no use for W as well.
NO_WEIGHTS = {"no iterable": 3, "a tensor": torch.ones(2), "an int": [3], "a str": ["text"]}
WRONG_TYPES = {
    ("outputs", "stage_outputs_or_loss"): {
        "no sequence": 3,
        "a tensor": torch.ones(()),
        "an int": [3],
        "a str": ["text"],
        "an object": [object()],
    },
    ("grads", "output_grads"): {"no sequence": 3, "a tensor": torch.ones(1, 3, 4), "a str": ["text"], "a float": [3.0]},
    ("inputs", "input_values"): {"an int": 3, "a tensor": torch.ones(3, 4)},
    ("weights", "weights"): NO_WEIGHTS,
}
# What is called, what is raised, and what it says.
REFUSED_BY_I = {
    **{
        f"{argument} of which one is {what}": (
            lambda c, argument=argument, value=value: c.input(**{argument: value}),
            TypeError,
            name,
        )
        for (argument, name), values in WRONG_TYPES.items()
        for what, value in values.items()
    },
    "no gradient for one output": (lambda c: c.input(grads=[]), ValueError, r"(?s)output_grads(?=.*1).*0"),
    "two gradients for one output": (lambda c: c.input(grads=[c.grad] * 2), ValueError, r"(?s)output_grads(?=.*1).*2"),
    "a gradient of wrong shape": (
        lambda c: c.input(grads=[torch.ones(3, 5, dtype=f64)]),
        ValueError,
        r"output_grads(?=.*\[3, 5\]).*\[3, 4\]",
    ),
    "a gradient of wrong dtype": (
        lambda c: c.input(grads=[c.grad.float()]),
        ValueError,
        r"(?i)output_grads(?=.*float).*(double|float64)",
    ),
    "a gradient on another device": (
        lambda c: c.input(grads=[c.grad.to("meta")]),
        ValueError,
        "output_grads(?=.*meta).*cpu",
    ),
    "the second output's gradient of wrong shape": (
        lambda c: c.input(outputs=[c.out, c.m(c.x)], grads=[c.grad, torch.ones(7, dtype=f64)]),
        ValueError,
        r"output_grads\[1\]",
    ),
    "inputs that are None": (
        lambda c: zb.stage_backward_input([c.out], [c.grad], None, c.m.parameters()),
        TypeError,
        "input_values is None",
    ),
    "inputs of a whole backward that are a tensor": (
        lambda c: zb.stage_backward(c.out, c.grad, c.x),
        TypeError,
        "input_values is a Tensor",
    ),
    "the second of one output": (
        lambda c: zb.stage_backward([c.out], [c.grad], [c.x], [1]),
        RuntimeError,
        "Failed to run stage backward",
    ),
    "no arguments of I": (lambda c: zb.stage_backward_input(), TypeError, "argument"),
    "five arguments of I": (lambda c: zb.stage_backward_input(1, 2, 3, 4, 5), TypeError, "argument"),
    "no arguments of W": (lambda c: zb.stage_backward_weight(), TypeError, "argument"),
}


@needs_zbpipe
@pytest.mark.parametrize("what", REFUSED_BY_I)
def test_refused_before_the_input_pass_touches_anything(what):
    call, error, said = REFUSED_BY_I[what]
    case = Case()
    with pytest.raises(error, match=said):
        call(case)
    case.assert_untouched()


REFUSED_BY_W = {
    **{
        f"weights of which one is {what}": (
            lambda c, groups, value=value: c.weight(groups, weights=value),
            TypeError,
            "weights",
        )
        for what, value in NO_WEIGHTS.items()
    },
    "another stage's weights": (lambda c, groups: c.weight(groups, Case().m.parameters()), ValueError, "weights"),
    "one of a group's two weights": (lambda c, groups: c.weight(groups, [c.m.a]), ValueError, "weights"),
    "an iterator that I has used up": (
        lambda c, groups: c.weight(groups, iter(())),
        ValueError,
        "0 weights; .* in a list: an iterator serves one call",
    ),
    "groups that are no iterable": (lambda c, groups: c.weight(3), TypeError, "param_groups"),
    **{
        f"{name}{beside}": (
            lambda c, groups, bad=bad, beside=beside: c.weight([*groups, bad] if beside else [bad]),
            TypeError,
            "param_groups",
        )
        for name, bad in (
            ("an int", 3),
            ("a dict", {}),
            ("a group of torch's", {"params": set(), "intermediates": []}),
            ("None", None),
        )
        for beside in ("", " beside groups")
    },
}


@needs_zbpipe
@pytest.mark.parametrize("what", REFUSED_BY_W)
def test_refused_before_the_weight_pass_touches_anything(what):
    call, error, said = REFUSED_BY_W[what]
    case = Case(lambda m, x: (x @ (m.a + m.b)).sin() @ m.c, a=(4, 4), b=(4, 4), c=(4, 4))
    _, groups = case.input()
    with pytest.raises(error, match=said):
        call(case, groups)
    assert all(w.grad is None for w in case.m.parameters())
    case.weight(groups)
    case.assert_right()


Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("stage backward input", lambda x: [x]),
        ("stage backward", lambda x: [x, 3, "text", None]),
        pytest.param("stage backward", lambda x: (x, [x, (x,)], {"key": x, 1: [None]}), marks=needs_zbpipe),
        pytest.param("stage backward", lambda x: {"one": Pair(x, 2.5)}, marks=needs_zbpipe),
    ],
    ids=["input pass", "list", "nested", "named tuple"],
)
def test_failure_comes_out_as_torchs_word_for_word(name, inputs):
    from torch.distributed.pipelining._debug import map_debug_info

    case = Case()
    case.x.register_hook(raising())
    values = inputs(case.x)
    given = [case.out, case.grad, values]
    if name.endswith("input"):
        given = [[case.out], [case.grad], values, case.m.parameters()]
    with pytest.raises(RuntimeError) as failure:
        getattr(zb, name.replace(" ", "_"))(*given)
    said = str(failure.value)
    assert (inspect.cleandoc(said) if oracle.ON_TORCH else said) == (
        f"Failed to run {name}:\n"
        f"Stage output: {map_debug_info(given[0])}\n"
        f"Output gradient: {map_debug_info(given[1])}\n"
        f"Input: {map_debug_info(list(values))}"
    )
    assert isinstance(failure.value.__cause__, Planned)
    assert case.x.grad is None


@needs_zbpipe
def test_an_argument_that_has_no_text_does_not_hide_the_failure():
    class Silent:
        def __str__(self):
            raise ValueError("has no text")

    case = Case()
    case.x.register_hook(raising())
    with pytest.raises(RuntimeError, match=r"(?s)Failed to run stage backward input.*Input: a list") as failure:
        case.input(inputs=[case.x, Silent()])
    assert isinstance(failure.value.__cause__, Planned)


@needs_zbpipe
def test_a_failed_pass_imports_nothing():
    """What torch's own module imports for its message takes memory, which may have run out, and seconds."""
    body = """
        x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        (x @ w).backward(torch.ones(2, 2))  # the first one imports things of torch's own
        x.register_hook(lambda grad: 1 / 0)
        for run in (
            lambda out: zb.stage_backward_input([out], [torch.ones(2, 2)], [x], [w]),
            lambda out: zb.stage_backward(out, torch.ones(2, 2), [x]),
        ):
            before = set(sys.modules)
            try:
                run(x @ w)
            except RuntimeError as error:
                assert isinstance(error.__cause__, ZeroDivisionError)
            assert set(sys.modules) == before
        assert "torch.distributed.pipelining" not in sys.modules
    """
    in_own_process(body, started_anew=True)


@needs_zbpipe
def test_an_error_of_the_input_pass_that_is_kept_keeps_no_activation():
    """Without its tracebacks, whose frames have the caller's variables; without the collector's help."""
    in_own_process("""
        import gc
        import weakref

        def without_traces(error):
            if error:
                error.__traceback__ = None
                without_traces(error.__cause__)
                without_traces(error.__context__)

        def fail():
            x, w = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
            x.register_hook(lambda grad: 1 / 0)
            hidden = (x @ w).tanh()
            try:
                zb.stage_backward_input([hidden @ w], [torch.ones(2, 2)], [x], [w])
            except RuntimeError as error:
                without_traces(error)
                return error, weakref.ref(hidden)

        gc.disable()
        error, hidden = fail()
        assert isinstance(error.__cause__, ZeroDivisionError) and hidden() is None
    """)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_failed_input_pass_leaves_no_hook_of_its_own_and_a_stage_that_works(error):
    """An interruption is not wrapped."""

    def hook(_):
        raise error("from the hook")

    case = Case(lambda m, x: (x.exp() @ m.a).sin() @ m.b)
    handle = case.x.register_hook(hook)
    wrapped = error is ValueError
    with pytest.raises(RuntimeError if wrapped else error, match="Failed to run" if wrapped else "from the hook"):
        case.input()
    handle.remove()
    assert not case.x._backward_hooks
    assert all(not w._backward_hooks for w in case.m.parameters())
    case.out = case.m(case.x)
    case.assert_still_works()


def heavy_and_light():
    return Case(
        lambda m, x: torch.nn.functional.conv1d(((m.one(x) * m.s).sin() @ (m.a @ m.b) + m.two(x))[None], m.k)[0],
        one=nn.Linear(4, 4, dtype=f64),
        two=nn.Linear(4, 4, dtype=f64),
        s=(4,),
        a=(4, 4),
        b=(4, 4),
        k=(3, 3, 1),
    )


KINDS = ("register_hook", "register_post_accumulate_grad_hook")
names = [name for name, _ in heavy_and_light().m.named_parameters()]


@needs_zbpipe
@pytest.mark.parametrize("name", names)
@pytest.mark.parametrize("kind", KINDS)
def test_weight_pass_that_failed_goes_on_where_it_stopped(name, kind):
    """One weight's hook raises once; hooks of the finished weights are not run again, nothing is added twice to what is
    there already."""
    case = heavy_and_light()
    for w in case.m.parameters():
        w.grad = torch.ones_like(w)
    weights = dict(case.m.named_parameters())
    getattr(weights[name], kind)(raising())
    for other, w in weights.items():
        if other != name:
            w.register_post_accumulate_grad_hook(case.m.log(other))
    _, groups = case.input()
    with pytest.raises((Planned, RuntimeError)):
        case.weight(groups)
    case.weight(groups)
    torch.testing.assert_close([w.grad - 1 for w in case.m.parameters()], case.expected[1:])
    assert {key[0]: len(calls) for key, calls in case.m.records.items()} == {
        other: 1 for other in weights if other != name
    }


@needs_zbpipe
@pytest.mark.parametrize(("first", "then"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("at", ["a weight", "a node"])
def test_a_retry_runs_no_node_whose_weights_have_been_served(at, first, then):
    """It would have nothing left to run with; its hooks would come twice, and its kernels would add twice."""
    m = Stage(None, **dict.fromkeys("abcd", (4, 4)))
    x, seen = fresh(4, 4), []
    expected = torch.autograd.grad(torch.addmm(m.c * m.d, x, m.a * m.b).sum(), list(m.parameters()))
    u, v = m.c * m.d, m.a * m.b
    v.register_hook(lambda grad: seen.append(grad.shape))
    (m.b if at == "a weight" else u).register_hook(raising())
    y = torch.addmm(u, x, v)
    _, groups = zb.stage_backward_input([y], [torch.ones_like(y)], [x], m.parameters())
    with pytest.raises((Planned, RuntimeError)):
        zb.stage_backward_weight(m.parameters(), groups, retain_graph=first)
    zb.stage_backward_weight(m.parameters(), groups, retain_graph=then)
    assert seen == [(4, 4)]
    torch.testing.assert_close([w.grad for w in m.parameters()], list(expected))


@needs_zbpipe
def test_weight_pass_that_failed_goes_on_group_by_group():
    case = heavy_and_light()
    case.m.k.register_hook(raising())
    _, groups = case.input()
    with pytest.raises((Planned, RuntimeError)):
        case.weight(groups)
    for group in reversed(groups):
        try:
            case.weight([group])
        except RuntimeError as spent:
            assert "already" in str(spent)
    case.assert_right()


CHANGED = "modified by an inplace operation"


@needs_zbpipe
@pytest.mark.parametrize(
    ("stage", "shape", "make"),
    [
        (small(lambda m, h: (h @ m.a).sin()), (3, 4), lambda x: x * 2.0),
        (small(lambda m, h: (h @ m.a).sin() @ m.b), (3, 4), lambda x: x),
        (Stage(lambda m, h: m.net(h), net=nn.Conv1d(2, 3, 2, dtype=f64)), (2, 2, 5), lambda x: x),
        (
            Stage(lambda m, h: torch.bmm(h, m.k).sum(0) @ m.b, k=(2, 4, 4), b=(4, 4)),
            (3, 4),
            lambda x: x.sin().expand(2, 3, 4) * 1.0,
        ),
    ],
    ids=["activation", "input", "input of a convolution", "of a batched product"],
)
def test_factor_changed_between_the_passes_is_refused(stage, shape, make):
    x = fresh(*shape)
    stage.to(x.device)
    h = make(x)
    out = stage(h)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], stage.parameters())
    with torch.no_grad():
        h.mul_(2.0)
    for part in (groups, groups[::-1]):
        with pytest.raises(RuntimeError, match=CHANGED):
            zb.stage_backward_weight(stage.parameters(), part)
        assert all(w.grad is None for w in stage.parameters())


def test_activation_changed_before_the_input_pass_is_refused_as_autograd_does():
    x = fresh()
    m = Stage(lambda m, x: x, a=(4, 4))
    h = x.exp()
    out = h.sin() @ m.a
    with torch.no_grad():
        h.mul_(2.0)
    with pytest.raises(RuntimeError, match="Failed to run stage backward input") as failure:
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    assert CHANGED in str(failure.value.__cause__)


SECOND = "Trying to backward through the graph a second time"


@wrong_on_torch("I keeps the whole graph")
@pytest.mark.parametrize(
    "forward",
    [lambda m, x: ((h := x.exp().sin()) @ m.a, h), lambda m, x: ((h := x @ m.a).sin(), h)],
    ids=["plain", "through a split node"],
)
def test_ordinary_backward_through_a_consumed_graph_gives_torchs_error(forward):
    m, x = small(forward), fresh()
    out, h = m(x)
    zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    with pytest.raises(RuntimeError, match=SECOND):
        h.sum().backward()
    assert m.a.grad is None


@needs_zbpipe
def test_second_input_pass_through_a_consumed_graph_gives_torchs_error():
    m, x = small(lambda m, x: (x.exp() @ m.a).sin()), fresh()
    h = m(x)
    out, again = h.tanh(), h.cos()
    zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
    with pytest.raises(RuntimeError, match="Failed to run stage backward input") as failure:
        zb.stage_backward_input([again], [torch.ones_like(again)], [x], m.parameters())
    assert SECOND in str(failure.value.__cause__)


@needs_zbpipe
def test_two_losses_of_one_graph_want_one_input_pass():
    m = Stage(lambda m, x: (x @ m.a).sin(), a=(4, 4))
    for together in (False, True):
        x = fresh()
        out = m(x)
        losses = [out.pow(2).mean(), out.abs().mean()]
        expected = torch.autograd.grad(sum(losses), [x, m.a], retain_graph=True)
        if not together:
            zb.stage_backward_input(losses[:1], None, [x], [m.a])
            with pytest.raises(RuntimeError) as failure:
                zb.stage_backward_input(losses[1:], None, [x], [m.a])
            said = str(failure.value.__cause__)
            assert "to one call of stage_backward_input" in said and "retain_graph=True" not in said
            continue
        _, groups = zb.stage_backward_input(losses, None, [x], [m.a])
        zb.stage_backward_weight([m.a], groups)
        torch.testing.assert_close((x.grad, m.a.grad), expected)


@needs_zbpipe
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_weight_pass_of_two_microbatches_that_failed_once_adds_their_shared_nodes_once(name, kind):
    def failing_once(run):
        run.inputs_of_all()
        getattr(getattr(run.stage, name), kind)(raising())
        with pytest.raises((Planned, RuntimeError)):
            run.weights_of_all()
        run.weights_of_all()

    product = sharing(lambda m: m.a + m.b)
    check(Stage(lambda m, x: product(m, x) + m.c, a=(4, 4), b=(4, 4), c=(4,)), (3, 4), orders=(failing_once,))
    check(Stage(lambda m, x: product(m, x) @ m.c, a=(4, 4), b=(4, 4), c=(4, 4)), (3, 4), orders=(failing_once,))


def test_warning_made_an_error_among_the_arguments_changes_nothing():
    """A sparse loss: the ones that its backward begins with warn that such tensors are in beta."""
    x = torch.eye(3, requires_grad=True)
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y = (x * 2).to_sparse_csr()
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="beta"):
                zb.stage_backward_input([y], None, [x], [])
            assert x.grad is None
            warnings.simplefilter("ignore")
            zb.stage_backward_input([y], None, [x], [])
    finally:
        torch.set_warn_always(before)
    assert torch.equal(x.grad, torch.full((3, 3), 2.0) * torch.eye(3))


def warns_in_its_backward(tensor):
    """Rows picked by a mask of bytes: forward and backward warn, from C++, that it is deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor[torch.tensor([1, 1, 0, 1], dtype=torch.uint8)]


@needs_zbpipe
@pytest.mark.parametrize("retain", [False, True])
def test_warning_made_an_error_is_printed_by_the_weight_pass_and_nothing_is_lost(retain, capsys):
    m = Stage(lambda m, x: x @ warns_in_its_backward(m.a) @ m.b, a=(4, 4), b=(4, 4))
    total = 0
    for _ in range(2):
        x = fresh(2, 3)
        _, groups = input_pass(m, x)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            zb.stage_backward_weight(m.parameters(), groups, retain)
            assert "uint8" in capsys.readouterr().err
            warnings.simplefilter("ignore")
            if retain:
                zb.stage_backward_weight(m.parameters(), groups)
            expected = torch.autograd.grad(m(x).sum(), list(m.parameters()))
        total = [g + (1 + retain) * e for g, e in zip(total or [0, 0], expected, strict=True)]
        torch.testing.assert_close([w.grad for w in m.parameters()], total)


def fails_as_it_is_read():
    raise TypeError("from the generator")
    yield


@pytest.mark.parametrize("argument", ["weights of I", "weights of W", "groups"])
def test_error_within_the_callers_generator_passes_through(argument):
    case = Case()
    groups = None if argument == "weights of I" else case.input()[1]
    call = {
        "weights of I": lambda broken: case.input(weights=broken),
        "weights of W": lambda broken: case.weight(groups, weights=broken),
        "groups": case.weight,
    }[argument]
    with pytest.raises(TypeError, match="from the generator") as failure:
        call(fails_as_it_is_read())
    assert str(failure.value) == "from the generator"
    groups = groups or case.input()[1]
    case.weight(groups)
    case.assert_right()


@needs_zbpipe
def test_post_accumulate_hook_that_raises_does_not_skip_the_hooks_of_the_accumulator():
    """The gradient is added, so what waits for the accumulator (DDP's reducer) must hear of it: once."""
    case = Case()
    seen = []
    node = torch.autograd.graph.get_gradient_edge(case.m.a).node
    node.register_hook(lambda *_: seen.append(1))
    case.m.a.register_post_accumulate_grad_hook(raising())
    _, groups = case.input()
    with pytest.raises((Planned, RuntimeError)):
        case.weight(groups)
    assert seen == [1]
    case.weight(groups)
    assert seen == [1]
    case.assert_right()


@needs_zbpipe
@pytest.mark.parametrize("watched", ["all of its weights", "one of two", "none"])
def test_groups_that_a_failed_call_has_begun_to_let_go_of_are_spent_by_the_retry(watched):
    """Retained by the retry alone they would have nothing left to add, or a part: a third call must not seem right."""
    if watched == "none":
        case = Case(lambda m, x: (x @ m.a).sin() @ m.b + m.c, a=(4, 4), b=(4, 4), c=(4,))
        weights = [case.m.b]  # its group comes last: the others have been added without the engine
    else:
        case = heavy_and_light()
        weights = list(case.m.parameters())[: None if watched == "all of its weights" else 1]
    for w in weights:
        w.register_hook(raising())
    _, groups = case.input()
    with pytest.raises((Planned, RuntimeError)):
        case.weight(groups)
    for _ in range(9):
        try:
            zb.stage_backward_weight(case.m.parameters(), groups, retain_graph=True)
        except (Planned, RuntimeError):
            continue
        break
    case.assert_right()
    begun = [group for group in groups if group.spent]
    assert begun
    with pytest.raises(RuntimeError, match="is spent"):
        case.weight(begun)
    case.assert_right()


COPIES = (torch.ops.aten.clone, torch.ops.aten.new_empty_strided, torch.ops.aten.empty_strided)


# x @ w, whose weight's gradient is laid out otherwise than the weight.
column_major = function_of(torch.matmul, lambda x, w, grad: (grad @ w.t(), (grad.t() @ x).t()))


@needs_zbpipe
@pytest.mark.parametrize("watched", [False, True])
def test_kept_gradient_that_could_not_be_laid_out_anew_is_still_there_for_the_next_call(watched):
    m = Stage(lambda m, x: column_major(x, m.a), a=(4, 4))
    if watched:
        m.a.register_hook(lambda grad: None)
    for _ in range(2):
        m.a.grad = None
        x = fresh()
        out = m(x)
        grad = torch.randn_like(out)
        _, groups = zb.stage_backward_input([out], [grad], [x], m.parameters())
        with FailsAt(0, *COPIES), pytest.raises(torch.OutOfMemoryError):
            zb.stage_backward_weight(m.parameters(), groups)
        zb.stage_backward_weight(m.parameters(), groups)
        torch.testing.assert_close(m.a.grad, x.detach().t() @ grad)
        assert m.a.grad.is_contiguous()


def error_of(fails, call):
    try:  # pytest.raises would keep it in a cycle
        with FailsAt(fails):
            call()
    except RuntimeError as error:
        return weakref.ref(error.__cause__ or error)


@needs_zbpipe
@pytest.mark.parametrize("watched", [False, True], ids=["alone", "by the engine"])
def test_nothing_keeps_an_error(watched):
    """Its traceback refers to the frames of what failed, and these to a microbatch's tensors."""
    case = Case()
    if watched:
        case.m.a.register_hook(lambda grad: None)
        case.m.b.register_hook(lambda grad: None)
    _, groups = case.input()
    assert error_of(0, lambda: case.weight(groups))() is None
    case.weight(groups)
    assert error_of(0, Case().input)() is None


twice = function_of(lambda w: w * w, lambda w, grad: 2.0 * grad * w)


def written_into(a, b):
    """In place: the node of the write has the one that computed what was written within it."""
    c = torch.zeros(4, 4, dtype=f64)
    c[:2].addcmul_(a[:2], b[:2])
    return c


COMPUTED = {
    "a product of elements": lambda a, b: a * b,
    "a product of matrices": lambda a, b: a @ b,
    "behind a chain": lambda a, b: (a.sin() + b.cos()).exp().t(),
    "a list of tensors": lambda a, b: (
        torch.einsum("ij,jk->ik", a, b).prod(0).expand(4, 4) + torch.cat([a[:2], b[2:]]) * a
    ),
    "a Function": lambda a, b: twice(a) + twice(b),
    "written in place": written_into,
}


@needs_zbpipe
@pytest.mark.parametrize("computed", COMPUTED)
@pytest.mark.parametrize("watched", [False, True])
def test_what_nodes_of_a_computed_weight_have_saved_is_checked_before_anything_is_added(computed, watched):
    """And where nothing was changed, the weight pass is as right as ever."""
    m = Stage(lambda m, x: (x @ m.plain, x @ COMPUTED[computed](m.a, m.b)), plain=(4, 4), a=(4, 4), b=(4, 4))
    check(m, (3, 4))
    if watched:
        m.plain.register_hook(lambda grad: None)
    x = fresh()
    outs = m(x)
    _, groups = zb.stage_backward_input(outs, [torch.ones_like(out) for out in outs], [x], m.parameters())
    with torch.no_grad():
        for w in m.parameters():
            w.add_(1.0)
    for part in (groups, groups[::-1]):
        with pytest.raises(RuntimeError, match=CHANGED) as refusal:
            zb.stage_backward_weight(m.parameters(), part)
        assert "float64[" in str(refusal.value) and "expected version" in str(refusal.value)
        assert all(w.grad is None for w in m.parameters())


@needs_zbpipe
def test_factor_that_a_later_node_of_the_same_backward_overwrites():
    """The refusal names the node and the weight, and what helps; which does."""
    m = Stage(lambda m, x: x @ m.w, w=(4, 5))

    writes_over = handing_through(lambda x: x.clone(), lambda grad: factors[-1].detach().add_(1.0) * 0 + grad)

    factors = []

    def passes(**choices):
        x = fresh()
        factors.append(writes_over(x))
        before = factors[-1].detach().clone()
        out = m(factors[-1])
        with zb.policy(**choices):
            _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], m.parameters())
        return groups, before

    with pytest.raises(RuntimeError, match=CHANGED) as refusal:
        zb.stage_backward_weight(m.parameters(), passes()[0])
    for words in (
        f"MmBackward0 for the weight of float64[4, 5] on {m.w.device}",
        "policy(exclude=[weight])",
        "a clone",
    ):
        assert words in str(refusal.value)
    assert m.w.grad is None
    groups, before = passes(exclude=[m.w])
    zb.stage_backward_weight(m.parameters(), groups)
    torch.testing.assert_close(m.w.grad, before.t() @ torch.ones(3, 5, dtype=f64))


# A weight that is no leaf any more since the forward: an ordinary backward refuses to accumulate into it.

INTERIOR = "leaf variable has been moved into the graph interior"


def move_into_the_interior(w):
    w.requires_grad_(False)
    w.mul_(torch.ones((), dtype=f64, requires_grad=True))


@needs_zbpipe
def test_weight_that_has_been_moved_into_the_interior_is_refused_before_the_input_pass():
    m = Stage(lambda m, x: (x + m.a).sin() @ m.b, a=(4,), b=(4, 4))
    x = fresh()
    out = m(x)
    move_into_the_interior(m.a)
    with pytest.raises(RuntimeError) as failure:
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], None)
    assert INTERIOR in str(failure.value.__cause__)
    assert x.grad is None
    with pytest.raises(ValueError, match=r"weights\[0\] of float64\[4\] on cpu is not a leaf"):
        zb.stage_backward_input([out], [torch.ones_like(out)], [x], [m.a, m.b])
    # Nothing has been changed: for the other weight alone, which nobody moved, both passes are right.
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], [m.b])
    zb.stage_backward_weight([m.b], groups)
    torch.testing.assert_close(m.b.grad, (x + m.a).sin().sum(0).detach()[:, None].expand(4, 4))


@needs_zbpipe
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("watched", [True, False])
def test_weight_that_has_been_moved_into_the_interior_is_refused_before_the_weight_pass(weights, watched):
    m = Stage(lambda m, x: (x + m.a).sin() @ m.b, a=(4,), b=(4, 4))
    given = [m.a, m.b] if weights else None
    x = fresh()
    out = m(x)
    if watched:
        m.b.register_hook(lambda grad: None)
    _, groups = zb.stage_backward_input([out], [torch.ones_like(out)], [x], given)
    move_into_the_interior(m.a)
    with pytest.raises(RuntimeError, match=INTERIOR + r": float64\[4\] on cpu, for which param_groups\[\d\]"):
        zb.stage_backward_weight(given, groups)
    assert m.b.grad is None
    (whole,) = [group for group in groups if any(weight is m.b for weight in weights_of(group))]
    zb.stage_backward_weight([m.b] if weights else None, [whole])
    assert m.b.grad is not None


@needs_zbpipe
@pytest.mark.parametrize("shape", [(), (3,)])
def test_complex_output_without_gradient_is_refused(shape):
    m = Stage(
        lambda m, x: (x * m.c).sum(0) if not shape else x * m.c, c=nn.Parameter(torch.ones(3, dtype=torch.complex128))
    )
    x = fresh(3)
    with pytest.raises(
        RuntimeError, match=r"only for real outputs, and stage_outputs_or_loss\[0\] is a tensor of complex"
    ):
        zb.stage_backward_input([m(x)], None, [x], m.parameters())
    assert x.grad is None
    oracle.both_passes(m, x)
    torch.testing.assert_close(m.c.grad, x.detach().to(torch.complex128))
