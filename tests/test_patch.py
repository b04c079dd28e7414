"""patch(), its blocks, unpatch() and ZBPIPE_PATCH."""

import importlib
import importlib.util
import inspect
import logging
import os
import re
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining._backward as backward
import torch.distributed.pipelining._IR as IR
import torch.distributed.pipelining.schedules as schedules
import torch.distributed.pipelining.stage as stage
from torch.distributed.pipelining import PipelineStage

import zbpipe
from zbpipe import passes
from zbpipe._patch import table  # which names are rebound, and by what
from zbpipe._stage import state  # what is in force
from zbpipe._torch import pipelining  # the names that are known

pytestmark = pytest.mark.drops_groups

patch_module = importlib.import_module("zbpipe._patch")
ROOT = Path(__file__).parents[1]
BACKWARD = "torch.distributed.pipelining._backward"
NAMES = [name for name in pipelining.REPLACED if hasattr(backward, name)]
DRIVEN = ("forward_maybe_with_nosync", "backward_maybe_with_nosync", "backward_weight_one_chunk", "backward_one_chunk")
RELEASED = (
    "forward_one_chunk",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "get_fwd_send_ops",
    "get_bwd_send_ops",
    "set_local_fwd_input",
    "set_local_bwd_input",
    "clear_runtime_states",
)
releases_by_itself = torch.__version__ >= (2, 15)
before_2_15 = pytest.mark.skipif(releases_by_itself, reason="torch 2.15 releases by itself")


def everything():
    """What torch's modules hold under the names that patch() knows."""
    return {(m.__name__, name): vars(m)[name] for m in (backward, stage, IR) for name in NAMES if name in vars(m)}


def methods():
    """The stages' methods and the schedules' function that patch() wraps with this torch."""
    owners = [stage._PipelineStageBase, stage.PipelineStage, stage._PipelineStage]
    names = [*DRIVEN, "scale_grads", "_compute_outputs"]
    if not releases_by_itself:
        names += [*RELEASED, "_prepare_forward_infra", "_prepare_backward_infra"]
    found = {
        f"{owner.__module__}.{owner.__qualname__}.{name}": vars(owner)[name]
        for owner in owners
        for name in names
        if name in vars(owner) and not getattr(vars(owner)[name], "__isabstractmethod__", False)
    }
    if not releases_by_itself:
        found[f"{schedules.__name__}._batch_p2p"] = schedules._batch_p2p
    return found


@pytest.fixture(autouse=True)
def torch_as_it_was():
    zbpipe.unpatch()
    patch_module._said.clear()
    before = everything(), methods()
    yield
    zbpipe.unpatch()
    assert (everything(), methods()) == before


@pytest.fixture
def add_module(monkeypatch):
    def add(name, module):
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return add


def run(code, tmp_path, **environment):
    """Run a script that is not zbpipe's, in its own process, and return what it printed and logged."""
    script = tmp_path / "script.py"
    script.write_text(code)
    path = os.pathsep.join(filter(None, [str(Path(zbpipe.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path, "ZBPIPE_PATCH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_place_is_rebound_named_in_one_line_and_restored(caplog):
    before, methods_before = everything(), methods()
    with caplog.at_level(logging.DEBUG, "zbpipe"):
        zbpipe.patch()
        zbpipe.patch()
    assert zbpipe.is_patched()
    after = everything()
    assert after.keys() == before.keys()
    short, record = caplog.records
    assert [(r.name, r.levelno) for r in caplog.records] == [("zbpipe", logging.INFO), ("zbpipe", logging.DEBUG)]
    assert len(short.getMessage()) < 200
    for (module, name), function in after.items():
        assert function is table.REPLACEMENTS[name]
        assert f"{module}.{name}" in record.getMessage()
    for name, method in methods().items():
        assert method is not methods_before[name]
        assert method.__wrapped__ is methods_before[name]
        assert f"{name}," in record.getMessage() + ","
    zbpipe.unpatch()
    assert not zbpipe.is_patched()
    assert (everything(), methods()) == (before, methods_before)


def test_what_torchs_stage_does_not_call_is_torchs_own():
    others = {name: thing for name, thing in vars(backward).items() if inspect.isfunction(thing) and name not in NAMES}
    assert "construct_reverse_graph" in others
    with zbpipe.patch():
        assert {name: vars(backward)[name] for name in others} == others


def test_schedules_take_compiled_stages_while_patched():
    net = torch.nn.Linear(2, 2)
    compiled = types.SimpleNamespace(submod=torch.compile(net, backend="eager"))
    check = schedules._check_torch_compile_compatibility
    with zbpipe.patch():
        schedules._check_torch_compile_compatibility([compiled], "ScheduleZBVZeroBubble")
    assert schedules._check_torch_compile_compatibility is check
    with pytest.raises(RuntimeError, match="not supported with stage modules that have used"):
        check([compiled], "ScheduleZBVZeroBubble")


def test_nothing_is_added_that_torch_lacks(monkeypatch):
    monkeypatch.delattr(backward, "_autograd_grad_for_inputs", raising=False)
    with zbpipe.patch():
        assert not hasattr(backward, "_autograd_grad_for_inputs")
        assert backward.stage_backward is passes.stage_backward
    assert not hasattr(backward, "_autograd_grad_for_inputs")


def test_modules_that_imported_by_name_follow_but_for_zbpipes_own(add_module):
    user = add_module("a_users_module", types.ModuleType("a_users_module"))
    ours = add_module("zbpipe.a_helper", types.ModuleType("zbpipe.a_helper"))
    user.sb, user.other = backward.stage_backward, 1
    ours.oracle = torchs = backward.stage_backward
    with zbpipe.patch():
        assert user.sb is passes.stage_backward
        assert user.other == 1
        assert ours.oracle is torchs
    assert user.sb is torchs


def test_odd_modules_are_survived(add_module):
    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            raise AssertionError(f"woke a lazy module for {name}")

    class Grumpy:
        def __eq__(self, other):
            raise AssertionError("compared")

        __hash__ = None

    class Slots:
        __slots__ = ()

    lazy = add_module("a_lazy_module", Lazy("a_lazy_module"))
    lazy.grumpy = Grumpy()
    add_module("a_none", None)
    add_module("a_slotted_thing", Slots())
    add_module("a_number", 7)
    spec = importlib.util.find_spec("this")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    late = add_module("a_late_module", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(late)
    with zbpipe.patch():
        pass
    assert object.__getattribute__(late, "__class__") is not types.ModuleType, "the lazy module was loaded"


# What is called, and what holds after it: calls of patch() ("p"; "p+", "p-": with release_outputs) whose handles are named by
# letters ("a=p"), blocks of theirs that begin and end ("a[", "]a"; "[+", "]": of one that nobody else has), unpatch() ("u"); torch
# is its own (N), outputs are kept (K) or released (R).
ORDERS = {
    "twice is once": "p K p K u N u N",
    "nested blocks": "[ K [ K ] K ] N",
    "unpatched inside": "[ K u N ] N",
    "unpatched in an inner block": "[ K [ K u N ] K ] N",
    "a block after a patch": "p K [ K ] K",
    "the last word holds": "p+ R p R p- K p- K p K",
    "unpatching forgets": "p+ R u N p K u N [+ R ] N p K",
    "blocks bring back what was said": "[+ R [ R [- K ] R ] R ] N p- K [+ R u N ] K",
    "handles end with what was before": "a=p K b=p+ R b[ R ]b K a[ K p+ R ]a N a[ K ]a N",
    "unpatched before the block": "a=p K u N a[ K ]a N",
    "blocks that begin late": "a=p K b=p K a[ K ]a N b[ K ]b N",
    "blocks that begin late, the last first": "a=p K b=p K b[ K ]b K a[ K ]a N",
    "blocks that overlap, as threads' do": "a=p K a[ K b=p K b[ K ]a K ]b N",
    # E: ZBPIPE_RELEASE_OUTPUTS=1.
    "the environment has the first word": "E [ R ] N [- K ] N p- K p K",
    "unpatching forgets, with an environment": "E p- K u N p R u N [- K ] N p R",
}
LETTERS = {"N": None, "K": False, "R": True}


@pytest.mark.parametrize("name", ORDERS)
def test_what_holds_after_each_call(name, monkeypatch):
    before, handles, anonymous = everything(), {}, []

    def call(word):
        return zbpipe.patch(release_outputs={"+": True, "-": False}.get(word[-1]))

    for word in ORDERS[name].split():
        if word in LETTERS:
            assert releases() is LETTERS[word]
            assert (everything() == before) == (word == "N")
        elif word == "E":
            monkeypatch.setenv("ZBPIPE_RELEASE_OUTPUTS", "1")
        elif word == "u":
            zbpipe.unpatch()
        elif "=" in word:
            handles[word[0]] = call(word)
        elif word[0] == "p":
            call(word)  # and drops its handle
        elif word[0] == "[":
            anonymous.append(call(word))
            anonymous[-1].__enter__()
        elif word == "]":
            anonymous.pop().__exit__(None, None, None)
        elif word[1] == "[":
            handles[word[0]].__enter__()
        else:
            handles[word[1]].__exit__(None, None, None)


def test_a_block_begins_once():
    handle = zbpipe.patch()
    with handle, pytest.raises(RuntimeError, match="has begun already"), handle:
        pytest.fail("the block ran")


def test_a_block_restores_after_an_exception():
    with pytest.raises(KeyError), zbpipe.patch():
        raise KeyError
    assert not zbpipe.is_patched()


def test_many_threads():
    before = everything()

    def work(_):
        for _ in range(5):
            with zbpipe.patch():
                assert stage.stage_backward is passes.stage_backward, "torch's function inside a block"

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert everything() == before


def test_calls_that_nobody_can_take_back_are_forgotten():
    for number in range(9):
        zbpipe.patch(release_outputs=number % 2 == 0)
        zbpipe.unpatch()
    assert len(patch_module._calls) <= 2


@pytest.mark.parametrize("when", ["before", "meanwhile", "deleted meanwhile"])
def test_a_place_that_somebody_rebound_is_left_and_named(when, caplog):
    torchs, somebodys, was_before = stage.stage_backward, lambda: None, when == "before"

    def rebind():
        if when.startswith("deleted"):
            del stage.stage_backward
        else:
            stage.stage_backward = somebodys

    try:
        with caplog.at_level(logging.INFO, "zbpipe"):
            if was_before:
                rebind()
            zbpipe.patch()
            if not was_before:
                rebind()
            zbpipe.unpatch()
        assert vars(stage).get("stage_backward") is (None if when.startswith("deleted") else somebodys)
        assert backward.stage_backward is torchs
        assert when.startswith("deleted") or any("pipelining.stage.stage_backward" in text for text in warnings(caplog))
    finally:
        stage.stage_backward = torchs


def test_a_module_of_torch_that_is_loaded_while_patched_is_restored(add_module):
    torchs = backward.stage_backward
    with zbpipe.patch():
        late = add_module("torch.a_late_module", types.ModuleType("torch.a_late_module"))
        late.stage_backward = backward.stage_backward
    assert late.stage_backward is torchs


def test_every_difference_is_listed_and_nothing_changed(monkeypatch):
    def stranger():
        pass

    stranger.__module__ = BACKWARD
    monkeypatch.delattr(backward, "stage_backward_weight")
    monkeypatch.setattr(backward, "stage_backward", lambda stage_output, grads: None)
    monkeypatch.setattr(stage, "stage_backward_all", stranger, raising=False)
    before = everything()
    with pytest.raises(RuntimeError) as caught:
        zbpipe.patch()
    message = str(caught.value)
    assert "stage_backward_weight is missing" in message
    assert "stage_backward takes (stage_output, grads) where zbpipe knows (stage_output, output_grads," in message
    assert "torch.distributed.pipelining.stage uses stranger, which zbpipe does not know" in message
    assert everything() == before
    with pytest.raises(RuntimeError), zbpipe.patch():
        pytest.fail("the block ran")
    assert everything() == before


def releases():
    """Whether stages release their outputs; None when torch is not patched."""
    return state.release_outputs if zbpipe.is_patched() else None


def test_a_change_of_release_outputs_is_said_once(caplog):
    zbpipe.patch(release_outputs=True)
    with caplog.at_level(logging.INFO, "zbpipe"):
        for said in (None, False, False):
            zbpipe.patch(said)
    assert caplog.messages == ["release_outputs is False from now on"]


@pytest.mark.parametrize("value", [1, "yes", 0.0])
def test_release_outputs_that_is_no_bool_is_refused(value):
    with pytest.raises(TypeError, match=rf"release_outputs is {value!r}; expected True, False, or None"):
        zbpipe.patch(release_outputs=value)
    with pytest.raises(TypeError), zbpipe.patch(release_outputs=value):
        pytest.fail("the block ran")
    assert not zbpipe.is_patched()


def test_an_environment_that_makes_no_sense_is_refused(monkeypatch):
    monkeypatch.setenv("ZBPIPE_RELEASE_OUTPUTS", "maybe")
    before = everything()
    with pytest.raises(RuntimeError, match="ZBPIPE_RELEASE_OUTPUTS is 'maybe': set it to 1"):
        zbpipe.patch()
    assert everything() == before
    assert not zbpipe.is_patched()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]


def test_a_torch_that_is_known_is_patched_without_a_warning(caplog):
    with caplog.at_level(logging.INFO, "zbpipe"), zbpipe.patch(release_outputs=True):
        pass
    assert warnings(caplog) == []


@before_2_15
def test_a_torch_with_other_buffers_and_sends_is_patched_but_for_them(monkeypatch, caplog):
    """It costs memory, and is said once."""
    base = stage._PipelineStageBase
    monkeypatch.setattr(base, "get_fwd_send_ops", lambda self, chunk, group: None)
    monkeypatch.delattr(base, "set_local_fwd_input")
    names = [name for name in RELEASED if name in vars(base)]
    before = [vars(base)[name] for name in names], schedules._batch_p2p
    with caplog.at_level(logging.INFO, "zbpipe"):
        for _ in range(2):
            with zbpipe.patch(release_outputs=True):
                assert stage.stage_backward is passes.stage_backward
                assert hasattr(base.backward_one_chunk, "__wrapped__")
                assert ([vars(base)[name] for name in names], schedules._batch_p2p) == before
    (warning,) = warnings(caplog)
    assert "stages and schedules hold as much memory as without zbpipe: " in warning
    assert "_PipelineStageBase.set_local_fwd_input is missing" in warning
    assert "get_fwd_send_ops takes (self, chunk, group) where zbpipe knows (self, fwd_chunk_id)" in warning
    monkeypatch.undo()


@before_2_15
def test_a_torch_that_releases_outputs_itself_keeps_its_way(monkeypatch, caplog):
    """As 2.15 does: what is left is what it keeps from I to W."""
    base = stage._PipelineStageBase
    monkeypatch.setattr(base, "release_fwd_send_outputs", lambda self, fwd_chunk_id: None, raising=False)
    before = methods()
    with caplog.at_level(logging.INFO, "zbpipe"), zbpipe.patch(release_outputs=True):
        changed = {name.rpartition(".")[2] for name, method in methods().items() if method is not before[name]}
    assert changed - {"_compute_outputs"} == {*DRIVEN, "scale_grads"}
    assert warnings(caplog) == []
    assert any("release_outputs is True, which changes nothing" in message for message in caplog.messages)
    monkeypatch.undo()


GONE = object()
BASE = stage._PipelineStageBase
STATES = "_forward_chunk_states" if releases_by_itself else "fwd_cache"
# What another torch has in the place of what zbpipe knows (an owner, a name, and what is there), and what the refusal says.
OTHERS = {
    **{
        f"torch {version}": (torch, "__version__", version, rf"{version.split('+')[0]}.*install torch 2\.11 or newer")
        for version in ("2.10.1", "1.13.0+cu117", "unknown")
    },
    "no torch.distributed": (dist, "is_available", lambda: False, r"built without torch\.distributed"),
    "no module": (sys.modules, BACKWARD, None, r"has no module torch\.distributed\.pipelining\._backward"),
    **{f"no {name}": (BASE, name, GONE, rf"of its stages .*Base\.{name} is missing") for name in DRIVEN},
    **{
        f"another {name}": (
            BASE,
            name,
            lambda self, other: None,
            rf"Base\.{name} takes \(self, other\) where zbpipe knows",
        )
        for name in DRIVEN
    },
    # Behind the same signatures.
    **{
        f"no {name} in a stage": (BASE, "__init__", lambda self: None, rf"_PipelineStageBase\.{name} is missing")
        for name in ("backward_state", "dw_builder")
    },
    "outputs kept elsewhere": (BASE, STATES, property(lambda self: {}), rf"\.{STATES} is a read-only property"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_torch_that_zbpipe_cannot_patch_is_refused_and_nothing_changed(monkeypatch, what):
    owner, name, instead, said = OTHERS[what]
    if isinstance(owner, dict):
        monkeypatch.setitem(owner, name, instead)
    elif instead is GONE:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.setattr(owner, name, instead, raising=False)
    before = everything(), methods()
    with pytest.raises(RuntimeError, match=rf"(?s)torch .*{said}"):
        zbpipe.patch()
    assert (everything(), methods()) == before and not zbpipe.is_patched()
    monkeypatch.undo()


def test_main_grad_is_refused_where_a_schedule_would_not_scale_it(monkeypatch, caplog):
    monkeypatch.setattr(stage._PipelineStageBase, "scale_grads", lambda self: None)
    words = r"division by the number of microbatches would not reach main_grad: .*scale_grads takes \(self\) where"
    with zbpipe.policy(main_grad=True), pytest.raises(RuntimeError, match=f"cannot patch torch .*{words}"):
        zbpipe.patch()
    assert not zbpipe.is_patched()
    with caplog.at_level(logging.INFO, "zbpipe"), zbpipe.patch():
        weight, x = torch.ones(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)
        weight.main_grad = torch.zeros(2, 2)

        def groups():
            return zbpipe.stage_backward_input([(x @ weight).sum()], None, [x], [weight])[1]

        with zbpipe.policy(main_grad=True):
            with pytest.raises(RuntimeError, match=rf"policy\(main_grad=True\) cannot be used while .*{words}"):
                zbpipe.stage_backward_weight([weight], groups())
            with pytest.raises(RuntimeError, match="Failed to run stage backward") as caught:
                zbpipe.stage_backward((x @ weight).sum(), None, [x])
            assert "main_grad=True) cannot be used" in str(caught.value.__cause__)
        assert weight.grad is None and weight.main_grad.eq(0).all()
        zbpipe.stage_backward_weight([weight], groups())
        assert weight.grad.eq(2).all()
    assert [text for text in warnings(caplog) if "not all of torch" in text and "main_grad" in text]
    monkeypatch.undo()


def test_a_torch_that_is_newer_than_the_newest_tested_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(torch, "__version__", "2.16.0.dev20270101+cpu")
    for _ in range(2):
        with zbpipe.patch():
            assert stage.stage_backward is passes.stage_backward
    assert warnings(caplog) == [
        "torch 2.16.0.dev20270101+cpu is newer than 2.15, the newest that zbpipe has been tested with"
    ]


@pytest.mark.parametrize("check", [None, lambda stages: None])
def test_compiled_stages_are_said_to_be_refused_only_where_they_are(monkeypatch, caplog, check):
    if check is None:
        monkeypatch.delattr(schedules, "_check_torch_compile_compatibility")
    else:
        monkeypatch.setattr(schedules, "_check_torch_compile_compatibility", check)
    with zbpipe.patch():
        assert vars(schedules).get("_check_torch_compile_compatibility") is check
    said = [text for text in warnings(caplog) if "its schedules refuse compiled stages" in text]
    assert len(said) == (check is not None)


def test_a_method_that_somebody_rebound_meanwhile_is_left_named_and_harmless(caplog):
    torchs = stage._PipelineStageBase.scale_grads
    zbpipe.patch()
    ours = stage._PipelineStageBase.scale_grads
    stage._PipelineStageBase.scale_grads = somebodys = lambda self, factor: ours(self, factor)
    try:
        with caplog.at_level(logging.INFO, "zbpipe"):
            zbpipe.unpatch()
        assert stage._PipelineStageBase.scale_grads is somebodys
        (warning,) = warnings(caplog)
        assert "stage._PipelineStageBase.scale_grads" in warning
        module = torch.nn.Linear(1, 1)
        module.weight.grad, module.weight.main_grad = torch.tensor([[6.0]]), torch.tensor([[6.0]])
        with zbpipe.policy(main_grad=True):
            stage._PipelineStageBase.scale_grads(types.SimpleNamespace(submod=module), 2)
        assert (module.weight.grad, module.weight.main_grad) == (3, 6)
    finally:
        stage._PipelineStageBase.scale_grads = torchs


def test_importing_zbpipe_changes_nothing(tmp_path):
    done = run(
        "import torch.distributed.pipelining.stage as stage\n"
        "before = stage.stage_backward\n"
        "import zbpipe\n"
        "assert stage.stage_backward is before and not zbpipe.is_patched()",
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize(("setting", "lines"), [("zbpipe", 1), ("+zbpipe", 2)])
def test_torch_logs_shows_what_is_patched(setting, lines, tmp_path):
    done = run("import zbpipe\nzbpipe.patch()", tmp_path, TORCH_LOGS=setting)
    short, *long = [line for line in done.stderr.splitlines() if "patched" in line]
    assert len(short) < 200 and len(long) == lines - 1
    assert all("torch.distributed.pipelining.stage.stage_backward," in line for line in long)


def test_a_misspelled_variable_is_said_at_torchs_import(tmp_path):
    code = "import sys\nimport torch\nprint('zbpipe' in sys.modules)"
    done = run(code, tmp_path, ZBPIPE_PACTH="1", ZBPIPE_POLCY="defer=all", ZBPIPE_RELEASE_OUTPUTS="1")
    assert done.stdout == "False\n"
    words = (
        "ZBPIPE_PACTH (ZBPIPE_PATCH?), ZBPIPE_POLCY (ZBPIPE_POLICY?) in the environment: zbpipe reads no such variable"
    )
    assert done.stderr.splitlines() == [words]


def test_every_variable_that_is_read_is_known():
    hook = importlib.import_module("_zbpipe_hook")
    files = [ROOT / "setup.py", ROOT / "Makefile"]
    for folder in ("zbpipe", "_zbpipe_hook", "tools", "tests", "benchmarks", "examples"):
        files += (ROOT / folder).rglob("*.py")
    read = {name for file in files for name in re.findall(r"ZBPIPE_[A-Z]+(?:_[A-Z]+)*", file.read_text())}
    assert read - {"ZBPIPE_PACTH", "ZBPIPE_POLCY"} == {*hook.VARIABLES, *hook.OURS}


HOOKED = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import _zbpipe_hook
_zbpipe_hook.install()
assert not {{"torch", "zbpipe", "zbpipe._patch"}} & sys.modules.keys()
"""
SHOW = "\nprint(sys.modules['torch.distributed.pipelining.stage'].stage_backward.__module__)"


@pytest.mark.parametrize(
    "imports",
    [
        "from torch.distributed.pipelining._backward import stage_backward\n"
        "print(stage_backward.__module__)\nimport zbpipe, inspect\n"
        "import torch.distributed.pipelining as p\nassert inspect.getsource(p) and p.__spec__.loader is p.__loader__\n"
        "assert not [f for f in sys.meta_path if 'hook' in type(f).__module__]",
        "import torch\nimport zbpipe\nimport torch.distributed.pipelining",
        "import threading\nt = threading.Thread(target=__import__, args=('torch.distributed.pipelining',))\n"
        "t.start()\nimport zbpipe\nt.join()",
    ],
    ids=["script", "zbpipe first", "two threads"],
)
def test_the_variable_patches_a_script_that_never_heard_of_zbpipe(tmp_path, imports):
    done = run(HOOKED + imports + SHOW, tmp_path, ZBPIPE_PATCH="1")
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {"zbpipe.passes"}


def test_the_variable_beside_it_releases_outputs(tmp_path):
    code = HOOKED + "import torch.distributed.pipelining\nimport zbpipe._stage.state as r\n"
    done = run(code + "print(r.release_outputs)", tmp_path, ZBPIPE_PATCH="1", ZBPIPE_RELEASE_OUTPUTS="1")
    assert done.stdout == "True\n", done.stderr


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    spec = importlib.util.spec_from_file_location("_zbpipe_hook", ROOT / "_zbpipe_hook" / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("value", "finders"), [(None, 0), ("", 0), ("0", 0), ("false", 0), (" No ", 0), ("1", 1), ("True", 1)]
)
def test_off_is_off_and_on_is_on_once(hook, monkeypatch, value, finders):
    monkeypatch.delenv("ZBPIPE_PATCH", raising=False)
    if value is not None:
        monkeypatch.setenv("ZBPIPE_PATCH", value)
    hook.install()
    hook.install()
    assert sum(isinstance(finder, hook.Finder) for finder in sys.meta_path) == finders


def test_any_other_value_is_refused_where_it_matters(tmp_path):
    done = run(HOOKED + "print('runs')\nimport torch.distributed.pipelining", tmp_path, ZBPIPE_PATCH="maybe")
    assert done.stdout == "runs\n"
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "RuntimeError: ZBPIPE_PATCH is 'maybe': set it to 1 to patch torch.distributed.pipelining, or to 0 not to."
    )


def test_a_zbpipe_that_cannot_patch_stops_the_import(tmp_path):
    code = "import torch\ntorch.__version__ = '2.10.0'\nimport torch.distributed.pipelining"
    done = run(HOOKED + code, tmp_path, ZBPIPE_PATCH="yes")
    assert done.returncode == 1
    assert "ImportError: zbpipe has no compiled part for torch 2.10.0 and" in done.stderr.splitlines()[-1]


def test_scaling_divides_each_main_grad_once(alone):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
    first, bias, second = module.parameters()
    first.main_grad = first.grad = torch.full((2, 2), 8.0)
    bias.main_grad = torch.full((2,), 8.0)
    second.main_grad = torch.full((2, 2), 8.0)
    bias.grad = torch.full((2,), 8.0)
    module.register_parameter("shared", torch.nn.Parameter(torch.zeros(2, 2)))
    module.shared.main_grad = second.main_grad
    with zbpipe.patch(), zbpipe.policy(main_grad=True):
        PipelineStage(module, 0, 1, torch.device("cpu")).scale_grads(4)
    assert all((weight.main_grad == 2).all() for weight in module.parameters())
    assert (bias.grad == 2).all()
