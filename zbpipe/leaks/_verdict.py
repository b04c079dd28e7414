"""What of a place's items leaks, from the steps of their births and ends alone.

An *item* is a storage. It is *stuck* when it is half as old again as any item of its place has become that has gone: in
a window, a queue or a cache that is cleared nothing ever is. A place leaks

- if stuck items were born in three steps or more (of seven or fewer: in two), without the first and the last step:
  what the first step made stays, and what the last one made may go in the next;
- and if it goes on: since the last such birth no more steps have passed than half as many again as ever before;
- or if ever more items are there, though the oldest go: a queue that is filled faster than it is emptied.

What each step makes anew is judged by its numbers (:func:`rises`): it leaks if they reach a new height, from which they
come down no more, in five steps of the later half.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

FEWEST = 4  # steps that tell: what the first and the last one leave may be gone after the next
_BIRTHS = 3
_RISES = 5
SLACK = 1.5


@dataclass(frozen=True)
class Verdict:
    """``until``: the last step of birth of what leaks. ``passes``: what lives would leak, had nothing gone. ``lost``:
    something of its place has gone."""

    leaks: bool = False
    passes: bool = False
    until: int = 0
    lost: bool = False


def verdict(born: Sequence[int], gone: Sequence[tuple[int, int]], last: int, is_all: bool = True) -> Verdict:
    """Of one place after ``last`` steps.

    Args:
        born: the step of birth of each item that lives.
        gone: of each that is known to have gone, the step of its birth, and the first one after which it had gone.
        is_all: whether searches were so many that most of what has gone is known.
    """
    counted = [step for step in born if 1 < step < last]
    if not _go_on(counted, last - 1, last):
        return Verdict()
    longest = max((end - begin for begin, end in gone), default=0)
    until = min(last - math.ceil(SLACK * longest), last - 1)
    if _go_on([step for step in counted if step <= until], until, last):
        return Verdict(leaks=True, until=until, lost=bool(gone))
    lives = [0] * (last + 2)
    for begin, end in [*((step, last + 1) for step in born), *gone]:
        lives[begin] += 1
        lives[end] -= 1
    heights = [*accumulate(lives)][1:last]
    ends = sorted({end for _, end in gone if is_all and last // 2 < end < last})
    is_filled = len(ends) >= _BIRTHS and heights[-1] > max(heights[: ends[_BIRTHS - 1] - 1])
    is_filled = is_filled and rises(heights, is_strict=True) >= enough(last)
    return Verdict(leaks=is_filled, passes=not is_filled, until=last - 1, lost=True)


def births_tell(born: Iterable[int], last: int) -> bool:
    """Whether enough steps have left something, without the first and the last one."""
    return len({step for step in born if 1 < step < last}) >= _least_births(last)


def _go_on(born: list[int], now: int, last: int) -> bool:
    steps = sorted({*born})
    if len(steps) < _least_births(last):
        return False
    longest = max((after - before for before, after in pairwise(steps)), default=1)
    return now - steps[-1] < SLACK * longest


def _least_births(last: int) -> int:
    return min(_BIRTHS, max(2, last // 2 - 1))


def enough(count: int) -> int:
    """How many rises tell of so many steps."""
    return max(min(_RISES, count // 2 - 1), 1)


def rises(values: Sequence[float], is_strict: bool = False) -> int:
    """In how many steps of the later half they came to a new height; 0 if that is over. A height lasts for an eighth of
    the steps: no peak is one."""
    count = len(values)
    if count < FEWEST:
        return 0
    lows, ever_after = _lows(values, max(count // 8, 1)), [*accumulate(reversed(values), min)][::-1]
    most, of_the_first_half, steps = lows[0], max(lows[: count // 2]), [0]
    for at, low in enumerate(lows):
        if most < low <= ever_after[at]:
            most = low
            steps.append(at)
    later = [at for at in steps if at >= count // 2 and lows[at] > of_the_first_half]
    longest = max((after - before for before, after in pairwise(steps) if after >= count // 2), default=0)
    since = next((ago for ago in range(count - 1) if values[-2 - ago] < ever_after[-1 - ago]), count - 1)
    if later and not is_strict:
        since = max(since, count - 1 - later[-1])
    return len(later) if since < (longest if is_strict else SLACK * longest + 1) else 0


def _lows(values: Sequence[float], span: int) -> list[float]:
    """The least of as many values up to each."""
    found, least = list[float](), deque[int]()  # places of what may yet be the least, rising
    for at, value in enumerate(values):
        while least and values[least[-1]] >= value:
            least.pop()
        least.append(at)
        if least[0] <= at - span:
            least.popleft()
        found.append(values[least[0]])
    return found
