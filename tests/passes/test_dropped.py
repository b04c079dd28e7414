"""Groups, and policies, that go unused: a ResourceWarning, as Python's own for a file that nobody closed."""

import gc
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from support.oracle import needs_zbpipe
from support.pipelines import Pipeline
from torch import nn

import zbpipe
from zbpipe._stage import dropped  # what it asks before it says anything

pytestmark = [needs_zbpipe, pytest.mark.usefixtures("alone")]
LOST = "a parameter group was freed before its weight pass, and the gradient of"


def groups_of(stage=None):
    stage = stage or nn.Linear(4, 3)
    x = torch.randn(2, 4, requires_grad=True)
    return zbpipe.stage_backward_input([stage(x)], [torch.ones(2, 3)], [x], stage.parameters())[1]


def said(run):
    """The warnings of a run, and of a collection after it. Those that nobody can raise are errors in every test."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
        gc.collect()
    return [(str(one.message), one.filename) for one in caught if one.category is ResourceWarning]


def in_a_cycle():
    holder = [groups_of()]
    holder.append(holder)


def on_a_thread():
    thread = threading.Thread(target=groups_of)
    thread.start()
    thread.join()


@pytest.mark.parametrize("run", [groups_of, in_a_cycle, on_a_thread])
def test_a_group_without_its_weight_pass_is_said(run):
    ((words, _),) = said(run)
    assert words.startswith((f"{LOST} float32 [3, 4], float32 [3] is lost", f"{LOST} float32 [3], float32 [3, 4] is"))


def test_the_line_is_that_of_the_program():
    assert said(lambda: groups_of())[0][1] == __file__


def step_without_w():
    modules = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    line = Pipeline("ScheduleInterleavedZeroBubble", modules).start(nn.functional.mse_loss, 2)
    with zbpipe.patch():
        line.step(torch.randn(4, 4), torch.randn(4, 4))
        line.stages[1].backward_weight_one_chunk = lambda *args, **kwargs: None
        line.step(torch.randn(4, 4), torch.randn(4, 4))
        line.stages[1].backward_state.clear()


def test_the_parameters_of_a_stage_are_named():
    words = [text for text, _ in said(step_without_w)]
    assert len(words) == 2 and all("0.weight of stage 1" in text and "0.bias of stage 1" in text for text in words)


@pytest.mark.parametrize(("action", "asked"), [("ignore", 0), ("always", 1)])
def test_names_are_looked_for_only_where_they_are_shown(action, asked, monkeypatch):
    calls = []
    monkeypatch.setattr(dropped.fsdp, "served_by", lambda group: calls.append(1) or ())
    with warnings.catch_warnings(record=True):
        warnings.simplefilter(action, ResourceWarning)
        warnings.filterwarnings("error", "of another text", Warning)  # as torch and numpy have some
        groups_of()
    assert len(calls) == asked


def run_w(groups, **options):
    zbpipe.stage_backward_weight(None, groups, **options)


def unwinding():
    with pytest.raises(ZeroDivisionError):
        run_w([*groups_of(), 1 // 0])


def while_handled():
    try:
        raise KeyError
    except KeyError:
        groups_of()


def after_a_pass_that_raised():
    groups, spent = groups_of(), groups_of()
    run_w(spent)
    with pytest.raises(RuntimeError, match="is spent"):
        run_w(spent)
    del groups


QUIET = {
    "spent": lambda: run_w(groups_of()),
    "retained": lambda: run_w(groups_of(), retain_graph=True),
    "explained": lambda: zbpipe.explain(nn.Linear(4, 3), torch.randn(2, 4)),
    "no work": lambda: groups_of(nn.Linear(4, 3).requires_grad_(False)),
    "while an exception unwinds": unwinding,
    "while one is handled": while_handled,
    "after a pass that raised": after_a_pass_that_raised,
}


@pytest.mark.parametrize("run", QUIET.values(), ids=QUIET)
def test_nothing_is_said(run):
    assert said(run) == []


def test_a_group_that_is_made_after_a_failure_is_awaited_again():
    after_a_pass_that_raised()
    assert len(said(groups_of)) == 1


def in_a_process(code):
    preamble = (
        "import torch, zbpipe\nstage = torch.nn.Linear(4, 3)\n"
        "def i():\n    x = torch.randn(2, 4, requires_grad=True)\n"
        "    return zbpipe.stage_backward_input([stage(x)], [torch.ones(2, 3)], [x], stage.parameters())[1]\n"
    )
    command = [sys.executable, "-W", "default::ResourceWarning:__main__", "-c", preamble + code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def test_nothing_is_said_at_exit():
    assert in_a_process("groups, unused = i(), zbpipe.policy(defer='all')") == ""
    assert LOST in in_a_process("groups = i(); del groups")


def test_a_policy_on_a_line_of_its_own_is_said():
    ((words, file),) = said(lambda: zbpipe.policy(defer="all"))
    assert "zbpipe.policy(...) was called and not used" in words and file == __file__


def in_a_block():
    with zbpipe.policy(defer="all"):
        pass


@pytest.mark.parametrize(
    "use", [in_a_block, lambda: zbpipe.policy(defer="all")(in_a_block)], ids=["block", "decorator"]
)
def test_a_policy_that_is_used_is_not_said(use):
    assert said(use) == []
