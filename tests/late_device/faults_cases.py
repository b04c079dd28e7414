"""Faults that are planted: what zbpipe waits for left out, memory given away early. Each must show."""

import pytest
from support import late, late_runs
from support.late_runs import Run, differences, results_of
from support.late_stages import STAGES

import zbpipe

pytestmark = pytest.mark.usefixtures("plants")


class Faulty(Run):
    """Of a pass all waits of one kind are left out."""

    of_pass, kind = "input", late.JOINS

    def input(self, k):
        with late.without_waits(self.kind, late.ALL if self.of_pass == "input" else late.NONE):
            super().input(k)

    def weight(self, k, groups=None):
        with late.without_waits(self.kind, late.ALL if self.of_pass == "weight" else late.NONE):
            super().weight(k, groups)


def shows(scenario, make, run_of, expected):
    """By what the fault shows: wrong values in an order of the device's, or a race."""
    signs = set()
    for order in ("lazy", "others_first"):
        late.begin(order)
        run = run_of("late", make)
        scenario(run)
        wrong = differences(run.results(), expected)
        signs |= ({f"wrong values, {order}"} if wrong else set()) | ({"race"} if late.races() else set())
    return signs


# Where the engine joins the streams.
THROUGH_THE_ENGINE = ["weight root", "branches", "tied", "batched", "handed over", "handed over, computed"]

WAITS = [
    pytest.param("weight", wait, scenario, name, id=f"W's {kind}, {scenario.__name__}, {name}")
    for kind, wait in (("follow", late.FOLLOWS), ("join", late.JOINS))
    for scenario in (late_runs.scaled_between, late_runs.caller_trains_on_its_own_stream)
    for name in STAGES
    if wait == late.FOLLOWS or name not in THROUGH_THE_ENGINE
]
WAITS.append(pytest.param("weight", late.JOINS, late_runs.a_root_alone, "weight root", id="W's, of a weight root"))


@pytest.mark.parametrize(("of_pass", "wait", "scenario", "name"), WAITS)
def test_a_wait_left_out_shows(of_pass, wait, scenario, name):
    faulty = type("Kind", (Faulty,), {"of_pass": of_pass, "kind": wait})
    with zbpipe.policy(checkpoint="keep"):  # what is computed again goes through the engine
        signs = shows(scenario, STAGES[name], faulty, results_of(scenario, "cpu", STAGES[name]))
    assert "race" in signs
    assert len(signs) > 1 or name == "branches", signs


def test_memory_that_no_stream_is_told_of_shows():
    """As if nobody said that a root's gradient is used on another stream than the one it was made on."""

    class Untold(Run):
        def weight(self, k, groups=None):
            late.library.late_drop_records(late.ALL if self.is_late else late.NONE)
            super().weight(k, groups)
            late.library.late_drop_records(late.NONE)

    expected = results_of(late_runs.a_root_alone, "cpu", STAGES["weight root"])
    signs = shows(late_runs.a_root_alone, STAGES["weight root"], Untold, expected)
    assert len(signs) > 1, signs


@pytest.mark.parametrize("name", ["mlp", "normed", "tied", "batched", "checkpointed"])
def test_memory_given_away_early_shows(name):
    """What a group holds for W is given away between the passes."""

    def scenario(run):
        run.forward(0)
        run.input(0)
        if run.is_late:
            late.give_away(run.inputs[0])
        run.weight(0)

    expected = results_of(scenario, "cpu", STAGES[name])
    signs = shows(scenario, STAGES[name], Run, expected)
    assert {"wrong values, lazy", "wrong values, others_first"} <= signs or name == "checkpointed", signs


@pytest.mark.parametrize("name", ["mlp", "tied", "batched", "weight root"])
def test_wrong_values_are_always_a_race_too(name):
    """Each single wait left out in turn, in every scenario: what gives wrong values in some order is told whatever the order."""
    shown = 0
    for scenario in late_runs.SCENARIOS:
        expected = results_of(scenario, "cpu", STAGES[name])
        late.begin()
        results_of(scenario, "late", STAGES[name])
        for n in range(late.library.late_waits()):
            signs = set()
            for order in ("lazy", "others_first"):
                late.begin(order)
                with late.without_waits(late.EITHER, n):
                    got = results_of(scenario, "late", STAGES[name])
                late.finish()
                signs |= {"wrong"} if differences(got, expected) else set()
                signs |= {"race"} if late.races() else set()
            assert signs != {"wrong"}, (scenario.__name__, n)
            shown += "wrong" in signs
    assert shown > 1
