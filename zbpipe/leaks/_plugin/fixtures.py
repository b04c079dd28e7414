"""What fixtures of a wider scope than a test own."""

import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

from zbpipe import _C
from zbpipe.leaks._report import Report
from zbpipe.leaks._results import COLLECTED, Leak
from zbpipe.leaks._search import storages_now


class Wide:
    """Fixtures of a wider scope than a test."""

    def __init__(self) -> None:
        self.definitions: weakref.WeakSet[Any] = weakref.WeakSet()

    def values(self) -> Iterator[Any]:
        for definition in list(self.definitions):
            cached = definition.cached_result
            if cached is not None and cached[2] is None:
                yield cached[0]


class OfFixtures:
    """What fixtures of a wider scope made while one test was watched: no leaks of that test.

    A storage is known by its identity, which a weak reference keeps from being given to another one. A block of CPU
    memory that no tensor in sight explains is known by its serial, which none gets twice.
    """

    def __init__(self) -> None:
        self._storages: set[int] = set()
        self._references: list[object] = []
        self._serials: list[range] = []
        self._unexplained: Counter[tuple[str, int]] = Counter()  # blocks by device and bytes

    def add(self, report: Report, since: int) -> None:
        """A fixture was set up, from the block with that serial on, and this was left."""
        self._references.append(storages_now())
        self._storages |= {leak.storage for leak in report.leaks if leak.storage}
        self._serials.append(range(since, _C.next_serial()))
        # Of CUDA's blocks sizes alone are known; and the collector, which ran at the check's end, ran in the test.
        self._unexplained.update(
            (leak.device, leak.bytes)
            for leak in report.leaks
            if (not leak.storage and leak.device != "cpu") or leak.fate == COLLECTED
        )

    def look(self) -> None:
        """The test has ended, and will be judged: look which blocks in question still live."""
        if not self._serials:
            return
        in_sight = {address for _, address, _, _ in _C.storage_spans(storages_now())}
        self._unexplained.update(
            ("cpu", size)
            for address, size, serial in _C.live_blocks(0)
            if address not in in_sight and any(serial in serials for serials in self._serials)
        )

    def without(self, leaks: list[Leak]) -> list[Leak]:
        """The leaks but for the fixtures'."""
        left = self._unexplained.copy()
        return [leak for leak in leaks if not self._owns(leak, left)]

    def _owns(self, leak: Leak, left: Counter[tuple[str, int]]) -> bool:
        if leak.storage:
            return leak.storage in self._storages
        left[leak.device, leak.bytes] -= 1
        return left[leak.device, leak.bytes] >= 0
