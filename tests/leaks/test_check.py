"""check_tensor_leak: what it counts as a leak, to the byte, what may live on, and what it leaves behind, which is nothing."""

import functools
import gc
import os
import sys
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from leaks.kinds import Contrary
from support.checks import checked
from support.leaks import collects, no_collector
from support.processes import in_own_process
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from zbpipe import _C  # whether anything of what the allocator's tap remembers is left
from zbpipe.leaks import TensorLeakError, TensorLeakWarning, check_tensor_leak

KEPT = []
LEAF = torch.ones(2, 3, requires_grad=True)


def keep(*sizes):
    KEPT.extend(torch.zeros(size) for size in sizes)


def keep_in_a_cycle(size=8):
    tensor = torch.zeros(size)

    def itself():
        return itself, tensor


def fail(*_):
    raise ZeroDivisionError


# ---- what is a leak


def test_a_clean_block_has_no_leaks():
    weight = torch.randn(4, 4, requires_grad=True)

    def step():
        (weight @ weight).sin().sum().backward()
        weight.grad = None

    report = checked(step)
    assert not report and report.leaks == [] and report.bytes == 0
    assert str(report) == "no tensor outlived the check"


def test_each_storage_that_was_born_inside_is_a_leak_once_by_its_bytes():
    older, resized = torch.ones(5), torch.ones(4)

    def step():
        big = torch.zeros(100)
        KEPT.extend([big[:3], big[3:5], older])
        keep(10)
        keep_in_a_cycle()
        keep_in_a_cycle(16)
        gc.collect()
        keep_in_a_cycle(6)
        resized.untyped_storage().resize_(4_000_000)

    report = checked(step)
    assert [(leak.bytes, leak.fate) for leak in report.leaks] == [
        (4_000_000, "alive"),
        (400, "alive"),
        (64, "freed by the collector"),
        (40, "alive"),
        (32, "freed by the collector"),
        (24, "freed by the collector"),
    ]
    assert report.bytes == 4_000_560
    assert report.leaks[1].views >= 2 and report.leaks[1].shape in [(3,), (2,), (100,)]
    assert "a collection inside the check" in report.leaks[2].chain[0].text
    assert "itself" in report.leaks[5].chain[0].text
    assert _C.live_blocks(_C.next_serial()) == []


def test_frozen_objects_are_not_new():
    keep(4)
    foreign = torch.from_numpy(np.zeros(3))
    gc.freeze()
    try:
        report = checked(lambda: keep(2))
    finally:
        gc.unfreeze()
    assert [leak.bytes for leak in report.leaks] == [8] and foreign.numel() == 3


def test_nested_checks_see_what_is_theirs():
    with check_tensor_leak(action="record") as outer:
        keep(1)
        with check_tensor_leak(action="record") as inner:
            keep(2)
    assert (inner.report.bytes, outer.report.bytes) == (8, 12)


def test_traced_creation():
    line = sys._getframe().f_lineno + 2
    report = checked(
        lambda: KEPT.append(torch.ones(3) + 1),
        trace=True,
    )
    (leak,) = report.leaks
    assert leak.created.endswith(f"test_check.py:{line}")
    assert checked(lambda: keep(1)).leaks[0].created is None


def test_a_library_beside_torch_is_not_torch():
    beside = f"{os.path.dirname(torch.__file__)}titan/model.py"
    names = {"torch": torch}
    exec(compile("def make():\n    return torch.ones(3)", beside, "exec"), names)
    (leak,) = checked(lambda: KEPT.append(names["make"]()), trace=True).leaks
    assert leak.created.endswith("torchtitan/model.py:2")


def test_half_dead_modules_are_survived(monkeypatch):
    class Lazy(types.ModuleType):
        def __getattribute__(self, name):
            raise RuntimeError(name)

    half = types.ModuleType("half")
    del half.__dict__["__name__"]
    for name, module in {"nothing": None, "lazy": Lazy("lazy"), "half": half, "number": 3}.items():
        monkeypatch.setitem(sys.modules, name, module)

    def step():
        types.ModuleType.__getattribute__(sys.modules["lazy"], "__dict__")["held"] = torch.zeros(2)
        half.__dict__["held"] = torch.zeros(1)

    texts = [leak.chain[0].text for leak in checked(step).leaks]
    assert texts == ["module global lazy.held", "module global (without a name).held"]


# ---- what may live on


def training(layer, kind, batch):
    optimizer = kind(layer.parameters())

    def step():
        optimizer.zero_grad()
        layer(batch).sum().backward()
        optimizer.step()

    return step, [layer, optimizer]


def dtensors():
    layer, mesh = nn.Linear(4, 4), init_device_mesh("cpu", (1,))
    for name, weight in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()])))
    return training(layer, torch.optim.Adam, distribute_tensor(torch.ones(2, 4), mesh, [Replicate()]))


def parameters_by(given):
    model = nn.Linear(4, 4)

    def step():
        model.zero_grad(set_to_none=True)
        model(torch.ones(2, 4)).sum().backward()

    return step, given(model)


def retained():
    x = torch.ones(3, requires_grad=True)
    hidden = x * 2
    hidden.retain_grad()
    return (lambda: hidden.sum().backward(retain_graph=True)), [x, hidden]


def unusable_view():
    base = LEAF.clone()
    view = base.unbind()[0]
    base.add_(1)
    return view


def made_of_several(make):
    make()
    return (lambda: KEPT.append(make())), KEPT


# What makes a step, and what it is allowed to leave.
ALLOWED = {
    "state": lambda: training(nn.Linear(4, 4), torch.optim.Adam, torch.ones(2, 4)),
    "sparse gradients": lambda: training(nn.Embedding(10, 4, sparse=True), torch.optim.SparseAdam, torch.tensor([1])),
    "distributed": dtensors,
    "iterator": lambda: parameters_by(lambda model: model.parameters()),
    "iterator in a list": lambda: parameters_by(lambda model: [model.parameters()]),
    "iterator in a dictionary": lambda: parameters_by(lambda model: [{"weights": [model.parameters()]}]),
    "view of a dictionary": lambda: parameters_by(lambda model: dict(model.named_parameters()).values()),
    "retained gradients": retained,
    "a view whose history is unusable": lambda: (unusable_view, unusable_view()),
    "list": lambda: (lambda: keep(3), KEPT),
    "dictionary": lambda: (lambda: keep(3), {"kept": KEPT}),
    "predicate": lambda: (lambda: keep(3), lambda tensor: tensor.numel() == 3),
    "a subclass that refuses everything": lambda: (gc.isenabled, torch.ones(3).as_subclass(Contrary)),
    "sparse": lambda: made_of_several(lambda: torch.eye(4).to_sparse()),
    "sparse by rows": lambda: made_of_several(lambda: torch.eye(4).to_sparse_csr()),
    "nested": lambda: made_of_several(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "jagged": lambda: made_of_several(
        lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("kind", ALLOWED)
def test_what_is_allowed_is_no_leak(kind, alone):
    step, allow = ALLOWED[kind]()
    step = check_tensor_leak(action="error", allow=allow)(step)
    for _ in range(2):  # an iterator could be looked into once
        step()


def test_what_is_not_allowed_is_a_leak(alone):
    asked, model = [], nn.Linear(2, 2)

    def step():
        for kind in ("state", "list", "sparse"):
            KEPT.append(ALLOWED[kind]())
            KEPT[-1][0]()
        model.cache = [torch.zeros(30)]

    report = checked(step, allow=[model, lambda tensor: asked.append(tensor.shape)])
    assert {(4, 4), (4,), (3,), (30,)} <= set(asked)
    (leak,) = [leak for leak in report.leaks if leak.bytes == 120]
    assert leak.chain[0].text.startswith("attribute cache of torch.nn")  # begins with what is allowed
    assert len([leak for leak in report.leaks if leak.shape == (4, 4)]) == 4


def test_a_predicate_is_asked_of_tensors_that_python_has_not_seen():
    weight = torch.ones(3, requires_grad=True)
    asked = []
    report = checked(lambda: weight.exp().sum().backward(), allow=lambda t: asked.append(t.shape) or True)
    assert not report and asked == [(3,)]


def test_a_check_that_was_left_keeps_nothing_that_was_allowed():
    model = nn.Linear(2, 2)
    with check_tensor_leak(action="record", allow=model) as check:
        pass
    gone = weakref.ref(model)
    del model
    assert gone() is None and not check.report


# ---- the decorator and the context manager


def test_a_decorated_functions_result_is_no_leak_but_what_it_holds():
    weight = torch.ones(3, requires_grad=True)
    quiet = check_tensor_leak(lambda: (weight * 2).detach())
    of_numpy = check_tensor_leak(action="error")(lambda: torch.ones(4).numpy())
    loud = check_tensor_leak(action="error")(lambda: weight.exp() * torch.full((3,), 2.0))
    assert quiet().tolist() == [2, 2, 2] and of_numpy().sum() == 4
    with pytest.raises(TensorLeakError) as raised:
        loud()
    report = raised.value.report
    assert report.leaks and all(leak.chain[0].text == "what the function returned" for leak in report.leaks)


def test_warnings_of_a_decorated_function_point_at_it_each_time():
    @check_tensor_leak
    def leak():
        keep(5)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        leak()
        leak()
    assert [w.category for w in caught] == [TensorLeakWarning] * 2
    assert all(w.filename == __file__ for w in caught)
    assert "1 storage (20 bytes) outlived the check" in str(caught[0].message)


def test_an_error_has_the_report_and_another_exception_passes_it():
    with pytest.raises(TensorLeakError) as error, check_tensor_leak(action="error") as check:
        keep(5)
    assert check.report is error.value.report and check.report.bytes == 20
    with pytest.raises(ZeroDivisionError), check_tensor_leak(action="error") as check:
        fail(keep(5))
    assert check.report.bytes == 20


async def coroutine():
    pass


async def generator():
    yield 1


def entered():
    check = check_tensor_leak(action="record")
    with check:
        pass
    return check


NO_FUNCTION = r"was given a \w+ to check; expected a function, or pass what may live on as"
LATER = "runs after its call has returned"
LEFT = "a check is left once, after it was entered"


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: check_tensor_leak(action="shout"), ValueError, "'shout'; expected one of 'warn', 'error', 'record'"),
        (lambda: check_tensor_leak(allow=[3]), TypeError, "allow holds a int; expected tensors"),
        (lambda: check_tensor_leak(allow=iter(["weight"])), TypeError, "allow holds a str; expected tensors"),
        (lambda: check_tensor_leak(5), TypeError, NO_FUNCTION),
        (lambda: check_tensor_leak(nn.Linear(2, 2)), TypeError, NO_FUNCTION),
        (lambda: check_tensor_leak("weights"), TypeError, NO_FUNCTION),
        (lambda: check_tensor_leak(classmethod(len)), TypeError, NO_FUNCTION),
        (lambda: check_tensor_leak(coroutine), TypeError, LATER),
        (lambda: check_tensor_leak(functools.partial(coroutine)), TypeError, LATER),
        (lambda: check_tensor_leak(generator), TypeError, LATER),
        (lambda: check_tensor_leak().__exit__(None, None, None), RuntimeError, LEFT),
        (lambda: entered().__exit__(None, None, None), RuntimeError, LEFT),
        (lambda: entered().__enter__(), RuntimeError, "entered once"),
    ],
)
def test_what_is_refused(act, error, message):
    with pytest.raises(error, match=message):
        act()


# ---- the collector


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_off_inside_and_restored(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    callbacks = gc.callbacks[:]
    try:
        with check_tensor_leak():
            assert not collects()
            with check_tensor_leak():
                pass
            assert not collects()
        assert collects() is was_enabled and gc.isenabled() is was_enabled and gc.callbacks == callbacks
    finally:
        gc.enable()


def test_what_is_said_to_the_collector_inside_stays():
    before = gc.get_threshold()
    try:
        with check_tensor_leak():
            assert gc.isenabled()  # as whoever asks in order to restore it must be told
            gc.disable()
        assert not gc.isenabled() and gc.get_threshold() == before
        gc.enable()
        with check_tensor_leak():
            gc.set_threshold(123)
        assert gc.get_threshold()[0] == 123
    finally:
        gc.enable()
        gc.set_threshold(*before)


def test_a_child_of_a_fork_inside_a_check_collects():
    gc.enable()
    with check_tensor_leak(action="record"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of fork() beside threads
            child = os.fork()
        if child == 0:
            os._exit(0 if collects() else 1)
        _, status = os.waitpid(child, 0)
        assert not collects()
    assert os.waitstatus_to_exitcode(status) == 0
    assert collects()


# Private: what would fail for want of memory or by an interrupt.
@pytest.mark.parametrize(
    "place", ["zbpipe._torch.allocator.blocks_now", "zbpipe.leaks._check.storages_now", "zbpipe.leaks._allow.parts_of"]
)
def test_a_check_that_fails_on_entry_or_leaving_leaves_nothing_behind(place, monkeypatch):
    callbacks = len(gc.callbacks)
    with monkeypatch.context() as planted:
        planted.setattr(place, fail)
        with pytest.raises(ZeroDivisionError), check_tensor_leak(trace=True):
            assert "parts_of" in place
    assert collects()
    assert len(gc.callbacks) == callbacks


def test_somebody_who_empties_the_list_of_callbacks_inside():
    callbacks = gc.callbacks[:]
    with check_tensor_leak(action="record") as check:
        keep(5)
        gc.callbacks.clear()
    gc.callbacks[:] = callbacks
    assert collects()
    assert check.report.bytes == 20


# ---- what a look leaves, and what it does to what it looks at


def test_it_keeps_nothing_alive_and_leaves_nothing():
    tensors = [torch.zeros(3) for _ in range(2)]
    seen = [weakref.ref(tensor) for tensor in tensors]
    KEPT.append([tensors])
    del tensors
    with check_tensor_leak(action="record") as check:
        KEPT.append({"inner": torch.zeros(4), "node": (torch.ones(2, requires_grad=True) * 2).grad_fn})
        keep_in_a_cycle()
    seen.append(weakref.ref(KEPT[1]["inner"]))
    with no_collector():
        KEPT.clear()
        assert [ref() for ref in seen] == [None] * 3
    assert check.report.bytes > 0


def test_a_second_look_costs_no_memory():
    """Checks leave neither tensors nor Python objects behind, whatever they find."""

    def look():
        report = checked(lambda: (keep(3), keep_in_a_cycle()), trace=True)
        KEPT.clear()
        str(report)

    look()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(2):
        look()
    gc.collect()
    assert len(gc.get_objects()) - before < 2


def nodes_in_python():
    return sum("Backward" in type(thing).__name__ for thing in gc.get_objects())


def test_a_deep_graph_is_no_recursion_and_its_nodes_are_not_wrapped():
    """A node that gets a Python object keeps it, and is freed through it."""

    def step():
        out = torch.ones(1, requires_grad=True)
        for _ in range(20_000):
            out = out.sin()
        KEPT.append(out)

    before = nodes_in_python()
    report = checked(step)
    assert nodes_in_python() == before
    assert len(report.leaks) == 20_001
    assert all(len(leak.chain) <= 25 for leak in report.leaks)
    assert any("more" in holder.text for holder in report.leaks[-1].chain + report.leaks[5000].chain)


def test_a_search_visits_each_object_once():
    """5,000 tensors over 20,000 nodes: as many more vertices as there are more objects, and no more."""

    def visited(count):
        def step():
            weight = torch.ones(2, requires_grad=True)
            out, kept = weight, []
            for i in range(count):
                out = (out * 1.5).sin().cos().exp()
                kept.append(out)
                out = out if i % 10 else weight
            KEPT.append(kept)

        report = checked(step)
        KEPT.clear()
        return report.visited, len(report.leaks)

    (some, few), (more, many) = visited(500), visited(5500)
    assert many - few == 4 * 5000
    # Per round: four nodes, four saved tensors or outputs with their storages, and a tensor that Python has.
    assert 4 * 5000 <= more - some <= 16 * 5000


@pytest.mark.system
def test_what_an_audit_hook_lets_go_of_is_not_looked_at():
    """Python tells its audit hooks that the collector's objects are listed."""
    in_own_process("""
        import ctypes

        from zbpipe.leaks import check_tensor_leak

        kept, searches = [], []

        def let_go(event, args):
            if event == "gc.get_objects":
                searches.append(len(kept))
                kept.clear()

        def hide():
            hidden = [torch.ones(1000)]
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(hidden))

        sys.addaudithook(let_go)
        with check_tensor_leak(action="record") as check:
            kept += [[torch.ones(10)] for _ in range(100)]
            hide()
        assert 100 in searches, searches
        assert check.report.bytes == 4000, check.report
    """)


@pytest.mark.system
@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer hangs where memory runs out"
)
def test_a_search_that_runs_out_of_memory_lets_go_of_all_and_can_be_repeated():
    in_own_process("""
        import resource

        from zbpipe.leaks import find_holders

        tensor = torch.ones(4)
        others = [torch.ones(1) for _ in range(1000)]
        kept = [[i] for i in range(400_000)]
        kept.append(tensor)
        chain = [str(holder) for holder in find_holders(tensor).chain]

        def counts():
            of_storages = [torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (tensor, others[0])]
            return of_storages, [(sys.getrefcount(t), t._use_count()) for t in (tensor, others[0])]

        before = counts()
        for megabytes in (1, 8, 16):
            pages = int(open("/proc/self/statm").read().split()[0])
            most = pages * resource.getpagesize() + (megabytes << 20)
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            try:
                find_holders(tensor)
            except (MemoryError, RuntimeError) as error:
                assert type(error) is MemoryError or "bad_alloc" in str(error), error
            else:
                raise AssertionError(f"{megabytes} MB are enough")
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert counts() == before, (counts(), before)
        assert [str(holder) for holder in find_holders(tensor).chain] == chain
    """)


# ---- CUDA


BLOCKS = [
    {"state": "active_allocated", "size": 512, "requested_size": 400, "address": 1000},
    {"state": "inactive", "size": 512, "address": 1512},
    {"state": "active_allocated", "size": 1024, "requested_size": 1000, "address": 2024},
    {"state": "active_pending_free", "size": 1024, "address": 3048},
]


@pytest.mark.parametrize(
    ("before", "storages", "left"),
    [
        ([], [], [("cuda:0", 1000), ("cuda:0", 400), ("cuda:1", 400)]),
        ([], [("cuda:0", 1000, 8, 0), ("cuda:1", 900, 50, 0)], [("cuda:0", 1000), ("cuda:1", 400)]),
        (BLOCKS[:1], [("cuda:0", 2500, 8, 0), ("cpu", 1000, 8, 0)], [("cuda:1", 400)]),
    ],
)
def test_blocks_of_a_snapshot_that_no_tensor_explains(before, storages, left, monkeypatch):
    segments, spans = [{"device": 0, "blocks": before}], _C.storage_spans
    for name, value in (("is_available", True), ("is_initialized", True), ("get_allocator_backend", "native")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": segments})
    monkeypatch.setattr(_C, "storage_spans", lambda watched: [*spans(watched), *storages])
    with check_tensor_leak(action="record") as check:
        segments[:] = [{"device": 0, "blocks": BLOCKS}, {"device": 1, "blocks": BLOCKS[:1]}]
    assert [(leak.device, leak.bytes) for leak in check.report.leaks] == left


@pytest.mark.cuda
def test_leaks_on_cuda():
    report = checked(lambda: KEPT.append(torch.zeros(100, device="cuda")))
    (leak,) = report.leaks
    assert (leak.device, leak.bytes) == ("cuda:0", 400)
