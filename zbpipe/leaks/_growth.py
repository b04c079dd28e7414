"""Growth from step to step: what lives after each, and who holds what came on top.

The memory of torch's CPU allocator is counted block by block, whether a tensor is visible or not. Of other memory
(CUDA's, numpy's, another process's, that of ``copy.deepcopy`` and ``torch.load``) the storages of visible tensors are
counted. A look finds them: after each of the first steps, then whenever the number of steps has grown by half. Once
CUDA is in use, or such memory lives on, every step has one, as long as that is cheap. Autograd's nodes are counted at
the looks.

What grows. What hangs at one place of the program is one group. ``_verdict.py`` says of each group whether it leaks,
from the births and ends of its items. Of a group that no search has found before nobody knows what has gone: as old as
anything that went elsewhere since the last search it may become. If such groups do not explain the rise of tensors and
bytes, the groups are what became more or larger after the middle, and was made anew. What optimizers keep for their
parameters, and what collections with a maximum length hold, has a bound: a window that is not full yet.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import ExitStack
from itertools import accumulate, groupby, pairwise
from time import perf_counter

import torch

from zbpipe import _C
from zbpipe._formatting import table
from zbpipe._torch import allocator
from zbpipe.leaks._alike import Key, likeness, numbered_spans
from zbpipe.leaks._collector import collector
from zbpipe.leaks._grown import ANEW, Group, Grown, groups_of, grown_of, lines_of
from zbpipe.leaks._judge import living, windows_of
from zbpipe.leaks._results import Cycle
from zbpipe.leaks._search import Found, Scope, natives_now, others_of, search
from zbpipe.leaks._verdict import FEWEST, SLACK, Verdict, births_tell, enough, rises, verdict

_LONG_TABLE = 20  # rows; longer ones are folded
_ACCUMULATES = 2**64 - 1  # the sequence number of a node that accumulates a gradient: no step makes it anew
_BOUNDED = ("",)  # for the chains to what has a bound
PASSING = "the oldest of which go"
_COST = 5.0  # seconds, or a tenth of the time, for looks at other memory after each step
_MANY = 500_000  # objects: a search of more takes seconds
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
        search_from: the step from which on a search pays: ever fewer are made, and fewer still where they take seconds.
        filling: what grew at the last :meth:`grown`, but has a bound.
        cycles: a :class:`Cycle` for each reference cycle that holds what the last :meth:`grown` found.

    Raises:
        RuntimeError: the CPU allocator cannot be watched (``csrc/instruments/shim/zbp_tap.h``).

    Source:
        ``objgraph.show_growth``, for storages.
    """

    def __init__(self) -> None:
        with ExitStack() as begun:  # what is begun ends where a later step fails
            recorder = _C.Recorder(0)
            recorder.start()
            begun.callback(recorder.stop)
            begun.enter_context(collector)
            self._since = _C.next_serial()
            self._counts_others = allocator.is_in_use()
            natives = natives_now()
            self._older: object = _C.watch_storages([*natives["storage"]])
            self._newest_before = max(_sequences(natives["node"]), default=0)
            self._last: object = None  # storages that others' identities must not be given to
            self._optimizers = weakref.WeakSet(living(torch.optim.Optimizer))
            self._end = weakref.finalize(self, begun.pop_all().close)
        # What lived after the last step: its step of birth and its bytes, by a block's serial or a storage's negative.
        self._living: dict[int, tuple[int, int]] = {}
        self._sizes: list[tuple[int, Counter[int]]] = []  # how many of each size, at each look
        self._newest_nodes = [-1, -1]  # by their sequence numbers, at the look before the last one and at that
        self.counts: list[int] = []
        self.bytes: list[int] = []
        self.nodes: list[int] = []
        self.looked_at = self.search_from = 0
        self.filling: list[Grown] = []
        self.cycles: list[Cycle] = []
        self._placed: dict[int, Key] = {}  # the chains to what searches have found and what lives
        self._gone: list[tuple[Key, int, int]] = []  # and of what lives no more: its birth and its end
        self._searches_often = True
        self._began, self._looking = perf_counter(), 0.0  # seconds: when this began, and how long its looks took
        self._oldest = 0  # steps: how old anything became that no search has found, since the last one
        self._first: dict[Key, tuple[int, int]] = {}  # the first search that found such a chain, and the oldest then

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
        begin = perf_counter()
        is_cheap = self._looking < max(_COST, (begin - self._began) / 10)
        natives = natives_now() if is_look or (self._counts_others and is_cheap) else {}
        self._looking += perf_counter() - begin
        living = {serial: size for _, size, serial, _ in _C.live_blocks(self._since)}
        if natives:
            others = others_of(natives["storage"], self._older)
            self._counts_others = self._counts_others or bool(others)
            living.update((-storage, size) for storage, size in others.items())
            self._last = _C.watch_storages([*natives["storage"]])  # their identities are nobody else's until the next
        elif self._counts_others:
            living.update((key, size) for key, (_, size) in self._living.items() if key < 0)
        for key, (born, _) in self._living.items():
            if key not in living and key in self._placed:
                self._gone.append((self._placed.pop(key), born, number))
            elif key not in living:
                self._oldest = max(self._oldest, number - born)
        self._living = {key: self._living.get(key, (number, size)) for key, size in living.items()}
        self.counts.append(len(living))
        self.bytes.append(sum(living.values()))
        self.nodes.append(0 if is_look else self.nodes[-1])
        if is_look:
            sequences = _sequences(natives["node"])
            self.nodes[-1] = sum(sequence <= self._newest_nodes[1] for sequence in sequences)
            self._newest_nodes = [self._newest_nodes[1], max(sequences, default=0)]
            self.looked_at = number
            self._sizes.append((number, Counter(living.values())))

    def rising(self) -> list[str]:
        """Which of "counts", "bytes" and "nodes" still rise."""
        nodes = [self.nodes[step - 1] for step, _ in self._sizes]
        numbers = {"counts": self.counts, "bytes": self.bytes}
        found = [name for name, values in numbers.items() if rises(values) >= enough(len(values))]
        return [*found, "nodes"] if rises(nodes, is_strict=True) >= enough(len(nodes)) else found

    def grown(self) -> list[Grown]:
        """What grows: a :class:`Grown` for each place, the most bytes first.

        Raises:
            RuntimeError: after :meth:`close`.
        """
        self._require_open("grown()")
        self.filling, self.cycles = [], []
        rising = self.rising()
        may_leak = births_tell((born for born, _ in self._living.values()), len(self.counts))
        found = self._of_memory(rising) if may_leak or {"counts", "bytes"} & {*rising} else []
        graph = _largest_graph(self._newest_before, self._newest_nodes[0]) if "nodes" in rising else None
        # Of many tensors' graphs the tensors have become more.
        if graph is not None and (not found or graph.nodes >= self.nodes[-1] - self.nodes[len(self.nodes) // 2 - 1]):
            marked = {line for group in (*found, *self.filling) for line in group.held_by if line.startswith(">>")}
            if not marked & {*graph.held_by} and not any(group.add_graph(graph) for group in found):
                found.append(graph)
        return found

    def _of_memory(self, rising: list[str]) -> list[Grown]:
        windows = _C.storages_of(windows_of(self._optimizers))
        serials = {address: serial for address, _, serial, _ in _C.live_blocks(self._since)}
        result = search(Scope(since=self._since, older=self._older if self._counts_others else None))
        bounded, others = list[Found](), list[Found]()
        for entry in result.found:
            key = serials.get(entry.address, -entry.leak.storage)
            entry.key, (entry.born, entry.size) = key, self._living.get(key, (0, 0))
            if entry.born:
                (bounded if entry.leak.storage in windows else others).append(entry)
        told, passing, anew, grown = list[Group](), list[Group](), list[Group](), list[Grown]()
        for group in groups_of(others):
            judged = self._verdict(group.place, [entry.born for entry in group.found])
            (told if judged.leaks or judged.passes else anew).append(group)
            if counted := [entry for entry in group.found if 1 < entry.born <= judged.until]:
                group = group._replace(found=counted)
            passing += [group] if judged.passes else []
            grown += [grown_of(group, "" if judged.lost else None)] if judged.leaks else []
        now = len(self.counts)
        self._searches_often = self._searches_often and result.visited < _MANY
        self.search_from = now * 3 // (2 if self._searches_often else 1)
        filling = [one for one in groups_of(bounded) if verdict([entry.born for entry in one.found], (), now).leaks]
        chains, known = dict[Key, Key](), dict[int, str]()
        for entry in others:
            chain = likeness(entry.leak.chain, known)
            self._placed[entry.key] = chains.setdefault(chain, chain)
            self._first.setdefault(chain, (now, self._oldest))
        self._placed.update((entry.key, _BOUNDED) for entry in bounded)
        self._oldest = 0
        if {"counts", "bytes"} & {*rising}:
            self.filling = [grown_of(group, "") for group in filling] + [grown_of(group, PASSING) for group in passing]
            self.filling.sort(key=lambda group: -group.bytes)
        if rest := self._rising_beside([*filling, *told], rising):
            sizes = Counter(entry.size for entry in (*bounded, *others))
            grown += self._made_anew(anew, sizes, "counts" not in rest) or [Grown(known=", ".join(rest.values()))]
        if any(entry.rank == "cycle" or entry.excused for entry in result.found):
            self.cycles = result.cycles
        return sorted(grown, key=lambda group: (group.is_of_library, -group.bytes))

    def _verdict(self, place: Key, born: list[int]) -> Verdict:
        now = len(self.counts)
        depth = max(len(place), 1)
        gone = [(begin, end) for chain, begin, end in self._gone if chain[:depth] == place]
        known = [first for chain, first in self._first.items() if chain[:depth] == place]
        since, oldest = min(known, default=(now, self._oldest))
        is_young = now - since < SLACK * oldest  # what has gone before the place was known may have been of it
        if is_young and not (rises(self.counts) or rises(self.bytes)):
            gone.append((1, 1 + oldest))
        return verdict(born, gone, now, self._searches_often)

    def verdict_now(self, grown: Grown) -> Verdict:
        """Of what the last :meth:`grown` told, by what has gone since; what was born since may be of it."""
        born = [step for key, (step, _) in self._living.items() if key in grown.keys or key not in self._placed]
        return self._verdict(grown.place, born)

    def since_the_search(self) -> int:
        """How many have been made since, and may stay; what the last step made does not count."""
        now = len(self.counts)
        return sum(key not in self._placed and step < now for key, (step, _) in self._living.items())

    def _rising_beside(self, groups: list[Group], rising: list[str]) -> dict[str, str]:
        """What rises beside these groups, and how much since the middle, in words: they have gained less than half of
        it, or what they do not have rises by itself. What the last step made may hang there only after the next."""
        now, found = len(self.counts), {}
        middle = now // 2
        entries = [entry for group in groups for entry in group.found]
        for name, unit, values in (("counts", "tensors", self.counts), ("bytes", "bytes", self.bytes)):
            born = Counter[int]()
            for entry in entries:
                born[entry.born] += 1 if name == "counts" else entry.size
            had = [*accumulate(born[step] for step in range(1, now + 1))]
            rose, gained = (numbers[-1] - numbers[middle - 1] for numbers in (values, had))
            rest = [value - part for value, part in zip(values, had, strict=True)][:-1]
            is_most = 2 * gained < rose
            if name in rising and (is_most or (gained < rose and rises(rest) >= enough(now))):
                found[name] = f"{rose - gained} more {unit} since step {middle}"
        return found

    def _made_anew(self, groups: list[Group], now: Counter[int], is_larger: bool) -> list[Grown]:
        """What has become more of its size since the middle, without what is less than a tenth of the largest."""
        middle = len(self.counts) // 2
        before = next((sizes for step, sizes in reversed(self._sizes) if step <= middle), Counter[int]())
        more = now - before
        grown = []
        for group in groups:
            risen = [entry for entry in group.found if entry.born > middle and more[entry.size]]
            grown += [grown_of(group._replace(found=risen), "" if is_larger else ANEW, is_larger)] if risen else []
        most = max((group.bytes for group in grown), default=0)
        return [group for group in grown if _LEAST * group.bytes > most]

    def table(self) -> str:
        """The counts after each step, and, until :meth:`close`, what grew and who holds it."""
        lines = lines_of(self.grown(), self.filling, self.cycles) if self._end.alive else []
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


def _sequences(nodes: list[_C.Handle]) -> list[int]:
    return [node.sequence or 0 for node in nodes if node.sequence != _ACCUMULATES]


def _largest_graph(before: int, newest: int) -> Grown | None:
    """Who holds the tensor with the most nodes below it that are not newer than ``newest`` and on no newer graph: of
    those newer than ``before``, or, where no graph has any (each thread counts its own), of all."""
    tensors = map(_C.handle_of, living(torch.Tensor))
    roots = [(node, tensor) for tensor in tensors for node in _nodes_of(tensor)]
    roots.sort(key=lambda root: -(root[0].sequence or 0))
    seen: set[_C.Handle] = set()
    most, largest = (-1, -1), None
    for root, tensor in roots:
        new, count, todo = 0, 0, [root]
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                count += (node.sequence or 0) <= newest
                new += before < (node.sequence or 0) <= newest
                todo += _nodes_of(node)
        most, largest = max((most, largest), ((new, count), tensor), key=lambda graph: graph[0])
    result = search(Scope(target=largest)).found if largest is not None else []
    return Grown([result[0].leak], nodes=most[1], mark=result[0].leak.place_of_blame) if result else None


def _nodes_of(handle: _C.Handle | None) -> list[_C.Handle]:
    """A tensor's node, or the nodes that follow a node."""
    held = [] if handle is None else _C.references_of(handle)
    return [one for one, label, _ in held if label == "grad_fn" or (label or "").startswith("next node")]
