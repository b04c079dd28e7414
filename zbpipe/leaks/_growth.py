"""Growth from step to step: what lives after each, and who holds what came on top.

The memory of torch's CPU allocator is counted block by block, whether a tensor is visible or not. Of other memory
(CUDA's, numpy's, another process's, that of ``copy.deepcopy`` and ``torch.load``) the storages of visible tensors are
counted. A look finds them: after each of the first steps, then whenever the number of steps has grown by half. Once
CUDA is in use, or such memory lives on, every step has a look for them. Autograd's nodes are counted at the same looks.

What grows. Tensors, bytes or nodes grow if they still rise over the second half of the steps (:func:`rises`). The third
quarter of the steps is compared with the second, and the fourth with the third. The later quarter has no value below
the median of the earlier one, and its lowest value or its median is higher. So one peak makes no difference, nor does
one jump, nor a list that is cleared. What begins to rise later may be a window: of the second half alone the same is
true, and it ends higher than it was in the first.

Who holds it. What hangs at one place of the program is one group:

- a group piles up if steps of both halves made parts of it. The first and the last step do not count: what the first
  step made stays, and what the last step made may go in the next one;
- if a search before has found the group, and something of its older half has gone since, it lets go: a window;
- if such groups do not explain the rise, the groups are what became more or larger after the middle, and was made anew;
  what became larger alone, in five steps or more, or in all;
- what optimizers keep for their parameters, and what collections with a maximum length hold, has a bound: a window that
  is not full yet.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby, pairwise

import torch

from zbpipe import _C
from zbpipe._formatting import table
from zbpipe._torch import allocator
from zbpipe.leaks._alike import numbered_spans
from zbpipe.leaks._collector import collector
from zbpipe.leaks._grown import ANEW, Group, Grown, collections_of, groups_of, grown_of, keys_of, lines_of
from zbpipe.leaks._judge import living, windows_of
from zbpipe.leaks._results import Cycle
from zbpipe.leaks._search import Found, Scope, natives_now, others_of, search, storages_now

_LONG_TABLE = 20  # rows; longer ones are folded
FEWEST = 4  # steps that tell: what the first and the last one leave may be gone after the next
_ACCUMULATES = 2**64 - 1  # the sequence number of a node that accumulates a gradient: no step makes it anew
PASSING = "the oldest of which go"
_FLAT = (
    8  # steps: their most tensors, beside those of as many before, tell whether a list that drops its oldest is full
)
_RISES = 5  # in the later half, of what is made anew and is larger than before
_LEAST = 10  # of what the last step made anew, what is less than a tenth of the largest is not told


class Growth:
    """Counts, after each step, the living storages that were allocated since this object was made, and their bytes.

    Call :meth:`step` after each step and :meth:`table` at the end. The garbage collector is off until :meth:`close`,
    the end of a ``with`` block, or the end of the object. The object keeps no storage alive.

    Attributes:
        counts: after each step, the number of living storages.
        bytes: after each step, their bytes.
        nodes: after each step, the number of autograd nodes that were alive at both of the last two looks.
        looked_at: the step of the last look.
        filling: what grew at the last :meth:`grown`, but has a bound.
        late: what began to grow in the second half of the steps: it may have one.
        cycles: a :class:`Cycle` for each reference cycle that holds what the last :meth:`grown` found.

    Raises:
        RuntimeError: the CPU allocator cannot be watched (``csrc/instruments/shim/zbp_tap.h``).

    Source:
        ``objgraph.show_growth``, for storages.
    """

    def __init__(self) -> None:
        recorder, begun = _C.Recorder(0), ExitStack()
        recorder.start()
        begun.callback(recorder.stop)
        begun.enter_context(collector)
        self._end = weakref.finalize(self, begun.close)
        self._since = _C.next_serial()
        # What lived after the last step: its step of birth and its bytes, by a block's serial or a storage's negative.
        self._living: dict[int, tuple[int, int]] = {}
        self._sizes: list[tuple[int, Counter[int]]] = []  # how many of each size, at each look
        self._newest_nodes = [-1, -1]  # by their sequence numbers, at the look before the last one and at that
        try:
            self._counts_others = allocator.is_in_use()
            self._older: object = storages_now()
            self._last: object = None  # storages that others' identities must not be given to
            self._optimizers = weakref.WeakSet(living(torch.optim.Optimizer))
        except BaseException:
            self._end()  # the error may keep this object
            raise
        self.counts: list[int] = []
        self.bytes: list[int] = []
        self.nodes: list[int] = []
        self.looked_at = 0
        self._middle = 0  # of the steps in which what the last grown() told rose
        self.filling: list[Grown] = []
        self.late: list[Grown] = []
        self.cycles: list[Cycle] = []
        self._seen: dict[tuple[str, ...], list[list[int]]] = {}  # what each search found in a collection

    def __enter__(self) -> Growth:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the counting. What was counted stays; who holds it can no longer be asked."""
        self._end()
        self._older = self._last = None

    def step(self) -> None:
        """Counts what lives. Call it at the end of each step.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        self._require_open("step()")
        number = len(self.counts) + 1
        is_look = number <= FEWEST or number >= 1.5 * self.looked_at
        self._counts_others = self._counts_others or allocator.is_in_use()
        natives = natives_now() if is_look or self._counts_others else {}
        living = {serial: size for _, size, serial in _C.live_blocks(self._since)}
        if natives:
            others = others_of(natives["storage"], self._older)
            self._counts_others = self._counts_others or bool(others)
            living.update((-storage, size) for storage, size in others.items())
            self._last = _C.watch_storages([*natives["storage"]])  # their identities are nobody else's until the next
        self._living = {key: self._living.get(key, (number, size)) for key, size in living.items()}
        self.counts.append(len(living))
        self.bytes.append(sum(living.values()))
        self.nodes.append(0 if is_look else self.nodes[-1])
        if is_look:
            sequences = [node.sequence or 0 for node in natives["node"] if node.sequence != _ACCUMULATES]
            self.nodes[-1] = sum(sequence <= self._newest_nodes[1] for sequence in sequences)
            self._newest_nodes = [self._newest_nodes[1], max(sequences, default=0)]
            self.looked_at = number
            self._sizes.append((number, Counter(living.values())))

    def rising(self, late: bool = True) -> list[str]:
        """Which of "counts", "bytes" and "nodes" still rise; where none do, those that have begun ``late`` to."""
        nodes = self.nodes[: self.looked_at]  # later ones are that look's
        numbers = {"counts": self.counts, "bytes": self.bytes, "nodes": nodes}
        found = [name for name, values in numbers.items() if rises(values)]
        return found or [name for name, values in numbers.items() if late and rises_late(values)]

    def grown(self) -> list[Grown]:
        """What still rises over the second half of the steps: a :class:`Grown` for each place, the most bytes first.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        self._require_open("grown()")
        self.filling, self.late, self.cycles = [], [], []
        rising = self.rising(late=False)
        if is_late := not rising:
            rising = self.rising()
        self._middle = len(self.counts) * (3 if is_late else 2) // 4
        found = self._of_memory(rising, is_late) if {"counts", "bytes"} & {*rising} else []
        graph = _largest_graph(self._newest_nodes[0]) if "nodes" in rising else None
        # Of many tensors' graphs the tensors have become more.
        if graph is not None and (not found or graph.nodes >= self.nodes[-1] - self.nodes[self._middle - 1]):
            marked = {line for group in (*found, *self.filling) for line in group.held_by if line.startswith(">>")}
            found += [] if marked & {*graph.held_by} else [graph]
        if is_late:
            self.late, found = found, []
        return found

    def _of_memory(self, rising: list[str], is_late: bool) -> list[Grown]:
        windows = _C.storages_of(windows_of(self._optimizers))
        serials = {address: serial for address, _, serial in _C.live_blocks(self._since)}
        result = search(Scope(since=self._since, older=self._older if self._counts_others else None))
        bounded, others = list[Found](), list[Found]()
        for entry in result.found:
            key = serials.get(entry.address, -entry.leak.storage)
            entry.key, (entry.born, entry.size) = key, self._living.get(key, (0, 0))
            if entry.born:
                (bounded if entry.leak.storage in windows else others).append(entry)
        filling, (piles, anew) = self._piled_up(groups_of(bounded))[0], self._piled_up(groups_of(others))
        passing, piles = self._passing(piles)
        self.filling = [grown_of(*group, "") for group in filling] + [grown_of(*group, PASSING) for group in passing]
        self.filling.sort(key=lambda group: -group.bytes)
        found = [grown_of(*group, "" if is_late else None) for group in piles]
        if not self._explain([*filling, *passing, *piles], rising) and (
            "counts" in rising or self._rises() >= min(_RISES, len(self.bytes) // 2 - 1)
        ):
            now = Counter(entry.size for entry in (*bounded, *others))
            found += self._made_anew(anew, now, "counts" not in rising)
            found = found or [Grown()]
        if any(entry.rank == "cycle" or entry.excused for entry in result.found):
            self.cycles = result.cycles
        return sorted(found, key=lambda group: (group.is_of_library, -group.bytes))

    def _piled_up(self, groups: list[Group]) -> tuple[list[Group], list[Group]]:
        """What both halves of the steps have made, without what the first and the last one made; and the others."""
        piles, others = list[Group](), list[Group]()
        for mark, found in groups:
            kept = [entry for entry in found if 1 < entry.born < len(self.counts)]
            halves = {entry.born <= self._middle for entry in kept}
            (piles if len(halves) > 1 else others).append((mark, kept if len(halves) > 1 else found))
        return piles, others

    def _passing(self, piles: list[Group]) -> tuple[list[Group], list[Group]]:
        """What collections have that drop their oldest items, while of a pile at most young ones go; and the others.
        Remembers what each collection has now."""
        passing, others = list[Group](), list[Group]()
        for mark, found in piles:
            gone, kept = list[Found](), list[Found]()
            for place, entries in collections_of(found).items():
                seen = self._seen.setdefault(place, [])
                (gone if any(map(self._have_gone, seen)) else kept).extend(entries)
                seen.append(keys_of(entries))
            passing += [(mark, gone)] if gone else []
            others += [(mark, kept)] if kept else []
        return passing, others

    def has_gone(self, grown: Grown) -> bool:
        """Whether by the last step each of its collections has dropped something of the older half of its items."""
        return bool(grown.keys) and all(map(self._have_gone, grown.keys))

    def _have_gone(self, keys: list[int]) -> bool:
        """Not if the last steps have added to what lives: a queue that is filled faster than it is emptied goes on."""
        few = min(_FLAT, len(self.counts) // 4)
        is_full = max(self.counts[-few:]) <= max(self.counts[-2 * few : -few], default=0)
        return is_full and not {*keys[: (len(keys) + 1) // 2]} <= self._living.keys()

    def _rises(self) -> int:
        """In how many steps of the later half the bytes rose."""
        later = self.bytes[len(self.bytes) // 2 - 1 :]
        return sum(after > before for before, after in pairwise(later))

    def _explain(self, groups: list[Group], rising: list[str]) -> bool:
        """Whether what they have gained since the middle is at least half of what rose."""
        gained = [entry.size for _, found in groups for entry in found if entry.born > self._middle]
        tensors, size = (now[-1] - now[self._middle - 1] for now in (self.counts, self.bytes))
        if "counts" in rising and 2 * len(gained) < tensors:
            return False
        return "bytes" not in rising or 2 * sum(gained) >= size

    def _made_anew(self, groups: list[Group], now: Counter[int], is_larger: bool) -> list[Grown]:
        """What has become more of its size since the middle, without what is less than a tenth of the largest."""
        before = next((sizes for step, sizes in reversed(self._sizes) if step <= self._middle), Counter[int]())
        more = now - before
        grown = []
        for mark, found in groups:
            risen = [entry for entry in found if entry.born > self._middle and more[entry.size]]
            grown += [grown_of(mark, risen, "" if is_larger else ANEW, is_larger)] if risen else []
        most = max((group.bytes for group in grown), default=0)
        return [group for group in grown if _LEAST * group.bytes > most]

    def table(self) -> str:
        """The counts after each step, and, until :meth:`close`, what grew and who holds it."""
        lines = lines_of(self.grown(), self.filling + self.late, self.cycles) if self._end.alive else []
        return "\n".join([self.counts_table(), *([""] if lines else []), *lines])

    def counts_table(self) -> str:
        """The counts after each step; of many steps those that add the same as the one before in one line."""
        now = [*zip(self.counts, self.bytes, strict=True)]
        added = [["", ""], *([f"{b - a:+d}" for a, b in zip(*two, strict=True)] for two in pairwise(now))]
        key = added.__getitem__ if len(now) > _LONG_TABLE else None
        rows = []
        for _, group in groupby(range(len(now)), key):
            steps = [*group]
            rows.append([numbered_spans([at + 1 for at in steps]), *map(str, now[steps[-1]]), *added[steps[-1]]])
        if len(rows) > 2 * _LONG_TABLE:
            rows[_LONG_TABLE:-_LONG_TABLE] = [[f"... {len(rows) - 2 * _LONG_TABLE} rows ...", "", "", "", ""]]
        said = table(["step", "live tensors", "live bytes", "tensors", "bytes"], rows)
        if "nodes" not in (rising := self.rising()) or "counts" in rising:
            return said
        counted = [(step, count) for step, count in enumerate(self.nodes, 1) if count != self.nodes[step - 2]]
        return f"{said}\nautograd nodes: {', '.join(f'{count} after step {step}' for step, count in counted[-5:])}"

    def _require_open(self, what: str) -> None:
        if not self._end.alive:
            raise RuntimeError(f"{what} was called after close(); make another Growth")


def rises(values: Sequence[int]) -> bool:
    """Whether they still rise over their second half; see this module's head."""
    count = len(values)
    quarters = [values[i * count // 4 : (i + 1) * count // 4] for i in (1, 2, 3)]
    if count < FEWEST:
        return False
    for before, after in pairwise([sorted(quarter) for quarter in quarters]):
        lowest, middle = (before[0], after[0]), (before[len(before) // 2], after[len(after) // 2])
        if lowest[1] < middle[0] or (lowest[1] <= lowest[0] and middle[1] <= middle[0]):
            return False
    return len(after) < 3 or after[-1] > after[0]  # a window that became full rises no more


def rises_late(values: Sequence[int]) -> bool:
    """Whether they rise over the second half of their second half, to what they have never been in the first."""
    half = len(values) // 2
    return half >= 2 * FEWEST and rises(values[half:]) and min(values[-len(values) // 8 :]) > max(values[:half])


def _largest_graph(newest: int) -> Grown | None:
    """Who holds the tensor with the most nodes below it that are not newer than ``newest`` and on no newer graph."""
    tensors = [_C.handle_of(thing) for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    roots = [(node, tensor) for tensor in tensors for node in _nodes_of(tensor)]
    roots.sort(key=lambda root: -(root[0].sequence or 0))
    seen: set[_C.Handle] = set()
    most, largest = -1, None
    for root, tensor in roots:
        count, todo = 0, [root]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                count += (node.sequence or 0) <= newest
                todo += _nodes_of(node)
        most, largest = max((most, largest), (count, tensor), key=lambda graph: graph[0])
    result = search(Scope(target=largest)).found if largest is not None else []
    return Grown([result[0].leak], nodes=most, mark=result[0].leak.place_of_blame) if result else None


def _nodes_of(handle: _C.Handle | None) -> list[_C.Handle]:
    """A tensor's node, or the nodes that follow a node."""
    held = [] if handle is None else _C.references_of(handle)
    return [one for one, label, _ in held if label == "grad_fn" or (label or "").startswith("next node")]
