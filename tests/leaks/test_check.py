"""check_tensor_leak: what it counts as a leak, to the byte, and what it leaves behind, which is nothing."""

import gc
import subprocess
import sys
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from support.checks import checked
from support.leaks import collects
from torch import nn
from torch.utils.checkpoint import checkpoint

import zbpipe
from zbpipe import _C
from zbpipe.leaks import TensorLeakError, TensorLeakWarning, _cuda, check_tensor_leak, find_holders

KEPT = []


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    KEPT.clear()
    gc.collect()


def keep(*sizes):
    KEPT.extend(torch.zeros(size) for size in sizes)


def keep_in_a_cycle(size=8):
    tensor = torch.zeros(size)

    def itself():
        return itself, tensor


# ---- what is a leak


def test_a_clean_block_has_no_leaks():
    weight = torch.randn(4, 4, requires_grad=True)

    def step():
        (weight @ weight).sin().sum().backward()
        weight.grad = None

    report = checked(step)
    assert not report and report.leaks == [] and report.bytes == 0
    assert str(report) == "no tensor outlived the check"


def test_each_storage_is_a_leak_once_by_bytes():
    def step():
        big = torch.zeros(100)
        KEPT.extend([big[:3], big[3:5]])
        keep(10)

    report = checked(step)
    assert [(leak.bytes, leak.fate) for leak in report.leaks] == [(400, "alive"), (40, "alive")]
    assert report.bytes == 440
    assert report.leaks[0].views >= 2 and report.leaks[0].shape in [(3,), (2,), (100,)]


def test_what_was_there_before_is_no_leak():
    keep(5)
    assert not checked(lambda: KEPT.append(KEPT[0]))


def test_the_tools_are_imported_when_they_are_first_used():
    code = (
        "import sys, zbpipe\n"
        "assert 'zbpipe.leaks' not in sys.modules and 'leaks' in dir(zbpipe)\n"
        "assert not hasattr(zbpipe, 'leeks')\n"
        "assert zbpipe.leaks is sys.modules['zbpipe.leaks']\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_the_collector_frees_a_cycle():
    report = checked(keep_in_a_cycle)
    (leak,) = report.leaks
    assert (leak.bytes, leak.fate) == (32, "freed by the collector")
    assert _C.live_blocks(_C.next_serial()) == []


def test_memory_that_is_not_torchs_counts():
    report = checked(lambda: KEPT.append(torch.from_numpy(np.zeros(16))))
    assert [leak.bytes for leak in report.leaks] == [128]


def test_memory_of_other_allocators_in_a_cycle_counts():
    def step():
        holder = [torch.from_numpy(np.zeros(16))]
        holder.append(holder)

    (leak,) = checked(step).leaks
    assert (leak.bytes, leak.fate) == (128, "freed by the collector")


def test_what_cpp_alone_holds_counts():
    """The tensor's last Python object is gone; a node's saved variable has the memory."""

    def step():
        weight = torch.ones(4, requires_grad=True)
        KEPT.append(weight.exp().sum().grad_fn)

    report = checked(step)
    assert sorted(leak.bytes for leak in report.leaks) == [16, 16]
    saved = next(leak for leak in report.leaks if leak.chain[-1].kind == "saved")
    assert saved.chain[-1].text == "result, saved: Tensor float32 [4]"


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_objects_are_not_new(frozen):
    keep(4)
    foreign = torch.from_numpy(np.zeros(3))
    if frozen:
        gc.freeze()
    try:
        report = checked(lambda: keep(2))
    finally:
        gc.unfreeze()
    assert [leak.bytes for leak in report.leaks] == [8] and foreign.numel() == 3


# ---- what may live on


def test_allowed_are_parameters_gradients_and_state():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    assert checked(step).bytes > 0
    model.zero_grad(set_to_none=True)
    optimizer.state.clear()
    assert not checked(step, allow=[model, optimizer])


@pytest.mark.parametrize("how", ["tensor", "dict", "predicate"])
def test_allowed_by_name(how):
    allow = {"tensor": KEPT, "dict": {"kept": KEPT}, "predicate": lambda tensor: tensor.numel() == 3}[how]
    assert [leak.bytes for leak in checked(lambda: keep(3), allow=allow).leaks] == []
    KEPT.clear()
    assert [leak.bytes for leak in checked(lambda: keep(3), allow=lambda tensor: False).leaks] == [12]


@pytest.mark.parametrize(
    "given", [lambda m: m.parameters(), lambda m: [m.parameters()], lambda m: dict(m.named_parameters()).values()]
)
def test_iterators_are_allowed_as_what_they_give(given):
    model = nn.Linear(4, 4)

    @check_tensor_leak(action="error", allow=given(model))
    def step():
        model(torch.ones(2, 4)).sum().backward()

    for _ in range(2):  # an iterator could be looked into once
        model.zero_grad(set_to_none=True)
        step()
    with pytest.raises(TypeError, match="allow holds a str"):
        check_tensor_leak(allow=iter(["weight"]))


def test_a_chain_begins_with_what_is_allowed():
    model = nn.Linear(2, 2)

    def step():
        model.cache = [torch.zeros(3)]

    (leak,) = checked(step, allow=model).leaks
    assert leak.chain[0].text.startswith("attribute cache of torch.nn")


def test_a_decorated_functions_result_is_no_leak_but_what_it_holds():
    weight = torch.ones(3, requires_grad=True)

    @check_tensor_leak
    def quiet():
        return (weight * 2).detach()

    @check_tensor_leak(action="error")
    def loud():
        return weight.exp() * torch.full((3,), 2.0)

    assert quiet().tolist() == [2, 2, 2]
    with pytest.raises(TensorLeakError) as raised:
        loud()
    report = raised.value.report
    assert report.leaks and all(leak.chain[0].text == "what the function returned" for leak in report.leaks)
    with pytest.warns(TensorLeakWarning, match="1 storage"):
        check_tensor_leak(lambda: keep(1))()


# ---- the context manager


def test_actions():
    with pytest.warns(TensorLeakWarning, match="1 storage \\(20 bytes\\) outlived the check"), check_tensor_leak():
        keep(5)
    with pytest.raises(TensorLeakError) as error, check_tensor_leak(action="error") as check:
        keep(5)
    assert check.report is error.value.report and check.report.bytes == 20


def test_an_exception_inside_passes_and_the_report_is_there():
    check = check_tensor_leak(action="error")

    def fail():
        keep(5)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), check:
        fail()
    assert check.report.bytes == 20


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_off_inside_and_restored(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with check_tensor_leak():
            assert not collects()
            with check_tensor_leak():
                pass
            assert not collects()
        assert collects() is was_enabled and gc.isenabled() is was_enabled
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


@pytest.mark.parametrize("place", ["zbpipe.leaks._cuda.blocks_now", "zbpipe.leaks._check.storages_now"])
def test_a_check_that_fails_on_entry_leaves_nothing_behind(place, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    callbacks = len(gc.callbacks)
    with monkeypatch.context() as planted:
        planted.setattr(place, fail)
        with pytest.raises(ZeroDivisionError), check_tensor_leak(trace=True):
            pytest.fail("it was entered")
    assert collects()
    assert len(gc.callbacks) == callbacks
    with check_tensor_leak(action="record") as check:
        keep(5)
    assert check.report.bytes == 20


def test_a_check_that_fails_on_leaving_gives_the_collector_back(monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), check_tensor_leak():
        monkeypatch.setattr("zbpipe.leaks._allow.parts_of", fail)
    assert collects()


def test_somebody_who_empties_the_list_of_callbacks_inside():
    callbacks = gc.callbacks[:]
    with check_tensor_leak(action="record") as check:
        keep(5)
        gc.callbacks.clear()
    gc.callbacks[:] = callbacks
    assert collects()
    assert check.report.bytes == 20


def test_nested_checks_see_what_is_theirs():
    with check_tensor_leak(action="record") as outer:
        keep(1)
        with check_tensor_leak(action="record") as inner:
            keep(2)
    assert (inner.report.bytes, outer.report.bytes) == (8, 12)


def test_threads():
    """What another thread does while a check runs is born inside; its variables are holders."""
    ready, done = threading.Event(), threading.Event()

    def work():
        mine = torch.zeros(7)
        ready.set()
        done.wait(60)
        del mine

    thread = threading.Thread(target=work, name="loader")
    with check_tensor_leak(action="record") as check:
        thread.start()
        ready.wait(60)
    done.set()
    thread.join()
    (leak,) = check.report.leaks
    assert (leak.bytes, leak.chain[0].kind) == (28, "thread")
    assert leak.chain[0].text.startswith("thread loader: variable mine of ")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"action": "shout"}, ValueError, "action is 'shout'; expected one of 'warn', 'error', 'record'"),
        ({"allow": [3]}, TypeError, "allow holds a int; expected tensors"),
        ({"device": "meta"}, ValueError, "device is 'meta'; tensors can be checked on cpu and cuda"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        check_tensor_leak(**arguments)


def test_a_check_is_entered_once_and_coroutines_are_refused():
    check = check_tensor_leak()
    with check:
        pass
    with pytest.raises(RuntimeError, match="entered once"):
        check.__enter__()

    async def later():
        pass

    with pytest.raises(TypeError, match="runs after its call has returned"):
        check_tensor_leak(later)


def test_the_device_that_is_asked_for():
    assert checked(lambda: keep(1), device="cpu").bytes == 4
    assert not checked(lambda: keep(1), device="cuda")


def test_traced_creation():
    line = sys._getframe().f_lineno + 2
    report = checked(
        lambda: KEPT.append(torch.ones(3) + 1),
        trace=True,
    )
    (leak,) = report.leaks
    assert leak.created.endswith(f"test_check.py:{line}")
    assert checked(lambda: keep(1)).leaks[0].created is None
    assert _C.trace_of(KEPT[-1].untyped_storage().data_ptr()) == []


# ---- the tool itself


def test_it_keeps_nothing_alive_and_leaves_nothing():
    tensors = [torch.zeros(3) for _ in range(2)]
    seen = [weakref.ref(tensor) for tensor in tensors]
    KEPT.append([tensors])
    del tensors
    with check_tensor_leak(action="record") as check:
        KEPT.append({"inner": torch.zeros(4), "node": (torch.ones(2, requires_grad=True) * 2).grad_fn})
        keep_in_a_cycle()
    seen.append(weakref.ref(KEPT[1]["inner"]))
    gc.disable()
    try:
        KEPT.clear()
        assert [ref() for ref in seen] == [None] * 3
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [type(thing) for thing in gc.garbage if isinstance(thing, torch.Tensor)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
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
    for _ in range(5):
        look()
    gc.collect()
    assert len(gc.get_objects()) - before <= 5


def test_nodes_are_not_wrapped():
    """A node that gets a Python object keeps it, and is freed through it."""
    weight = torch.ones(3, requires_grad=True)

    def step():
        out = weight
        for _ in range(50):
            out = out.sin()
        KEPT.append(out)

    nodes = lambda: sum("Backward" in type(thing).__name__ for thing in gc.get_objects())  # noqa: E731
    before = nodes()
    assert checked(step).leaks
    assert nodes() == before


def test_saved_tensors_are_not_unpacked_and_hooks_not_run():
    calls = []

    class Packed:
        def __init__(self, tensor):
            self.tensor = tensor

    def step():
        weight = torch.ones(3, requires_grad=True)
        unpack = lambda packed: calls.append("unpack")  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(Packed, unpack):
            out = weight.exp()
        out.register_hook(lambda grad: calls.append("hook"))
        KEPT.append(out.grad_fn)

    report = checked(step)
    assert calls == []
    packed = [leak for leak in report.leaks if any("Packed" in holder.text for holder in leak.chain)]
    assert packed and packed[0].chain[-2].text == (
        f"saved_result: attribute tensor of {__name__}."
        "test_saved_tensors_are_not_unpacked_and_hooks_not_run.<locals>.Packed"
    )


class Odd:
    def __repr__(self):
        raise ValueError("no")

    __str__ = __eq__ = __hash__ = __len__ = __bool__ = __iter__ = __repr__

    @property
    def __class__(self):
        raise ValueError("no")

    def __getattribute__(self, name):
        raise ValueError(name)


class OddDict(dict):
    def __getitem__(self, key):
        raise ValueError("no")

    items = keys = values = __iter__ = __contains__ = __getitem__


class OddList(list):
    def __iter__(self):
        raise ValueError("no")

    __getitem__ = index = __eq__ = __iter__


class OddMeta(type):
    def __getattribute__(cls, name):
        raise ValueError(name)

    def __instancecheck__(cls, instance):
        raise ValueError("no")


class OddClass(metaclass=OddMeta):
    pass


def test_odd_objects_are_survived():
    def step():
        odd = Odd()
        object.__setattr__(odd, "held", torch.zeros(1))
        KEPT.append(odd)
        KEPT.append(OddDict({"key": torch.zeros(2)}))
        KEPT.append(OddList([torch.zeros(3)]))
        of_class = OddClass()
        object.__setattr__(of_class, "held", torch.zeros(4))
        KEPT.append(of_class)
        KEPT.append({Odd: torch.zeros(5)})

    report = checked(step)
    assert [leak.bytes for leak in report.leaks] == [20, 16, 12, 8, 4]
    text = str(report)
    for words in ("attribute held of ", "OddDict item 'key'", "OddList item 0", "dict item at key type"):
        assert words in text


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


def test_an_unbound_tensor_and_meta_are_no_leaks():
    assert not checked(lambda: KEPT.append(torch.empty(10, device="meta")))
    assert not checked(lambda: KEPT.append(torch.empty(0)))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_looked_into():
    def step():
        KEPT.append(torch.eye(4).to_sparse())
        KEPT.append(torch.eye(4).to_sparse_csr())

    chains = " ".join(str(holder) for leak in checked(step).leaks for holder in leak.chain)
    assert "values: Tensor float32 [4]" in chains and "indices: Tensor int64 [2, 4]" in chains
    assert "compressed indices: Tensor int64 [5]" in chains


# ---- CUDA's snapshot


def snapshot():
    blocks = [
        {"state": "active_allocated", "size": 512, "requested_size": 400, "address": 1000},
        {"state": "inactive", "size": 512, "address": 1512},
        {"state": "active_allocated", "size": 1024, "requested_size": 1000, "address": 2024},
        {"state": "active_pending_free", "size": 1024, "address": 3048},
    ]
    return [{"device": 0, "address": 1000, "blocks": blocks}, {"device": 1, "address": 1000, "blocks": blocks[:1]}]


def test_blocks_of_a_snapshot():
    assert _cuda.active(snapshot()) == [("cuda:0", 1000, 400), ("cuda:0", 2024, 1000), ("cuda:1", 1000, 400)]
    assert _cuda.active(snapshot(), torch.device("cuda:1")) == [("cuda:1", 1000, 400)]


def test_blocks_that_no_tensor_explains():
    now = _cuda.active(snapshot())
    assert _cuda.unexplained(set(), now, []) == now
    assert _cuda.unexplained(set(), now, [("cuda:0", 1000, 8), ("cuda:1", 900, 50)]) == now[1:]
    assert _cuda.unexplained(set(now[:1]), now, [("cuda:0", 2500, 8), ("cpu", 1000, 8)]) == now[2:]


@pytest.mark.cuda
def test_leaks_on_cuda():
    report = checked(lambda: KEPT.append(torch.zeros(100, device="cuda")), device="cuda")
    (leak,) = report.leaks
    assert (leak.device, leak.bytes) == ("cuda:0", 400)


# ---- the size of what is looked at


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


def test_a_deep_graph_is_no_recursion():
    def step():
        out = torch.ones(1, requires_grad=True)
        for _ in range(20_000):
            out = out.sin()
        KEPT.append(out)

    report = checked(step)
    assert len(report.leaks) == 20_001
    assert all(len(leak.chain) <= 25 for leak in report.leaks)
    assert any("more" in holder.text for holder in report.leaks[-1].chain + report.leaks[5000].chain)


def test_groups_of_zbpipe_are_holders():
    layer = nn.Linear(3, 3)

    def step():
        x = torch.ones(2, 3, requires_grad=True)
        out = layer(x.exp()).sin()
        KEPT.append(zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], layer.parameters())[1])

    report = checked(step, allow=layer)
    assert {leak.chain[-1].text for leak in report.leaks} >= {
        "matrix of weight task 0: Tensor float32 [2, 3]",
        "output gradient of weight task 0: Tensor float32 [2, 3]",
    }
    group = report.leaks[0].chain[-2]
    assert group.kind == "group" and group.bytes == KEPT[0][0].bytes_held


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
            weights = [*inner.parameters(), *outer.parameters()]
            KEPT.append(zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], weights)[1])

    step()  # the first checkpoint of a process imports torch._dynamo
    KEPT.clear()
    gc.collect()
    report = checked(step)
    assert not report.unseen
    assert "cannot be seen" not in str(report)
    assert all(any(holder.kind == "group" for holder in leak.chain) for leak in report.leaks), str(report)
    held = zbpipe.memory.held(KEPT[0])
    assert report.bytes > held.bytes if held.incomplete else report.bytes == held.bytes


def test_find_holders_refuses_what_is_no_tensor():
    with pytest.raises(TypeError, match=r"tensor is a int; expected a torch\.Tensor"):
        find_holders(3)
    with pytest.raises(ValueError, match="without one storage of its own"):
        find_holders(torch.eye(2).to_sparse())
