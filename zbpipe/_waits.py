"""W in the waits of a schedule: patch(fill_waits=True).

A rank that waits for a message runs groups whose I is done, one at a time; the W that the schedule asks for later finds
what is left.

Note [What may run in a wait]

The additions to a weight keep the schedule's order, so that the bits are the same: of a stage only the microbatch may
run that is the next to add to its weights, and the one behind it when nothing of that is left. A group runs if it
only adds (``ParamGroup._only_adds``): no hook, nothing of the program's, nothing between processes, so that no
collective moves. Left alone are stages under DDP and fully_shard; stage 0, whose W is a whole backward; and stages of
the rank that share a parameter, to which each adds in an order of its own. (A reentrant checkpoint adds in I: to a
weight that is also used outside of it the order is another one.) What a group raises is kept, and raised by the W that
the schedule asks for.

Note [Which group fits into a wait]

Steps are alike: a wait lasts as long as in the step before, from where the schedule begins to wait to where the message
is there, whatever runs meanwhile; a group, as long as when it ran last, alone or as its share of a W. A group starts if
it would end before the message is expected. So a first step is measured alone, and a wait that has become shorter costs
one group's time at most, once.

Note [Who waits]

gloo's works tell only a caller of ``wait`` that a message is there: a thread waits (threads.py), and the schedule's
thread computes. Such a wait is the host's; where tensors live on an accelerator, ``wait`` only orders its streams and
must be called on the schedule's thread: nothing is filled there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from zbpipe import _observer, _parameters, passes
from zbpipe._stage import data_parallel, methods, state, threads
from zbpipe._stage.sends import Receive
from zbpipe._stage.works import wait_for
from zbpipe._torch import pipelining

_Function = Callable[..., Any]
_Span = tuple[float, float]


@dataclass(frozen=True)
class Waited:
    """What the receives of this process's schedules took since patch().

    Attributes:
        seconds: from where a schedule began to wait to where the message was there.
        filled: seconds of them in which groups ran.
        groups: how many ran.
        messages: how many were waited for.
    """

    seconds: float = 0.0
    filled: float = 0.0
    groups: int = 0
    messages: int = 0


waited = Waited()


def waited_since(before: Waited) -> Waited | None:
    """What has been added to an earlier :data:`waited`; None where nothing was waited for, or patch() came between."""
    messages = waited.messages - before.messages
    if messages <= 0:
        return None
    return Waited(
        waited.seconds - before.seconds, waited.filled - before.filled, waited.groups - before.groups, messages
    )


class Unit(NamedTuple):
    """A group that may run now. ``groups``: the list of its microbatch's, from which it goes."""

    stage: Any
    microbatch: int
    number: int
    group: Any
    groups: list[Any]


@dataclass
class Learned:
    """Of a schedule, in seconds: how long each wait of its last step was, and each group, by stage and number."""

    waits: list[float] = field(default_factory=list)
    groups: dict[tuple[int, int], float] = field(default_factory=dict)

    def share(self, stage: int, numbers: Sequence[int], seconds: float) -> None:
        """These groups took so long together. One that was once slow is not so for ever."""
        known = [self.groups.get((stage, number)) for number in numbers]
        total = sum(length for length in known if length is not None) if None not in known else 0.0
        for number, length in zip(numbers, known, strict=True):
            self.groups[stage, number] = seconds * (length / total if length and total else 1 / len(numbers))


_learned: weakref.WeakKeyDictionary[Any, Learned] = weakref.WeakKeyDictionary()


class _Thread(threading.local):
    step: Step | None = None


_thread = _Thread()


class Step:
    """A step of a schedule on this rank, as far as it has come."""

    def __init__(self, schedule: Any) -> None:
        self.learned = _learned.setdefault(schedule, Learned())
        self.lengths: list[float] = []
        self.messages = pipelining.messages_of(schedule)
        self.stages = {stage.stage_index: stage for stage in pipelining.stages_of(schedule) or ()}
        self.adding = {stage: deque(order) for stage, order in pipelining.additions_of(schedule).items()}
        self.errors: dict[tuple[int, int], Exception] = {}
        self.numbers: dict[tuple[int, int], dict[int, int]] = {}  # of groups, by their ids: their microbatch has them
        self.others: set[int] = set()  # of groups that do more than add
        shared = _sharing(self.stages)
        for index, stage in self.stages.items():
            if index in shared or not _can_run_apart(stage):
                self.adding.pop(index, None)

    def expected(self) -> float:
        """How long the next wait is expected to be."""
        number = len(self.lengths)
        return self.learned.waits[number] if number < len(self.learned.waits) else 0.0

    def next_message(self) -> str | None:
        """What it waits for next; None for a send."""
        number = len(self.lengths)
        return self.messages[number] if number < len(self.messages) else None

    def unit_within(self, seconds: float) -> Unit | None:
        """The first group that may run and takes no longer."""
        for unit in self.units():
            length = self.learned.groups.get((unit.stage.stage_index, unit.number))
            if length is None or length > seconds or id(unit.group) in self.others:
                continue
            if unit.group._only_adds:
                return unit
            self.others.add(id(unit.group))
        return None

    def units(self) -> Iterator[Unit]:
        for index, order in self.adding.items():
            stage = self.stages[index]
            for microbatch, is_weight_pass in order:
                entry = stage.backward_state.get(microbatch) if is_weight_pass else None
                if entry is None or not isinstance(entry[1], list) or (index, microbatch) in self.errors:
                    break
                groups = entry[1]
                numbers = self.numbers_of(index, microbatch, groups)
                for group in groups:
                    if id(group) in numbers:
                        yield Unit(stage, microbatch, numbers[id(group)], group, groups)
                if groups:
                    break

    def numbers_of(self, stage: int, microbatch: int, groups: list[Any]) -> dict[int, int]:
        """By their ids, of those that were there when this was first asked."""
        numbers = self.numbers.get((stage, microbatch))
        if numbers is None:
            numbers = {id(group): number for number, group in enumerate(groups)}
            self.numbers[stage, microbatch] = numbers
        return numbers

    def run(self, unit: Unit, parameters: Sequence[torch.Tensor]) -> _Span | None:
        """From when to when the group ran; None where it raised. A group of other weights is refused, as by the W that
        the schedule asks for."""
        begin = time.perf_counter()
        try:
            passes.stage_backward_weight(parameters, [unit.group])
        except Exception as error:
            self.errors[unit.stage.stage_index, unit.microbatch] = error.with_traceback(None)  # whose frames keep this
            return None
        unit.groups.remove(unit.group)
        end = time.perf_counter()
        self.learned.groups[unit.stage.stage_index, unit.number] = end - begin
        _count(groups=1)
        return begin, end

    def has_added(self, stage: int, microbatch: int, is_weight_pass: bool) -> None:
        order = self.adding.get(stage)
        if order is None:
            return
        try:
            order.remove((microbatch, is_weight_pass))
        except ValueError:  # somebody's own action: the order is not known any more
            del self.adding[stage]


class Arrival:
    """Receives that a thread waits for."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works
        self.work: Any = None
        self.patience: timedelta | None = None
        self.at = 0.0
        self.error: Exception | None = None
        self.done = threading.Event()

    def finish(self, timeout: timedelta | None = None) -> None:
        try:
            for work in self.works:
                self.work = work.work if isinstance(work, Receive) else work
                wait_for(self.work, timeout)
        except Exception as error:
            self.error = error.with_traceback(None)
        finally:
            self.work = None
            self.at = time.perf_counter()
            self.done.set()

    def deliver(self) -> None:
        """What the wait of each would have done. Raises what it raised."""
        if self.error is not None:
            raise self.error
        for work in self.works:
            if isinstance(work, Receive):
                work.has_come()


def step_microbatches(original: _Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    if not state.fill_waits or not pipelining.has_backward(self) or not _waits_on_the_host(self):
        return original(self, *args, **kwargs)
    outer, _thread.step = _thread.step, Step(self)
    try:
        result = original(self, *args, **kwargs)
        _thread.step.learned.waits = _thread.step.lengths
    finally:
        _thread.step = outer
    return result


def wait_batch_p2p(original: _Function, work: list[Any]) -> Any:
    step = _thread.step
    if step is None:
        return original(work)
    message = step.next_message()
    if message is None:
        step.lengths.append(0.0)
        return original(work)
    begin = time.perf_counter()
    expected = step.expected()
    unit = step.unit_within(expected)
    if unit is None:
        result = original(work)
        _note(step, time.perf_counter() - begin)
        return result
    arrival = Arrival(work)
    parameters_of = functools.cache(_parameters_of)  # as they are in this wait
    spans: list[_Span] = []
    threads.watch_receive(arrival, {group for of in work if isinstance(of, Receive) for group in of.groups})
    with _marked(message):
        while unit is not None and not arrival.done.is_set():
            if span := step.run(unit, parameters_of(unit.stage)):
                spans.append(span)
            unit = step.unit_within(begin + expected - time.perf_counter())
    arrival.done.wait()
    _count(filled=sum(max(0.0, min(end, arrival.at) - start) for start, end in spans))
    _note(step, max(0.0, arrival.at - begin))
    return arrival.deliver()


def _note(step: Step, seconds: float) -> None:
    step.lengths.append(seconds)
    _count(seconds=seconds, messages=1)


def _count(seconds: float = 0.0, filled: float = 0.0, groups: int = 0, messages: int = 0) -> None:
    global waited
    waited = Waited(
        waited.seconds + seconds, waited.filled + filled, waited.groups + groups, waited.messages + messages
    )


@contextlib.contextmanager
def _marked(message: str) -> Iterator[None]:
    """In profiles and recordings what runs within is seen to run in the wait for this message."""
    name = f"wait for {message}"
    recorder = _observer.current
    phase = recorder.phase(name) if recorder is not None else contextlib.nullcontext()
    with torch.profiler.record_function(f"zbpipe: {name}"), phase:
        yield


def backward_one_chunk(
    original: _Function, self: Any, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any
) -> Any:
    result = methods.backward_one_chunk(original, self, bwd_chunk_id, loss, full_backward, **kwargs)
    if full_backward and _thread.step is not None:
        _thread.step.has_added(self.stage_index, bwd_chunk_id, False)
    return result


def backward_weight_one_chunk(original: _Function, self: Any, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
    step = _thread.step
    if step is None:
        return data_parallel.backward_weight_one_chunk(original, self, bwd_chunk_id, *args, **kwargs)
    with _weight_pass_of(self, bwd_chunk_id, step):
        return data_parallel.backward_weight_one_chunk(original, self, bwd_chunk_id, *args, **kwargs)


@contextlib.contextmanager
def _weight_pass_of(stage: Any, microbatch: int, step: Step) -> Iterator[None]:
    """The W that the schedule asks for. Raises what a group of it raised in a wait."""
    index = stage.stage_index
    error = step.errors.pop((index, microbatch), None)
    if error is not None:
        raise error
    entry = stage.backward_state.get(microbatch)
    groups = entry[1] if entry is not None and isinstance(entry[1], list) else []
    numbers = step.numbers_of(index, microbatch, groups)
    left = [numbers[id(group)] for group in groups if id(group) in numbers]
    begin = time.perf_counter()
    yield
    if left:
        step.learned.share(index, left, time.perf_counter() - begin)
    step.has_added(index, microbatch, True)


def _parameters_of(stage: Any) -> list[torch.Tensor]:
    return list(_parameters.listed(stage.submod.parameters()) or ())


def _sharing(stages: Mapping[int, Any]) -> set[int]:
    """Those that have a parameter that another one has, too."""
    first: dict[torch.Tensor, int] = {}
    sharing: set[int] = set()
    for index, stage in stages.items() if len(stages) > 1 else ():
        for parameter in _parameters_of(stage):
            if (other := first.setdefault(parameter, index)) != index:
                sharing |= {index, other}
    return sharing


def _can_run_apart(stage: Any) -> bool:
    return stage.stage_index != 0 and not any(is_kind(stage.submod) for is_kind in data_parallel.KINDS.values())


def _waits_on_the_host(schedule: Any) -> bool:
    return all(torch.device(stage.device).type == "cpu" for stage in pipelining.stages_of(schedule) or ())


def forget() -> None:
    """The next patch() begins anew."""
    global waited
    waited = Waited()
    _learned.clear()
