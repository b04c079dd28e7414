"""Checks of odd things: forks, wrappers, numpy's memory, objects that fight back."""

import copy
import gc
import io
import os
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from support.checks import checked
from support.leaks import collects
from support.processes import in_own_process
from torch import nn

import zbpipe
from zbpipe.leaks import TensorLeakWarning, check_tensor_leak, find_holders

KEPT = []


@pytest.fixture(autouse=True)
def _nothing_kept():
    yield
    KEPT.clear()
    gc.collect()


def said(report):
    return "\n".join(str(holder) for leak in report.leaks for holder in leak.chain)


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


# ---- wrappers, and what tensors are made of


def test_functorch_wrappers_of_sparse_tensors():
    def step():
        torch.func.vjp(lambda x: (KEPT.append(x), x)[1], torch.eye(3).to_sparse())

    assert checked(step).bytes > 0


def test_tensors_of_a_tracer_with_symbolic_sizes():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    KEPT.append(FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(5, 7), static_shapes=False))
    assert not checked(lambda: KEPT.append(KEPT[0] * 2))
    assert find_holders(KEPT[0]).bytes >= 0


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_allowed_dtensors_and_their_gradients(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    layer = nn.Linear(4, 4)
    mesh = init_device_mesh("cpu", (1,))
    for name, weight in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()])))
    optimizer = torch.optim.Adam(layer.parameters())
    x = distribute_tensor(torch.ones(2, 4), mesh, [Replicate()])

    def step():
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    step()
    for _ in range(2):
        report = checked(step, allow=[layer, optimizer])
        assert not report, str(report)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_channel")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.eye(4).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged),
    ],
    ids=["sparse", "csr", "nested", "jagged"],
)
def test_allowed_tensors_that_are_made_of_several(make):
    make()

    def step():
        KEPT.append(make())

    assert checked(step).bytes > 0
    report = checked(step, allow=KEPT)
    assert not report, str(report)


def test_sparse_gradients_of_an_embedding_are_its_own():
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())

    def step():
        optimizer.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    step()
    report = checked(step, allow=[table, optimizer])
    assert not report, str(report)


def test_gradients_that_are_retained_are_the_tensors_own():
    x = torch.ones(3, requires_grad=True)
    hidden = x * 2
    hidden.retain_grad()
    report = checked(lambda: hidden.sum().backward(), allow=[x, hidden])
    assert not report, str(report)


def test_a_predicate_is_asked_of_tensors_that_python_has_not_seen():
    weight = torch.ones(3, requires_grad=True)
    asked = []
    report = checked(lambda: weight.exp().sum().backward(), allow=lambda t: asked.append(t.shape) or True)
    assert not report and asked == [(3,)]


# ---- memory from elsewhere


def test_what_an_older_storage_gains_is_seen():
    storage = torch.ones(4).untyped_storage()
    tensor = torch.empty(0)
    tensor.set_(storage)
    (leak,) = checked(lambda: storage.resize_(4_000_000)).leaks
    assert leak.bytes == 4_000_000 and leak.fate == "alive"


def test_what_a_group_holds_from_before_is_old():
    layer = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    output = layer(x.exp()).sin()
    _, groups = zbpipe.stage_backward_input([output], [torch.ones_like(output)], [x], layer.parameters())
    report = checked(lambda: zbpipe.stage_backward_weight(layer.parameters(), groups), allow=layer)
    assert not report, str(report)


def loaded():
    file = io.BytesIO()
    torch.save(torch.ones(7), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize(
    "make",
    [loaded, lambda: copy.deepcopy(torch.ones(7)), lambda: torch.UntypedStorage(28), lambda: torch.Tensor(loaded())],
)
def test_storages_that_python_makes_go_past_the_allocator_and_are_seen(make):
    (leak,) = checked(lambda: KEPT.append(make())).leaks
    assert leak.bytes == 28 and leak.fate == "alive" and "KEPT" in leak.blame.text

    def in_a_cycle():
        held = [make()]
        held.append(held)

    (leak,) = checked(in_a_cycle).leaks
    assert leak.bytes == 28 and leak.fate == "freed by the collector"
    assert not checked(make)


def test_an_array_of_numpy_is_a_holder():
    report = checked(lambda: KEPT.append([torch.ones(4).numpy()]))
    assert "a numpy array" in said(report) and "KEPT" in report.leaks[0].blame.text
    assert not checked(lambda: None)

    @check_tensor_leak(action="error")
    def produce():
        return torch.ones(4).numpy()

    assert produce().sum() == 4


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        extra = torch.ones(7)
        return grad, zbpipe.defer(lambda x, grad: x.mT @ grad * extra[0], weights=1, saved=(x, grad))


def test_work_that_was_handed_over_is_a_holder():
    w = torch.ones(3, 3, requires_grad=True)

    def step():
        x = torch.ones(2, 3, requires_grad=True)
        out = Doubled.apply(x.exp(), w)
        KEPT.append(zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])[1])

    report = checked(step, allow=w)
    assert all(leak.chain[0].kind == "module" for leak in report.leaks), str(report)
    (extra,) = [leak for leak in report.leaks if leak.bytes == 28]
    assert any(holder.kind == "group" for holder in extra.chain)
    assert "closure variable extra" in str(extra) and "work of weight task 0" in str(extra)
    zbpipe.stage_backward_weight([w], KEPT.pop())


# ---- find_holders


def test_a_tensor_that_only_variables_hold():
    x = torch.ones(3)
    assert "variables of running functions" in find_holders(x).chain[0].text


def test_a_tensor_in_a_dead_cycle():
    x = torch.ones(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "enable", lambda: None)
        gc.disable()
        cycle = {"tensor": x}
        cycle["itself"] = cycle
        del cycle
        leak = find_holders(x)
    gc.enable()
    assert leak.chain[0].text == "dict item 'tensor'"


# ---- objects that fight back


class Name(str):
    pass


def test_subclasses_of_atoms_may_hold_tensors():
    name = Name("n")
    KEPT.append(name)

    def step():
        name.cache = torch.ones(3)

    assert "attribute cache of" in said(checked(step))


class Proud(type):
    @property
    def __module__(cls):
        raise RuntimeError("no module for you")


def test_a_metaclass_that_raises():
    odd = Proud("Odd", (), {})()
    KEPT.append(odd)

    def step():
        odd.tensor = torch.ones(3)

    assert "attribute tensor of" in said(checked(step))


def test_a_property_in_the_place_of_the_dictionary_is_not_run():
    class Locked:
        @property
        def __dict__(self):
            raise SystemExit("run")

    locked = Locked()
    KEPT.append(locked)
    assert checked(lambda: setattr(locked, "tensor", torch.ones(3))).leaks[0].bytes == 12


def test_keys_are_not_compared():
    compared = []

    class Key:
        def __hash__(self):
            return hash("__name__")

        def __eq__(self, other):
            compared.append(other)
            return False

    table = {Key(): None, "tensor": None}
    KEPT.append(table)

    def step():
        table["tensor"] = torch.ones(3)
        compared.clear()

    assert "dict item 'tensor'" in said(checked(step)) and compared == []


class Contrary(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("no")


def test_an_allowed_subclass_that_refuses_everything():
    contrary = torch.ones(3).as_subclass(Contrary)
    assert not checked(lambda: None, allow=[contrary])


def test_names_that_no_encoding_has(tmp_path):
    report = checked(lambda: KEPT.append({"\udcff": torch.ones(3)}))
    str(report).encode("utf-8")
    assert "udcff" in report.draw(tmp_path / "leaks.dot").read_text()


# ---- the check itself


def test_a_check_that_was_left_keeps_nothing_that_was_allowed():
    model = nn.Linear(2, 2)
    with check_tensor_leak(action="record", allow=model) as check:
        pass
    gone = weakref.ref(model)
    del model
    assert gone() is None and not check.report


def test_what_a_collection_inside_frees_is_a_leak():
    def step():
        holder = {"tensor": torch.zeros(8)}
        holder["itself"] = holder
        del holder
        gc.collect()

    (leak,) = checked(step).leaks
    assert (leak.bytes, leak.fate) == (32, "freed by the collector")
    assert "a collection inside the check" in leak.chain[0].text
    assert gc.callbacks == [c for c in gc.callbacks if "Collected" not in repr(c)]


@pytest.mark.parametrize("thing", [5, nn.Linear(2, 2), "weights"])
def test_what_is_no_function_is_not_decorated(thing):
    with pytest.raises(TypeError, match=r"was given a \w+ to check; expected a function, or pass what may live on as"):
        check_tensor_leak(thing)


def test_an_async_generator_is_not_decorated():
    async def produce():
        yield 1

    with pytest.raises(TypeError, match="runs after its call has returned"):
        check_tensor_leak(produce)


def test_warnings_of_a_decorated_function_point_at_it_each_time():
    @check_tensor_leak
    def leak():  # the function
        KEPT.append(torch.ones(3))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        leak()
        leak()
    assert [w.category for w in caught] == [TensorLeakWarning] * 2
    assert all(w.filename == __file__ for w in caught)


def test_a_check_is_left_once_and_after_it_was_entered():
    check = check_tensor_leak(action="record")
    with pytest.raises(RuntimeError, match="a check is left once, after it was entered"):
        check.__exit__(None, None, None)
    with check:
        pass
    with pytest.raises(RuntimeError, match="a check is left once, after it was entered"):
        check.__exit__(None, None, None)


@pytest.mark.parametrize("device", ["foo", 3.5, "meta"])
def test_devices_that_cannot_be_checked(device):
    with pytest.raises(ValueError, match=r"^device is .*; tensors can be checked on cpu and cuda$"):
        check_tensor_leak(device=device)


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


class Unequal(type):
    def __eq__(cls, other):
        pytest.fail("a class was compared")

    def __hash__(cls):
        pytest.fail("a class was hashed")


class Watched:
    def __get__(self, instance, owner):
        pytest.fail("a descriptor was run")


def test_no_code_of_the_programs_runs():
    class Held(metaclass=Unequal):
        __slots__ = ("__weakref__", "tensor")

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.kept = x.exp()
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    def keep():
        held = Held()
        held.tensor = torch.ones(3)
        out = Double.apply(torch.ones(5, requires_grad=True))
        Double.forward = Watched()
        KEPT.extend([held, out])

    report = checked(keep)
    assert {leak.bytes for leak in report.leaks} == {12, 20}
    str(report)
