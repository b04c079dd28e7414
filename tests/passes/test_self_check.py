"""What zbpipe takes on trust is checked before the first I: wherever that runs, it is seen by nobody; what a torch has
changed is found, and has the effect that docs/upgrade.md names."""

import contextlib
import logging
import os
import re
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from support.processes import python
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import zbpipe
from zbpipe._stage import formulas, self_check  # what is tested
from zbpipe._torch import autograd  # what a planted torch computes

SHIM = Path(__file__).parents[2] / "csrc/shim"


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations.append(function)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def fresh(monkeypatch):
    """As in a new process, but for the types that the library distrusts: the ones it is told of here."""
    distrusted = []
    monkeypatch.setattr(self_check, "_found", {})
    for name, value in (("_said", {}), ("_unsaid", []), ("_failures", 0)):
        monkeypatch.setattr(self_check, name, value)
    monkeypatch.setattr(self_check._C, "distrust", distrusted.append)
    return distrusted


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.DEBUG, "zbpipe")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "zbpipe"]


def small():
    return [torch.ones(2, 2, requires_grad=True) for _ in range(2)]


def split():
    x, w = small()
    (dx,), groups = zbpipe.stage_backward_input([x.mm(w)], [torch.full((2, 2), 3.0)], [x], [w])
    zbpipe.stage_backward_weight([w], groups)
    assert dx.tolist() == [[6, 6], [6, 6]] and w.grad.tolist() == [[6, 6], [6, 6]]


@contextlib.contextmanager
def setting(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)


@contextlib.contextmanager
def in_vmap():
    level = torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield level
    finally:
        torch._C._functorch._vmap_decrement_nesting()


def refuse(*_):
    raise AssertionError("the caller's hook runs")


CONTEXTS = {
    "nothing": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "a fake-tensor mode": FakeTensorMode,
    "default device meta": lambda: setting(torch.set_default_device, "meta", torch.get_default_device()),
    "default dtype bfloat16": lambda: setting(torch.set_default_dtype, torch.bfloat16, torch.get_default_dtype()),
    "default saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(refuse, refuse),
    "functorch": in_vmap,
    "anomaly mode": torch.autograd.detect_anomaly,
    "deterministic algorithms": lambda: setting(torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", CONTEXTS)
def test_where_the_first_input_pass_runs_makes_no_difference(fresh, said, name):
    state = torch.get_rng_state()
    with CONTEXTS[name]():
        assert self_check.look() == ""
    assert set(self_check._found.values()) == {""} and fresh == [] and said() == []
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", [name for name in CONTEXTS if name not in ("inference mode", "a fake-tensor mode")])
def test_the_first_input_pass_is_right_wherever_it_runs(fresh, name):
    x, w = small()
    y = x.mm(w)
    grad = torch.full((2, 2), 3.0)
    with CONTEXTS[name]():
        (dx,), groups = zbpipe.stage_backward_input([y], [grad], [x], [w])
        zbpipe.stage_backward_weight([w], groups)
    assert self_check._found and dx.tolist() == [[6, 6], [6, 6]] and w.grad.tolist() == [[6, 6], [6, 6]]


@pytest.mark.parametrize("seen", [Seen(), FlopCounterMode(display=False)], ids=["a dispatch mode", "FLOPs"])
def test_the_caller_counts_nothing_of_it(fresh, seen):
    with seen:
        self_check.look()
    assert self_check._found
    assert not (seen.operations if isinstance(seen, Seen) else seen.get_total_flops())


def test_no_profiler_sees_it(fresh):
    with torch.profiler.profile() as profiler:
        torch.ones(2).add(1)
        self_check.look()
    names = {event.name for event in profiler.events()}
    assert self_check._found and "aten::add" in names
    assert not [name for name in names if name.startswith("zbpipe") or "Backward" in name or "mm" in name]


def test_no_observer_of_all_threads_sees_it(fresh, tmp_path):
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    observer.start()
    try:
        self_check.look()
    finally:
        observer.stop()
        observer.unregister_callback()
    assert self_check._found and "Backward" not in (tmp_path / "trace.json").read_text()


def test_no_recording_sees_it(fresh):
    recordings = [zbpipe.memory.record() for _ in range(2)]
    for recording in recordings:
        with recording:
            split()
    assert recordings[0].allocations == recordings[1].allocations > 0


def test_two_threads_have_their_first_input_passes_at_once(fresh, said):
    start, errors = threading.Barrier(4), []

    def work():
        start.wait()
        try:
            split()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and said() == [] and fresh == []


def test_it_is_made_once(fresh, monkeypatch):
    counts = []
    monkeypatch.setattr(formulas, "disagreeing", lambda: counts.append(0) or {})
    split()
    split()
    assert len(counts) == 1


def test_a_check_that_fails_decides_nothing_and_is_made_again(fresh, said, monkeypatch):
    with monkeypatch.context() as planted:
        planted.setattr(formulas, "disagreeing", lambda: (_ for _ in ()).throw(MemoryError("no memory")))
        split()
        split()
    assert self_check._found == {} and fresh == []
    assert ["attempt 1: MemoryError('no memory')" in said()[0], "attempt 2: " in said()[1]] == [True] * len(said())
    split()
    assert set(self_check._found.values()) == {""}


def test_a_check_that_always_fails_is_given_up(fresh, said, monkeypatch):
    monkeypatch.setattr(formulas, "disagreeing", lambda: (_ for _ in ()).throw(ValueError("always")))
    for _ in range(5):
        split()
    assert len(said()) == 3 and self_check._found == {}
    assert self_check.report() == said()


def test_a_case_that_raises_is_told_from_the_others(fresh, said, monkeypatch):
    """All others are decided; if none works, it is not the formulas' fault."""

    def raising(x, w):
        return Raises.apply(x.mm(w))

    case = formulas.APART[2]._replace(output=raising)
    monkeypatch.setattr(formulas, "APART", (formulas.APART[0], case))
    assert self_check.look() == "" and fresh == ["MmBackward0"]
    assert "raises RuntimeError('of its own') where zbpipe's formula is tried" in said()[0]
    monkeypatch.setattr(self_check, "_found", {})
    monkeypatch.setattr(formulas, "APART", (case, case))
    monkeypatch.setattr(formulas, "WAYS", ())
    self_check.look()
    assert self_check._found == {} and fresh == ["MmBackward0"]


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("of its own")


def test_what_a_signal_handler_raises_meanwhile_is_the_callers(fresh, monkeypatch):
    def interrupted(thread, *_, join=threading.Thread.join):
        join(thread)
        raise RuntimeError("of a signal handler")

    with monkeypatch.context() as planted:
        planted.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(RuntimeError, match="of a signal handler"):
            self_check.look()
    assert self_check.look() == "" and self_check._found


def test_its_warnings_come_from_the_callers_thread(fresh, monkeypatch):
    """A handler may want a lock that the caller has."""
    threads = []
    monkeypatch.setitem(formulas.SAVED, "LinearBackward0", "input")
    monkeypatch.setattr(logging.getLogger("zbpipe"), "filters", [lambda record: threads.append(record.thread)])
    self_check.look()
    assert threads == [threading.get_ident()]


def test_where_no_thread_can_be_started_nothing_is_decided(fresh, said, monkeypatch):
    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none)
    split()
    assert self_check._found == {} and 'attempt 1: RuntimeError("can\'t start new thread")' in said()[0]


# The tables.


def nodes_of(case):
    nodes = [next(formulas._graphs(case, torch.arange(96.0))).output.grad_fn]
    for node in nodes:
        nodes += [further for further, _ in node.next_functions if further is not None]
    return {node.name() for node in nodes}


def test_there_is_a_case_for_each_type_that_the_shim_knows():
    apart = set(re.findall(r"as<gen::(\w+)>", (SHIM / "torch/separable.cpp").read_text()))
    ways = (SHIM / "group/facts.cpp").read_text().partition("bool is_layout(")[2].partition("\n}\n")[0]
    assert apart == set(formulas.SAVED) and len(apart) == 13
    assert {case.blamed for case in formulas.APART} == apart - {"LinearBackward0", "FusedRmsNormBackward0"}
    assert {case.blamed for case in formulas.WAYS} == set(re.findall(r"gen::(\w+)", ways))


@pytest.mark.parametrize("case", [*formulas.APART, *formulas.WAYS], ids=lambda case: case.blamed)
def test_the_graph_of_each_case_has_a_node_of_its_type(case):
    assert case.blamed in nodes_of(case)


def test_each_type_is_tried_with_each_choice_of_leaves():
    choices = {}
    for case in formulas.APART:
        assert len(case.choices) == len(set(case.choices))
        choices.setdefault((case.blamed, len(case.leaves)), set()).update(case.choices)
    assert all(tried == set(range(1, 2**count - 1)) for (_, count), tried in choices.items())


def test_both_kinds_of_split_are_tried(monkeypatch):
    kinds = {}

    def spy(*given, of=formulas.split):
        groups = of(*given)
        for group in groups:
            for task in self_check.tasks_of(group):
                kinds.setdefault(task[0], set()).add(task[1])
        return groups

    monkeypatch.setattr(formulas, "split", spy)
    assert formulas.disagreeing() == {}
    assert {case.blamed for case in formulas.APART if "deferred" not in kinds[case.blamed]} == {"GroupedMmBackward0"}
    products = {case.blamed for case in formulas.APART if "product" in kinds[case.blamed]}
    names = ("Addmm", "Mm", "Bmm", "Baddbmm", "GroupedMm", "Convolution")
    assert products == {f"{name}Backward0" for name in names}


# What a torch may have changed.


@pytest.mark.parametrize("case", [*formulas.APART, *formulas.WAYS], ids=lambda case: case.blamed)
def test_a_gradient_that_torch_computes_otherwise_is_found(fresh, said, monkeypatch, case):
    def changed(outputs, grads, inputs, of=autograd.run_backward):
        theirs = of(outputs, grads, inputs)
        mine = {id(leaf) for leaves in planted for leaf in leaves}
        return [grad + 1 if id(leaf) in mine else grad for leaf, grad in zip(inputs, theirs, strict=True)]

    def output(*leaves):
        planted.append(leaves)
        return case.output(*leaves)

    planted = []
    monkeypatch.setattr(autograd, "run_backward", changed)
    for name in ("APART", "WAYS"):
        cases = [one._replace(output=output) if one is case else one for one in getattr(formulas, name)]
        monkeypatch.setattr(formulas, name, tuple(cases))
    assert self_check.look() == ""
    assert fresh == [case.blamed]
    (sentence,) = said()
    assert sentence.startswith(f"{case.blamed} of torch {torch.__version__} gives another gradient than zbpipe's")


def test_what_this_torch_does_not_compute_on_a_cpu_is_left_out(fresh, said, monkeypatch):
    def refuses(*_):
        raise NotImplementedError("not on the CPU")

    monkeypatch.setattr(formulas, "APART", (formulas.APART[0]._replace(output=refuses), *formulas.APART[1:]))
    assert self_check.look() == "" and self_check._found and said() == [] == fresh


def test_a_layout_that_has_saved_something_is_found(fresh, said, monkeypatch):
    names = autograd.names_saved_by
    monkeypatch.setattr(autograd, "names_saved_by", lambda of: ["self"] if of == "TBackward0" else names(of))
    self_check.look()
    assert fresh == ["TBackward0"]
    assert "has saved self where zbpipe knows nothing; autograd's engine runs its nodes in W" in said()[0]


def test_a_term_that_has_saved_more_is_found(fresh, said, monkeypatch):
    monkeypatch.setitem(formulas.SAVED, "LinearBackward0", "input")
    self_check.look()
    assert fresh == ["LinearBackward0"]
    assert "has saved input weight where zbpipe knows input; its nodes run whole in I" in said()[0]


def planted(code, **variables):
    """What a new process printed, after the code."""
    done = python("-c", textwrap.dedent(code), **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_nodes_of_a_type_that_disagrees_run_whole_and_explain_says_why():
    assert planted("""
        import torch, zbpipe
        from zbpipe._stage import formulas, idle
        formulas.SAVED["AddmmBackward0"] = "mat1 mat2 scale"
        layer, x = torch.nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
        whole = torch.nn.Linear(3, 2)
        whole.load_state_dict(layer.state_dict())
        for _ in range(2):
            whole(x).sum().backward()
            (dx,), groups = zbpipe.stage_backward_input([layer(x).sum()], None, [x], layer.parameters())
            assert torch.equal(dx, layer.weight.sum(0).expand(4, 3))
            word = idle.word(groups, [])
            assert "self-check: this torch differs" in word and "helps: a torch that zbpipe knows" in word, word
            zbpipe.stage_backward_weight(layer.parameters(), groups)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(layer.parameters(), whole.parameters()))
        plan = zbpipe.explain(layer, torch.ones(4, 3))
        (use,) = plan.parameters[0].uses
        assert use.runs_in == "I" and use.why.startswith("self-check: this torch differs"), use
    """).count("AddmmBackward0 of torch") == 1  # fmt: skip


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_first_input_pass_in_a_forked_child():
    assert "right" in planted("""
        import os, torch, zbpipe
        x, w = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
        torch.ones(300, 300).mm(torch.ones(300, 300))  # starts OpenMP's threads
        child = os.fork()
        if child == 0:
            (dx,), groups = zbpipe.stage_backward_input([x.mm(w)], [torch.ones(2, 2)], [x], [w])
            zbpipe.stage_backward_weight([w], groups)
            found = zbpipe._stage.self_check._found
            os._exit(0 if set(found.values()) == {""} and w.grad.tolist() == dx.tolist() == [[2, 2], [2, 2]] else 1)
        assert os.waitpid(child, 0)[1] == 0
        print("right")
    """)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_type_that_the_cpu_does_not_compute():
    case = formulas.Case(
        "FusedRmsNormBackward0",
        ((3, 4), (4,)),
        lambda x, w: torch.ops.aten._fused_rms_norm(x, [4], w, 1e-5)[0],
        dtype=torch.float32,
        is_rounded=True,
    )
    graphs = list(formulas._graphs(case, torch.arange(96.0, device="cuda")))
    assert [graph.output.grad_fn.name() for graph in graphs] == [case.blamed] * 2
    assert list(formulas._differing(graphs)) == []


def test_a_renamed_getter_is_found_and_refused():
    assert "refused" in planted("""
        import ctypes, torch, zbpipe
        class Getter(ctypes.Structure):
            _fields_ = [("name", ctypes.c_char_p), ("rest", ctypes.c_void_p * 4)]
        # As PyType_GetSlot gives it; 73 is Py_tp_getset.
        slot = ctypes.pythonapi.PyType_GetSlot
        slot.restype, slot.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
        getters = ctypes.cast(slot(torch._C._functions.MulBackward0, 73), ctypes.POINTER(Getter))
        i = next(i for i in range(99) if getters[i].name == b"_raw_saved_self")
        getters[i].name = b"_kept_self"
        x, w = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
        y = x.mm(w)
        try:
            zbpipe.stage_backward_input([y], [torch.ones(2, 2)], [x], [w])
        except RuntimeError as error:
            assert "1 of the 2 tensors that a MulBackward0 has saved are seen" in str(error), error
            print("refused")
        y.backward(torch.ones(2, 2))  # nothing was touched
    """)


def test_a_renamed_variable_of_a_checkpoint_is_found_and_recompute_refused():
    assert "refused" in planted("""
        import inspect, torch, torch.utils.checkpoint as module
        source = inspect.getsource(module)
        assert source.count("recompute_fn") > 3
        exec(compile(source.replace("recompute_fn", "run_again"), module.__file__, "exec"), vars(module))
        import zbpipe
        def step(choice):
            x, w = (torch.ones(2, 2, requires_grad=True) for _ in range(2))
            y = module.checkpoint(lambda t: (t.mm(w)).tanh(), x, use_reentrant=False)
            with zbpipe.policy(checkpoint=choice):
                zbpipe.stage_backward_weight([w], zbpipe.stage_backward_input([y], [torch.ones(2, 2)], [x], [w])[1])
            return w.grad
        assert torch.equal(step("keep"), step("input_pass"))
        try:
            step("recompute")
        except RuntimeError as error:
            assert 'use checkpoint="keep" or checkpoint="input_pass"' in str(error), error
            print("refused:", error)
    """)


def test_recompute_is_tried_where_it_is_used_and_something_is_checkpointed(fresh):
    torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(2), use_reentrant=False)
    with zbpipe.policy(checkpoint="recompute"):
        split()
    assert len(self_check._found) == 2 and set(self_check._found.values()) == {""}
