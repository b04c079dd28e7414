"""The verdict on thousands of simulated places, leaks and none, which it sees at the looks of a run alone."""

import random

import pytest

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


def each(every, begin=0.0):
    def made(steps, chance):
        phase, many = chance.randrange(every), chance.randint(1, 4)
        first = max(int(begin * steps), 1)
        return [(step, None) for step in range(first, steps + 1) if (step - phase) % every == 0 for _ in range(many)]

    return made


def requests(steps, chance):
    """Of which some never complete."""
    share = chance.choice([0.1, 0.2, 0.3])
    return [
        (step, None if chance.random() < share else step + chance.randint(1, 5))
        for step in range(1, steps + 1)
        for _ in range(chance.randint(1, 4))
    ]


def queue(steps, chance, most=None, per=None):
    """What each step adds at the end; the oldest go while there are more than ``most``, or one fewer than came."""
    per = per or chance.choice([(1, 1), (1, 4), (0, 3), (2, 2)])
    counts = [chance.randint(*per) for _ in range(steps)]
    full = sum(counts[: int(most(chance) * steps)]) if most else 0
    items, alive = [], []
    for step, count in enumerate(counts, 1):
        new = [[step, None] for _ in range(count)]
        items += new
        alive += new
        for item in alive[: max(len(alive) - full, 0) if most else count - 1]:
            item[1] = step
        alive = [item for item in alive if item[1] is None]
    return [(born, end) for born, end in items if end != born]


def filled_faster(steps, chance):
    return queue(steps, chance, per=(chance.randint(2, 4),) * 2)


def first_in_first_out(steps, chance):
    return queue(steps, chance, most=lambda chance: chance.uniform(0.3, 0.9))


def sawtooth(steps, chance, longest=0.5, shortest=2):
    period = chance.randint(max(shortest, 2), int(longest * steps))
    phase, per = chance.randrange(period), chance.choice([(1, 1), (1, 4), (0, 3)])
    ends = {step: step + period - (step + phase) % period for step in range(1, steps + 1)}
    return [(step, end if end <= steps else None) for step, end in ends.items() for _ in range(chance.randint(*per))]


def long_sawtooth(steps, chance):
    return sawtooth(steps, chance, 0.9, steps // 2 + 1)


def warm_up(steps, chance):
    last, per = int(chance.choice([0.1, 0.3, 0.6]) * steps), chance.choice([(1, 1), (1, 4)])
    return [(step, None) for step in range(1, last + 1) for _ in range(chance.randint(*per))]


def any_replaced(steps, chance):
    full, items = max(2, int(chance.uniform(0.1, 0.5) * steps)), []
    for step in range(1, steps + 1):
        items.append([step, None])
        alive = [item for item in items if item[1] is None]
        if len(alive) > full:
            chance.choice(alive[:-1])[1] = step
    return [tuple(item) for item in items]


def told(made, steps):
    count = 0
    for seed in SEEDS:
        chance = random.Random(seed)
        items, noise = made(steps, chance), chance.choice([0, 5])
        count += leaks(items, steps, [chance.randint(0, noise) for _ in range(steps)])
    return count / len(SEEDS)


LEAKS = {
    "in each step": each(1),
    "in each third": each(3),
    "in each fifth": each(5),
    "from half of the run on": each(1, 0.5),
    "in each third, from half of the run on": each(3, 0.5),
    "from 80 % of the run on": each(1, 0.8),
    "a queue that is filled faster than it is emptied": filled_faster,
}
CLEAN = {"first in, first out": first_in_first_out, "sawtooth": sawtooth, "warm-up": warm_up}


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
