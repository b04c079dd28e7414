"""The right holder is named first, with the reference and the line that made it so."""

import collections
import ctypes
import functools
import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from support.checks import checked
from torch import nn

import zbpipe
from zbpipe import _C
from zbpipe.leaks import check_tensor_leak, find_holders

KEPT = []  # the global
SOURCE = Path(__file__).read_text().splitlines()


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    KEPT.clear()
    gc.collect()


def line_of(text):
    """The place of the one line of this file that ends in the comment `# text`."""
    (number,) = [i for i, line in enumerate(SOURCE, 1) if line.endswith(f"# {text}")]
    return f"test_holders.py:{number}"


def chain_of(function, **arguments):
    """The chain of the only leak of `function`."""
    (leak,) = checked(function, **arguments).leaks
    return leak.chain


def texts(chain):
    return [holder.text for holder in chain]


# ---- Python's objects


def test_a_module_global_by_name_and_line():
    chain = chain_of(lambda: KEPT.append([0, torch.zeros(3)]))
    assert texts(chain) == [f"module global {__name__}.KEPT", "list item 0", "list item 1", "Tensor float32 [3]"]
    assert chain[0].kind == "module" and chain[0].where.endswith(line_of("the global"))
    assert chain[-1].bytes == 12


def test_a_variable_of_a_running_function():
    with check_tensor_leak(action="record") as check:
        mine = {"key": torch.zeros(2)}  # the variable
    (leak,) = check.report.leaks
    assert texts(leak.chain) == [
        "variable mine of test_a_variable_of_a_running_function()",
        "dict item 'key'",
        "Tensor float32 [2]",
    ]
    assert leak.chain[0].kind == "frame" and leak.chain[0].where.endswith(line_of("the variable"))
    assert mine["key"] is not None


class Trainer:
    __slots__ = ("__dict__", "slot")
    shared = None

    def remember(self):
        self.cache = torch.zeros(2)  # the attribute
        self.slot = torch.zeros(3)  # the slot


def test_attributes_slots_and_class_attributes():
    trainer = Trainer()
    KEPT.append(trainer)

    def step():
        trainer.remember()
        Trainer.shared = torch.zeros(1)

    leaks = checked(step).leaks
    Trainer.shared = None
    slot, cache, shared = [leak.chain[-2] for leak in leaks]
    assert (slot.text, cache.text) == (
        f"attribute slot of {__name__}.Trainer",
        f"attribute cache of {__name__}.Trainer",
    )
    assert slot.where.endswith(line_of("the slot")) and cache.where.endswith(line_of("the attribute"))
    assert shared.text == f"class attribute shared of {__name__}.Trainer"


def keep_a_closure():
    held = torch.zeros(4)

    def inner():  # the closure
        return held

    KEPT.append(inner)


def keep_a_default():
    def inner(held=torch.zeros(4)):  # the default # noqa: B008
        return held

    KEPT.append(inner)


def keep_a_generator():
    def produce():  # the generator
        held = torch.zeros(4)
        yield 1
        del held

    suspended = produce()
    next(suspended)
    KEPT.append(suspended)


def keep_an_exception():
    held = torch.zeros(4)
    try:
        raise ValueError(held.dim())
    except ValueError as error:
        KEPT.append(error)


def keep_a_weak_references_callback():
    held = torch.zeros(4)
    target = Trainer.remember
    KEPT.append(weakref.ref(target, lambda _, held=held: held))


@pytest.mark.parametrize(
    ("keep", "kind", "words"),
    [
        (keep_a_closure, "cell", "closure variable held of "),
        (keep_a_default, "function", "default argument of "),
        (keep_a_generator, "frame", "suspended keep_a_generator.<locals>.produce()"),
        (keep_an_exception, "traceback", "the traceback of an exception, in "),
        (keep_a_weak_references_callback, "object", "the callback of a weak reference"),
    ],
)
def test_functions_and_what_they_hold(keep, kind, words):
    chain = chain_of(keep)
    holder = next(holder for holder in chain if holder.text.startswith(words))
    assert holder.kind == kind
    if "closure" in words:
        assert holder.where.endswith(line_of("the closure"))


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (lambda t: collections.deque([0, t]), "collections.deque item 1"),
        (lambda t: {t}, "member of a set"),
        (lambda t: (t,), "tuple item 0"),
        (lambda t: collections.OrderedDict(a=t), "collections.OrderedDict item 'a'"),
        (lambda t: functools.partial(print, t), "partial of a builtin_function_or_method"),
    ],
)
def test_containers(container, words):
    assert words in texts(chain_of(lambda: KEPT.append(container(torch.zeros(1)))))


def test_frame_variables_leave_nothing_behind():
    held = torch.zeros(2)
    seen = weakref.ref(held)
    variables = dict(_C.frame_variables(sys._getframe()))
    assert variables["held"] is held
    del variables, held
    assert seen() is None


# ---- autograd's


def test_nodes_by_name_and_the_field_that_saved_it():
    weight = torch.ones(3, requires_grad=True)

    def step():
        KEPT.append((weight * torch.full((3,), 2.0)).sin())

    leaks = checked(step, allow=weight).leaks
    chains = sorted((texts(leak.chain)[2:] for leak in leaks), key=len)
    assert chains == [
        ["Tensor float32 [3]"],
        ["Tensor float32 [3]", "grad_fn: SinBackward0", "self, saved: Tensor float32 [3]"],
        [
            "Tensor float32 [3]",
            "grad_fn: SinBackward0",
            "next node 0: MulBackward0",
            "other, saved: Tensor float32 [3]",
        ],
    ]
    kinds = [holder.kind for holder in max((leak.chain for leak in leaks), key=len)]
    assert kinds == ["module", "list", "tensor", "node", "node", "saved"]


def test_accumulators_gradients_and_bases():
    def step():
        leaf = torch.ones(4, requires_grad=True)
        (leaf * 1).sum().backward()
        KEPT.append((leaf * 2).grad_fn)
        KEPT.append(torch.zeros(100).view(10, 10)[0])

    chains = [texts(leak.chain)[2:] for leak in checked(step).leaks]
    assert ["Tensor float32 [10], which uses 40 of 400 bytes"] in chains
    assert ["MulBackward0", "next node 0: AccumulateGrad", "its leaf: Tensor float32 [4]"] in chains
    grads = [chain for chain in chains if chain[-1].startswith("grad: ")]
    assert grads == [["MulBackward0", "next node 0: AccumulateGrad", "its leaf: Tensor float32 [4]", grads[0][-1]]]


def hook_with(held):
    def hook(grad):  # the hook
        return grad * held

    return hook


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda leaf, hook: leaf.register_hook(hook), "tensor hook"),
        (lambda leaf, hook: leaf.register_post_accumulate_grad_hook(hook), "post-accumulate hook"),
        (lambda leaf, hook: (leaf * 1).grad_fn.next_functions[0][0].register_prehook(hook), "pre hook"),
        (lambda leaf, hook: (leaf * 1).grad_fn.next_functions[0][0].register_hook(hook), "post hook"),
    ],
)
def test_hooks_by_name_and_line(register, words):
    leaf = torch.ones(3, requires_grad=True)
    graph = leaf.exp()  # keeps the accumulator

    chain = chain_of(lambda: register(leaf, hook_with(torch.zeros(3))), allow=[leaf, graph])
    hook = next(holder for holder in chain if holder.kind == "hook")
    assert hook.text == f"{words} {__name__}.hook_with.<locals>.hook"
    assert hook.where.endswith(line_of("the hook"))
    assert texts(chain)[-2].startswith("closure variable held of ")
    assert graph.grad_fn is not None


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)  # the layer
        self.register_buffer("mask", torch.ones(3))


def test_parts_of_modules():
    report = checked(lambda: KEPT.append(Block()))
    said = {leak.bytes: texts(leak.chain) for leak in report.leaks}
    assert said[12][-2:] == [f"buffer mask of {Block.__module__}.Block", "Tensor float32 [3]"]
    assert said[16][-3:] == [
        f"submodule layer of {Block.__module__}.Block",
        "parameter weight of torch.nn.modules.linear.Linear",
        "Parameter float32 [2, 2]",
    ]
    (of_the_layer,) = [leak.chain[-3] for leak in report.leaks if leak.bytes == 16]
    assert of_the_layer.where.endswith(line_of("the layer"))


def test_hooks_of_modules():
    model = nn.Linear(2, 2)
    chain = chain_of(lambda: model.register_forward_hook(functools.partial(print, torch.zeros(3))), allow=model)
    assert texts(chain)[0].startswith("attribute _forward_hooks of torch.nn")


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # the Function
        ctx.save_for_backward(x * 2)
        ctx.extra = torch.zeros(5)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_contexts_of_python_functions():
    weight = torch.ones(3, requires_grad=True)
    leaks = checked(lambda: KEPT.append(Keeping.apply(weight)), allow=weight).leaks
    chains = [leak.chain for leak in leaks]
    assert texts(chains[0])[3:] == ["grad_fn: KeepingBackward", "attribute extra of its context", "Tensor float32 [5]"]
    assert chains[0][3].where.endswith(line_of("the Function"))
    assert any(texts(chain)[-1] == "saved tensor 0: Tensor float32 [3]" for chain in chains)


def test_memory_that_the_outputs_data_no_longer_shows():
    """`out.data = torch.empty(1)`: the tensor is small, its graph keeps the saved output."""
    weight = torch.ones(100, requires_grad=True)

    def step():
        out = weight.exp()
        out.data = torch.empty(1)
        KEPT.append(out)

    leak = checked(step, allow=weight).leaks[0]
    assert leak.bytes == 400
    assert texts(leak.chain)[2:] == [
        "Tensor float32 [1]",
        "grad_fn: ExpBackward0",
        "result, saved: Tensor float32 [100]",
    ]


def test_groups_are_looked_into():
    layer = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    out = layer(x.exp()).sin()
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], layer.parameters())
    leak = find_holders(layer.weight)
    assert leak.bytes == 36 and leak.chain
    assert groups[0].bytes_held > 0


# ---- what cannot be seen


def test_a_hidden_holder_is_said():
    """A reference that is counted and that nothing visible has."""
    with check_tensor_leak(action="record") as check:
        value = [torch.zeros(6)]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        address = id(value)
        del value
    ctypes.pythonapi.Py_DecRef(ctypes.cast(address, ctypes.py_object))
    (leak,) = check.report.leaks
    assert texts(leak.chain) == ["C or C++ that cannot be seen", "list item 0", "Tensor float32 [6]"]
    assert (leak.chain[0].kind, leak.fate) == ("unknown", "alive")


@pytest.mark.slow
def test_cpp_functions_are_said_to_be_unseen(cpp_function):
    weight = torch.ones(3, requires_grad=True)
    report = checked(lambda: KEPT.append(cpp_function.keep(weight)), allow=weight)
    lost = [leak for leak in report.leaks if leak.views == 0]
    assert [leak.bytes for leak in lost] == [12]
    assert lost[0].chain[0].kind == "unknown" and lost[0].name == "a block on cpu"
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


# ---- cycles


def test_a_function_that_refers_to_itself():
    def step():
        held = torch.zeros(2)

        def walk():  # the walk
            return walk, held

    report = checked(step)
    (leak,), (cycle,) = report.leaks, report.cycles
    name = "test_a_function_that_refers_to_itself.<locals>.step.<locals>.walk"
    assert texts(leak.chain)[0] == f"closure variable held of {__name__}.{name}"
    assert texts(cycle.steps) == [f"closure variable walk of {__name__}.{name}"]
    assert f"{line_of('the walk')}: def walk():  # the walk) -> back" in cycle.text
    assert cycle.bytes == 8


class Stage:
    def __init__(self):
        self.buffer = torch.zeros(4)
        self.me = self  # the attribute that leads back


def test_a_cycle_by_its_attribute_and_line():
    (cycle,) = checked(Stage).cycles
    assert texts(cycle.steps) == [f"attribute me of {__name__}.Stage"]
    assert f"{line_of('the attribute that leads back')}: self.me = self" in cycle.text


def test_a_cycle_through_a_node():
    """A node's hook that has a dictionary which has the node."""
    weight = torch.ones(3, requires_grad=True)

    def step():
        node = weight.exp().grad_fn
        group = {"intermediates": [node]}

        def capture(grads):  # the capture
            group["grads"] = grads

        node.register_prehook(capture)

    report = checked(step, allow=weight)
    (leak,), (cycle,) = report.leaks, report.cycles
    assert leak.fate == "freed by the collector"
    assert "closure variable group of " in leak.chain[0].text and "capture" in leak.chain[0].text
    assert texts(leak.chain)[1:] == [
        "dict item 'intermediates'",
        "list item 0",
        "ExpBackward0",
        "result, saved: Tensor float32 [3]",
    ]  # what is nearest is the node
    words = [text.rpartition(".")[2] if "capture" in text else text for text in texts(cycle.steps)]
    assert words == ["capture", "dict item 'intermediates'", "list item 0", "ExpBackward0", "capture"]
    assert [holder.kind for holder in cycle.steps] == ["cell", "dict", "list", "node", "hook"]
    assert line_of("the capture") in cycle.text


def test_two_cycles_are_two():
    report = checked(lambda: (Stage(), Stage()))
    assert [(cycle.bytes, cycle.count) for cycle in report.cycles] == [(32, 2)]
    assert "32 bytes: 2 like this: " in str(report)
    assert {leak.fate for leak in report.leaks} == {"freed by the collector"}


# ---- works of torch.distributed


@pytest.mark.dist
def test_works_are_named(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        report = checked(lambda: KEPT.append(dist.all_reduce(torch.zeros(9), async_op=True)))
        KEPT[0].wait()
        leaks = report.leaks
    finally:
        KEPT.clear()
        dist.destroy_process_group()
    assert [leak.bytes for leak in leaks] == [36]
    chain = leaks[0].chain
    assert chain[0].text == f"module global {__name__}.KEPT"
    (work,) = [holder for holder in chain if holder.kind == "work"]
    assert work.text.endswith(", which does not tell what it holds")


# ---- a living tensor


def test_find_holders_passes_over_the_callers_variable():
    tensor = torch.zeros(3)
    KEPT.append([tensor])
    leak = find_holders(tensor)
    assert texts(leak.chain) == [f"module global {__name__}.KEPT", "list item 0", "list item 0", "Tensor float32 [3]"]
    assert (leak.bytes, leak.fate) == (12, "alive")
