"""The right holder is named first, also of what few kinds have: variables, cycles, groups, works, C++, wrappers."""

import functools
import inspect
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checks import checked
from support.functions import function_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe import _C  # of running frames: what every chain through a variable relies on
from zbpipe.leaks import check_tensor_leak, find_holders

pytestmark = pytest.mark.drops_groups

KEPT = []
PLACE = f"module global {__name__}.KEPT"
SOURCE = Path(__file__).read_text().splitlines()


def line_of(comment):
    """The place of the one line of this file that ends in a comment."""
    (number,) = [i for i, line in enumerate(SOURCE, 1) if line.endswith(f"# {comment}")]
    return f"test_holders.py:{number}"


def texts(chain):
    return [holder.text for holder in chain]


# ---- variables of running functions


def test_a_variable_of_a_running_function():
    with check_tensor_leak(action="record") as check:
        mine = {"key": torch.zeros(2)}  # the variable
    (leak,) = check.report.leaks
    function = "test_a_variable_of_a_running_function()"
    assert texts(leak.chain) == [f"variable mine of {function}", "dict item 'key'", "Tensor float32 [2]"]
    assert leak.chain[0].kind == "frame" and leak.chain[0].where.endswith(line_of("the variable"))
    assert mine["key"] is not None


def test_frame_variables_leave_nothing_behind():
    held = torch.zeros(2)
    seen = weakref.ref(held)
    variables = dict(_C.frame_variables(sys._getframe()))
    assert variables["held"] is held
    del variables, held
    assert seen() is None


def test_a_living_tensor_but_for_the_callers_variable():
    tensor = torch.zeros(3)
    assert "variables of running functions" in find_holders(tensor).chain[0].text
    KEPT.append([tensor])
    leak = find_holders(tensor)
    assert texts(leak.chain) == [PLACE, "list item 0", "list item 0", "Tensor float32 [3]"]
    assert (leak.bytes, leak.fate) == (12, "alive")


def test_a_living_tensor_in_a_dead_cycle():
    tensor = torch.ones(3)
    cycle = {"tensor": tensor}
    cycle["itself"] = cycle
    del cycle
    assert find_holders(tensor).chain[0].text == "dict item 'tensor'"


class Trainer:
    def __init__(self):
        self.weight = nn.Parameter(torch.ones(3))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1, momentum=0.9)


def test_a_librarys_running_frame_comes_after_the_programs_place():
    """A variable of torch's wrapper of step() is the optimizer, and much nearer."""
    found = []

    def closure():
        found.append(find_holders(KEPT[0]["trainer"].optimizer.state[KEPT[0]["trainer"].weight]["momentum_buffer"]))
        return torch.ones(())

    KEPT.append({"trainer": Trainer()})
    KEPT[0]["trainer"].weight.grad = torch.ones(3)
    KEPT[0]["trainer"].optimizer.step()
    KEPT[0]["trainer"].optimizer.step(closure)
    KEPT.clear()
    texts = [holder.text for holder in found[0].chain]
    assert texts[:3] == [f"module global {__name__}.KEPT", "list item 0", "dict item 'trainer'"], texts
    assert found[0].blame.text == f"attribute optimizer of {__name__}.Trainer"


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (3, TypeError, r"tensor is a int; expected a torch\.Tensor"),
        (torch.eye(2).to_sparse(), ValueError, "without one storage of its own"),
    ],
)
def test_what_is_no_tensor_has_no_holders(tensor, error, message):
    with pytest.raises(error, match=message):
        find_holders(tensor)


# ---- groups and works


@functools.partial(function_of, torch.matmul)
def handing(x, w, grad):
    extra = torch.ones(7)
    return grad, zbpipe.defer(lambda x, grad: x.mT @ grad * extra[0], weights=1, saved=(x, grad))


def groups_of(out, x, weights):
    return zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], weights)[1]


def test_groups_are_holders():
    layer, w = nn.Linear(3, 3), torch.ones(3, 3, requires_grad=True)

    def step():
        x = torch.ones(2, 3, requires_grad=True)
        KEPT.append(groups_of(layer(x.exp()).sin(), x, layer.parameters()))
        KEPT.append(groups_of(handing(x.exp(), w), x, [w]))

    report = checked(step, allow=[layer, w])
    assert {leak.chain[-1].text for leak in report.leaks} >= {
        "matrix of weight task 0: Tensor float32 [2, 3]",
        "output gradient of weight task 0: Tensor float32 [2, 3]",
    }
    assert all(leak.chain[0].kind == "module" for leak in report.leaks), report
    sizes = [group.bytes for leak in report.leaks for group in leak.chain if group.kind == "group"]
    assert set(sizes) == {KEPT[0][0].bytes_held, KEPT[1][0].bytes_held}
    (extra,) = [leak for leak in report.leaks if leak.bytes == 28]
    assert any(holder.kind == "group" for holder in extra.chain)
    assert "closure variable extra" in str(extra) and "work of weight task 0" in str(extra)
    assert find_holders(layer.weight).bytes == 36


@pytest.mark.parametrize(
    "choices", [{"checkpoint": "keep"}, {"checkpoint": "recompute"}, {"defer": "all", "checkpoint": "recompute"}]
)
def test_what_a_group_holds_is_never_something_that_cannot_be_seen(choices):
    """Nested regions: packed arguments, whose pack hooks and histories libtorch keeps to itself."""
    inner, outer = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), nn.Conv1d(1, 1, 1)

    def region(x):
        return outer(checkpoint(inner, x.sin(), use_reentrant=False).unsqueeze(1))

    def step():
        x = torch.ones(2, 3, requires_grad=True)
        with zbpipe.policy(**choices):
            out = checkpoint(region, x, use_reentrant=False)
            KEPT.append(groups_of(out, x, [*inner.parameters(), *outer.parameters()]))

    step()  # the first checkpoint of a process imports torch._dynamo
    KEPT.clear()
    report = checked(step)
    assert not report.unseen and "cannot be seen" not in str(report)
    assert all(any(holder.kind == "group" for holder in leak.chain) for leak in report.leaks), report
    held = zbpipe.memory.held(KEPT[0])
    assert report.bytes > held.bytes if held.incomplete else report.bytes == held.bytes


@pytest.mark.dist
def test_works_are_named(alone):
    (leak,) = checked(lambda: KEPT.append(torch.distributed.all_reduce(torch.zeros(9), async_op=True))).leaks
    KEPT[0].wait()
    assert leak.bytes == 36 and leak.chain[0].text == PLACE
    (work,) = [holder for holder in leak.chain if holder.kind == "work"]
    assert work.text.endswith(", which does not tell what it holds")


# ---- C++ and wrappers


@pytest.mark.system
def test_cpp_functions_are_said_to_be_unseen(cpp_function):
    weight = torch.ones(3, requires_grad=True)
    report = checked(lambda: KEPT.append(cpp_function.keep(weight)), allow=weight)
    (lost,) = [leak for leak in report.leaks if leak.views == 0]
    assert (lost.bytes, lost.chain[0].kind, lost.name) == (12, "unknown", "a block on cpu")
    assert any(what.startswith("what nodes of C++ Functions have saved") for what in report.unseen)


@pytest.fixture(scope="module")
def cpp_function(tmp_path_factory):
    from torch.utils.cpp_extension import load_inline

    # Not torch/extension.h: reading that takes a compiler three quarters of a minute.
    source = """
    #include <torch/csrc/autograd/custom_function.h>
    #include <torch/library.h>
    struct Keep : torch::autograd::Function<Keep> {
      static at::Tensor forward(torch::autograd::AutogradContext* ctx, at::Tensor x) {
        ctx->save_for_backward({x.mul(at::Scalar(2))});
        return x.clone();
      }
      static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                     torch::autograd::variable_list grads) {
        return grads;
      }
    };
    TORCH_LIBRARY(zbpipe_tests, library) {
      library.def("keep", [](at::Tensor x) { return Keep::apply(x); });
    }
    """
    load_inline(
        "zbpipe_keep",
        source,
        is_python_module=False,
        no_implicit_headers=True,
        extra_cflags=["-O0"],
        build_directory=str(tmp_path_factory.mktemp("keep")),
    )
    return torch.ops.zbpipe_tests


def test_wrappers_of_functorch_are_looked_through():
    def step():
        torch.vmap(lambda x: KEPT.append(x) or x.exp())(torch.ones(7, 1))
        torch.func.vjp(lambda x: (KEPT.append(x), x)[1], torch.eye(3).to_sparse())

    report = checked(step)
    (wrapped,) = [leak for leak in report.leaks if leak.bytes == 28]
    assert wrapped.blame.text == PLACE or report.unseen, report
    assert len(report.leaks) > 1


def test_tensors_of_a_tracer_with_symbolic_sizes():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    KEPT.append(FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 7), static_shapes=False))
    assert not checked(lambda: KEPT.append(KEPT[0] * 2))
    assert find_holders(KEPT[0]).bytes >= 0


def test_a_functional_tensor_is_looked_through():
    def step():
        KEPT.append(torch._to_functional_tensor(torch.ones(7, 1)))

    (leak,) = checked(step).leaks
    assert leak.bytes == 28 and leak.blame.text == PLACE


def test_a_functional_tensor_with_symbolic_sizes():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tensor = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 7), static_shapes=False)
    assert _C.handle_of(torch._to_functional_tensor(tensor)).facts[2] == 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensors_sizes_that_a_node_keeps_are_said_to_be_unseen():
    def step():
        KEPT.append((torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], requires_grad=True) * 2).grad_fn)

    assert any("sizes of nested tensors" in line for line in checked(step).unseen)


def test_a_nodes_raw_saved_tensor_holds_nothing():
    """It is the node's, and may be gone with it."""
    out = torch.ones(3, requires_grad=True).exp()
    raw = out.grad_fn._raw_saved_result
    assert _C.references_of(raw) == []
    del out
    assert _C.references_of(raw) == []


# ---- cycles


class Stage:
    def __init__(self, size=4):
        self.buffer = torch.zeros(size)
        self.me = self  # the attribute that leads back


def walking():
    held = torch.zeros(2)

    def walk():  # the walk
        return walk, held


def with_a_node():
    """A node's hook that has a dictionary which has the node."""
    node = torch.ones(3, requires_grad=True).exp().grad_fn
    group = {"intermediates": [node]}

    def capture(grads):  # the capture
        group["grads"] = grads

    node.register_prehook(capture)


def each_other():
    a, b = torch.ones(5), torch.ones(5)
    a.other, b.other = b, a


def fused():
    """The nearest to the weight is torch's Linear, which is as innocent as the weight."""
    model = nn.Sequential(nn.Linear(6, 1, bias=False))

    def update(weight):
        model.zero_grad()

    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(update)


def in_a_frame():
    frame = inspect.currentframe()
    tensor = torch.ones(9)
    return frame and tensor.sum() and None


def rates():
    """A cycle of torch's, with a wrapper of the optimizer's: its member is named, and no caller."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(7))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 2)


def jagged():
    assert torch.nested.nested_tensor_from_jagged(torch.ones(8), torch.tensor([0, 3, 8])).shape


CYCLES = [walking, with_a_node, each_other, fused, in_a_frame, rates, jagged, Stage, Stage]


@pytest.fixture(scope="module")
def of_cycles():
    """The report on all of them, by one search."""
    return checked(lambda: [make() for make in CYCLES])


def of_bytes(report, size):
    return [leak for leak in report.leaks if leak.bytes == size]


WALK = f"{__name__}.walking.<locals>.walk"
CAPTURE = f"{__name__}.with_a_node.<locals>.capture"
NODE = ["dict item 'intermediates'", "list item 0", "ExpBackward0"]


# The bytes of the leak, its chain, the links of its cycle, the comments on the lines that this names; how many there are.
@pytest.mark.parametrize(
    ("size", "chain", "links", "comment", "count"),
    [
        (
            8,
            [f"closure variable held of {WALK}", "Tensor float32 [2]"],
            [f"closure variable walk of {WALK}"],
            "the walk",
            1,
        ),
        (
            12,
            [f"closure variable group of {CAPTURE}", *NODE, "result, saved: Tensor float32 [3]"],
            [f"closure variable group of {CAPTURE}", *NODE, f"pre hook {CAPTURE}"],
            "the capture",
            1,
        ),
        (
            16,
            [f"attribute buffer of {__name__}.Stage", "Tensor float32 [4]"],
            [f"attribute me of {__name__}.Stage"],
            "the attribute that leads back",
            2,
        ),
    ],
)
def test_a_cycle_by_its_links_and_lines(size, chain, links, comment, count, of_cycles):
    leaks = of_bytes(of_cycles, size)
    assert chain in [texts(leak.chain) for leak in leaks] and {leak.fate for leak in leaks} == {
        "freed by the collector"
    }
    (cycle,) = [cycle for cycle in of_cycles.cycles if texts(cycle.steps) == links]
    assert f"{line_of(comment)}: " in cycle.text and cycle.text.endswith(" -> back")
    assert cycle.count == count and cycle.bytes >= count * size
    assert f"{cycle.bytes} bytes: {f'{count} like this: ' if count > 1 else ''}{cycle.text}" in str(of_cycles)


def test_tensors_that_hold_each_other_by_attributes(of_cycles):
    chains = [texts(leak.chain) for leak in of_bytes(of_cycles, 20)]
    assert chains == [["attribute other of the tensor", "Tensor float32 [5]"]] * 2


def test_of_a_cycle_through_torchs_classes_the_programs_hook_is_to_blame(of_cycles):
    (leak,) = of_bytes(of_cycles, 24)
    assert leak.blame.text.endswith("fused.<locals>.update") and leak.blame.kind in ("hook", "cell"), leak
    assert leak.in_cycle > 1 and texts(leak.chain)[-1] == "Parameter float32 [1, 6]"


def test_a_cycles_member_is_to_blame_and_no_caller(of_cycles):
    (of_frame,) = of_bytes(of_cycles, 36)
    assert "in_a_frame" in of_frame.blame.text and of_frame.in_cycle >= 1
    for leak in [*of_bytes(of_cycles, 28), *of_bytes(of_cycles, 32)]:
        assert leak.in_cycle and "variable " not in leak.blame.text, leak


# ---- memory of numpy's


class Array(np.ndarray):
    """Of a program."""

    @property
    def base(self):
        raise AssertionError("no code of the program runs")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda batch: torch.as_tensor(batch[3]), "[16], in a numpy array of 16384 bytes"),
        (
            lambda batch: torch.from_numpy(batch[3])[4:6],
            "[2], which uses 8 of 64 bytes, in a numpy array of 16384 bytes",
        ),
        (lambda batch: torch.from_numpy(batch.view(Array)[4:][3]), "[16], in a numpy array of 16384 bytes"),
        (lambda batch: torch.from_numpy(batch), "[256, 16]"),
        (
            lambda batch: torch.from_numpy(np.frombuffer(bytes(80), np.float32)[5:]),
            "[15], in a numpy array of 80 bytes",
        ),
        (
            lambda batch: torch.from_numpy(np.frombuffer(bytearray(80), np.float32)[5:]),
            "[15], in numpy's memory: what is behind the array may be larger",
        ),
        (lambda batch: torch.frombuffer(bytearray(80), dtype=torch.float32), "[20]"),
        (lambda batch: torch.from_dlpack(batch[3]), "[16]"),
        (lambda batch: torch.as_tensor(batch[3]).clone(), "[16]"),
    ],
)
@pytest.mark.filterwarnings("ignore:The given")
def test_what_a_numpy_array_behind_a_tensor_keeps(make, words):
    kept = [make(np.zeros((256, 16), np.float32))]
    assert find_holders(kept[0]).chain[-1].text == f"Tensor float32 {words}"
