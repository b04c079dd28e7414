"""The verdict on thousands of simulated places, leaks and none, which it sees at the looks of a run alone."""

import random

import pytest
from support.places import CLEAN, LEAKS, any_replaced, each, long_sawtooth, requests

from zbpipe.leaks._verdict import births_tell, enough, rises, verdict  # runs of seconds each, by the thousand

SEEDS = range(200)


def looks(steps):
    """The steps after which Growth looks, as of ``zbpipe leaks --steps``."""
    found = [4]
    for step in range(5, steps):
        found += [step] if step >= 1.5 * found[-1] else []
    return [*found, steps]


def leaks(items, steps, beside):
    """Whether items (birth, end or None) of one place are said to leak, with so many other tensors after each step."""
    seen, says = set(), None
    total = [beside[step - 1] + sum(lives(item, step) for item in items) for step in range(1, steps + 1)]
    for look in looks(steps):
        alive = {at for at, item in enumerate(items) if lives(item, look)}
        born = [items[at][0] for at in alive]
        gone = {at for at, (_, end) in enumerate(items) if end is not None and end <= look}
        # Of a place that is found for the first time, all that went before may have been.
        known = gone & seen if seen or rises(total[:look]) else gone
        says = verdict(born, [items[at] for at in known], look) if births_tell(born, look) else None
        seen |= alive if says else set()
    return bool(says and says.leaks)


def lives(item, step):
    born, end = item
    return born <= step and (end is None or step < end)


def told(made, steps):
    count = 0
    for seed in SEEDS:
        chance = random.Random(seed)
        items, noise = made(steps, chance), chance.choice([0, 5])
        count += leaks(items, steps, [chance.randint(0, noise) for _ in range(steps)])
    return count / len(SEEDS)


@pytest.mark.parametrize("steps", [20, 60])
@pytest.mark.parametrize("name", LEAKS)
def test_each_leak_is_told(name, steps):
    assert told(LEAKS[name], steps) == 1


@pytest.mark.parametrize("steps", [20, 60])
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_else_is(name, steps):
    assert told(CLEAN[name], steps) == 0


def test_over_sixty_steps_rare_leaks_are_told():
    assert told(each(10), 60) == 1
    assert told(requests, 60) >= 0.95


def test_what_no_rule_can_tell_from_a_leak_has_the_rates_of_the_docs():
    rates = {made: [round(100 * told(made, steps)) for steps in (20, 60)] for made in (long_sawtooth, any_replaced)}
    assert rates == {long_sawtooth: [10, 13], any_replaced: [0, 0]}


# ---- what each step makes anew, by its sizes


def sizes(grows, steps, chance, beside):
    size, found = 8, []
    for step in range(1, steps + 1):
        size = grows(size, step, steps, chance)
        found.append(size + chance.randint(0, beside))
    return found


ANEW = {
    "a row longer each step": lambda size, step, steps, chance: size + 4,
    "some rows longer each step": lambda size, step, steps, chance: size + chance.randint(4, 16),
    "longer from half of the run on": lambda size, step, steps, chance: size + 4 * (2 * step >= steps),
}
STEADY = {
    "as long as the longest so far": lambda size, step, steps, chance: max(size, 8 * chance.randint(1, 100)),
    "of any length": lambda size, step, steps, chance: 8 * chance.randint(1, 100),
    "longer until 60 % of the run": lambda size, step, steps, chance: size + 4 * (step <= 0.6 * steps),
}


def told_anew(grows, steps, beside):
    runs = [sizes(grows, steps, random.Random(seed), beside) for seed in SEEDS]
    return sum(rises(run) >= enough(steps) for run in runs) / len(SEEDS)


@pytest.mark.parametrize("steps", [20, 60])
@pytest.mark.parametrize("name", [*ANEW, *STEADY])
def test_what_is_made_anew(name, steps):
    assert told_anew({**ANEW, **STEADY}[name], steps, beside=0) == (name in ANEW)


@pytest.mark.parametrize("steps", [20, 60])
def test_beside_what_varies_by_chance(steps):
    assert {told_anew(grows, steps, beside=2) for grows in ANEW.values()} == {1}
    assert max(told_anew(grows, steps, beside=2) for grows in STEADY.values()) < 0.05
