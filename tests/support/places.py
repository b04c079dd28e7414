"""Places of a program by the births and ends of what they hold, drawn by chance: leaks, and what comes and goes.

A family makes, for a number of steps, a list of (step of birth, step after which it has gone or None).
"""


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
