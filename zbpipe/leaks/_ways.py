"""By which ways what was met is held: from the roots, from where nobody can look, by a cycle."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

from zbpipe import _C
from zbpipe._torch.autograd import FUNCTION_NODE
from zbpipe.leaks import _python
from zbpipe.leaks._heap import NOBODY, TYPE_FLAGS, Heap

HEAD, TAIL = 12, 6  # of a long chain so many places at its ends are shown
LEFT_OUT = -2  # stands for the middle
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Ways:
    """The rank of each place, and the shortest way to it within its rank.

    What the roots reach is of rank "root". Of the rest, what somebody holds of whom nothing is seen, and all behind it,
    is "hidden". What is left is garbage: "cycle" where a way leads from the most to blame of a cycle's members, "none"
    what nothing leads to.
    """

    def __init__(self, heap: Heap, target: Any) -> None:
        self.heap = heap
        self._parents = heap.parents
        self._depths: dict[int, tuple[int, int]] = {}  # of places on chains, and the last that is shown of the head
        count = len(heap.edges)
        self._parents[len(heap.things) - count :] = [NOBODY] * count
        self._ranks = ["none"] * count
        self._spread([i for i in range(count) if heap.is_held_unseen(heap.reached + i, target)], "hidden")
        self._cycles = _components(heap.edges, [rank == "none" for rank in self._ranks])
        self._spread(self._most_to_blame(), "cycle")

    def rank(self, place: int) -> str:
        return "root" if place < self.heap.reached else self._ranks[place - self.heap.reached]

    def chain(self, place: int) -> list[int]:
        """The places from the outermost holder to this one, LEFT_OUT for the middle of a long way."""
        depth, head = self._depth(place)
        if depth <= HEAD + TAIL:
            return self._way(place, depth + 1)
        return [*self._way(head, HEAD), LEFT_OUT, *self._way(place, TAIL)]

    def depth(self, place: int) -> int:
        return self._depth(place)[0]

    def cycle_number(self, place: int) -> int:
        """Of the cycle whose member a place is; -1 of none."""
        return self._cycles[place - self.heap.reached] if place >= self.heap.reached else NOBODY

    def cycle(self, place: int) -> list[int]:
        """A shortest way from a member of a cycle back to it: each holds the next, the last one the first."""
        start, edges, cycles = place - self.heap.reached, self.heap.edges, self._cycles
        before = {start: NOBODY}
        todo = deque([start])
        while todo:
            at = todo.popleft()
            for to in edges[at]:
                if to == start:
                    found = []
                    while at != NOBODY:
                        found.append(at + self.heap.reached)
                        at = before[at]
                    return found[::-1]
                if to not in before and cycles[to] == cycles[start]:
                    before[to] = at
                    todo.append(to)
        return [place]

    def _way(self, place: int, count: int) -> list[int]:
        found = [place]
        while len(found) < count:
            found.append(self._parents[found[-1]])
        return found[::-1]

    def _depth(self, place: int) -> tuple[int, int]:
        todo = []
        while place != NOBODY and place not in self._depths:
            todo.append(place)
            place = self._parents[place]
        depth, head = self._depths.get(place, (-1, place))
        for one in reversed(todo):
            depth += 1
            head = one if depth < HEAD else head
            self._depths[one] = depth, head
        return depth, head

    def _spread(self, begin: list[int], rank: str) -> None:
        """Breadth first, over what has no rank yet."""
        ranks, reached = self._ranks, self.heap.reached
        for i in begin:
            ranks[i] = rank
        for i in begin:  # which becomes longer meanwhile
            for to in self.heap.edges[i]:
                if ranks[to] == "none":
                    ranks[to] = rank
                    self._parents[to + reached] = i + reached
                    begin.append(to)

    def _most_to_blame(self) -> list[int]:
        things, reached = self.heap.things, self.heap.reached
        innocence = {i: _innocence(things[reached + i]) for i, number in enumerate(self._cycles) if number != NOBODY}
        least: dict[int, int] = {}
        for i, value in innocence.items():
            least[self._cycles[i]] = min(value, least.get(self._cycles[i], value))
        return [i for i, value in innocence.items() if value == least[self._cycles[i]]]


def is_part(thing: Any) -> bool:
    """Whether it says little without what it belongs to."""
    return any(type(thing) is part for part in (tuple, dict, types.CellType))


def _innocence(thing: Any) -> int:
    """How far a member of a cycle is from being what made it. The program's code and objects come first, then those of
    libraries, then what both are made of, then what autograd makes."""
    cls = type(thing)
    if cls is _C.Handle:
        of_function = thing.kind == "node" and issubclass(type(thing.object), FUNCTION_NODE)
        return 0 if of_function else 4 if thing.object is not None else 5
    if is_part(thing):
        return 3
    if cls is types.FunctionType or cls is types.FrameType:
        code = thing.__code__ if cls is types.FunctionType else thing.f_code
        return int(_python.library_path(code.co_filename) is not None)
    return int(_python.is_of_a_library(_python.module_of_class(cls))) if TYPE_FLAGS.__get__(cls) & _HEAP_TYPE else 2


def _components(edges: list[list[int]], is_open: list[bool]) -> list[int]:
    """The number of the cycle (strongly connected component with an edge within) of each vertex, -1 for none.

    H. N. Gabow, Path-based depth-first search for strong and biconnected components (2000): an edge back to a vertex of
    the path makes one component of all from there on. A component is whole when the search leaves its first vertex.
    """
    found = [NOBODY] * len(edges)
    order = [NOBODY if is_it else len(edges) for is_it in is_open]  # among members; past their end what is done with
    members, firsts = list[int](), list[int]()  # of components that are not whole yet
    for root in range(len(edges)):
        path = [(root, iter(edges[root]))] if order[root] == NOBODY else []
        while path:
            at, targets = path[-1]
            if order[at] == NOBODY:
                order[at] = len(members)
                members.append(at)
                firsts.append(at)
            for to in targets:
                if order[to] == NOBODY:
                    path.append((to, iter(edges[to])))
                    break
                while order[firsts[-1]] > order[to]:
                    firsts.pop()
            else:
                path.pop()
                if firsts[-1] == at:
                    firsts.pop()
                    whole = members[order[at] :]
                    del members[order[at] :]
                    for member in whole:
                        order[member] = len(edges)
                        found[member] = at if len(whole) > 1 or at in edges[at] else NOBODY
    return found
