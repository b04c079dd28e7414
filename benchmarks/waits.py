"""What filled waits can gain: torch's orders of actions, played in time.

F, I and W of a microbatch take one unit each on every stage (`heavy` on the last), a message `latency` units. Played as
the schedule says; with waits filled by what `patch(fill_waits=True)` may run in them, in eighths of a W; and beside it
the most that one rank has to compute, which no order can undercut. `jitter` is the sigma of a lognormal factor on each
action's time. Nothing is measured: the figures are the same on every machine.

    python benchmarks/waits.py --json benchmarks/results
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from zbpipe._bench.results import add_argument, write
from zbpipe._text import table

INTERLEAVED = "ScheduleInterleavedZeroBubble"
SCHEDULES = (INTERLEAVED, "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
SIZES = ((2, 8), (4, 16), (8, 32))  # ranks and microbatches
PIECES = 8  # groups of a stage


class Setting(NamedTuple):
    heavy: float
    latency: float
    jitter: float


class Length(NamedTuple):
    """Of a step, in units; ``busy``: what the rank with the most computes."""

    step: float
    busy: float
    waited: float
    filled: float


def orders(name: str, ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """The actions of each rank that take time."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        places = (0, ranks) if name == INTERLEAVED else (0, 2 * ranks - 1)
        stages = [PipelineStage(torch.nn.Linear(2, 2), place, 2 * ranks, torch.device("cpu")) for place in places]
        schedule = getattr(schedules, name)(stages, microbatches, loss_fn=torch.nn.functional.mse_loss)
        return {rank: list(timed(actions)) for rank, actions in schedule.pipeline_order_with_comms.items()}
    finally:
        dist.destroy_process_group()


def timed(actions: list[Any]) -> Iterator[Any]:
    kinds = (schedules.FORWARD, schedules.BACKWARD_INPUT, schedules.BACKWARD_WEIGHT, schedules.FULL_BACKWARD)
    for action in actions:
        if action is not None:
            yield from (part for part in action.sub_actions or (action,) if part.computation_type in kinds)


class Play:
    """A step, action by action on each rank, as messages come."""

    def __init__(self, order: dict[int, list[Any]], setting: Setting, fill: bool) -> None:
        self.order, self.setting, self.fill = order, setting, fill
        self.rank_of = {action.stage_index: rank for rank, actions in order.items() for action in actions}
        self.last = max(self.rank_of)
        self.now = dict.fromkeys(order, 0.0)
        self.busy = dict.fromkeys(order, 0.0)
        self.done: dict[tuple[str, int, int], float] = {}
        self.left: dict[tuple[int, int], float] = {}  # of W, by stage and microbatch
        self.waited = self.filled = 0.0

    def run(self) -> Length:
        queues = {rank: list(reversed(actions)) for rank, actions in self.order.items()}
        while any(queues.values()):
            for rank, queue in queues.items():
                while queue and (ready := self.ready(queue[-1])) is not None:
                    self.act(rank, queue.pop(), ready)
        return Length(max(self.now.values()), max(self.busy.values()), self.waited, self.filled)

    def ready(self, action: Any) -> float | None:
        """When what it needs is there; None if that is not known yet."""
        stage, microbatch, kind = action.stage_index, action.microbatch_index, action.computation_type
        if kind == schedules.FORWARD:
            return 0.0 if stage == 0 else self.message("F", stage - 1, stage, microbatch)
        if kind == schedules.BACKWARD_WEIGHT:
            return 0.0
        if stage == self.last:
            return self.done.get(("F", stage, microbatch))
        return self.message("B", stage + 1, stage, microbatch)

    def message(self, kind: str, sender: int, receiver: int, microbatch: int) -> float | None:
        sent = self.done.get((kind, sender, microbatch))
        beside = self.rank_of[sender] == self.rank_of[receiver]
        return None if sent is None else sent + (0.0 if beside else self.setting.latency)

    def act(self, rank: int, action: Any, ready: float) -> None:
        stage, microbatch, kind = action.stage_index, action.microbatch_index, action.computation_type
        if ready > self.now[rank]:
            self.wait(rank, ready - self.now[rank])
            self.now[rank] = ready
        unit = self.unit(action)
        if kind == schedules.BACKWARD_INPUT:
            self.left[stage, microbatch] = 2 * unit if stage == 0 else unit
            took = 0.0 if stage == 0 else unit  # stage 0's W is a whole backward
        elif kind == schedules.BACKWARD_WEIGHT:
            took = self.left.pop((stage, microbatch))
        else:
            took = unit if kind == schedules.FORWARD else 2 * unit
        self.now[rank] += took
        self.busy[rank] += took
        if kind != schedules.BACKWARD_WEIGHT:
            self.done["F" if kind == schedules.FORWARD else "B", stage, microbatch] = self.now[rank]

    def unit(self, action: Any) -> float:
        dice = random.Random(str(action))
        return (self.setting.heavy if action.stage_index == self.last else 1.0) * dice.lognormvariate(
            0, self.setting.jitter
        )

    def wait(self, rank: int, gap: float) -> None:
        self.waited += gap
        if not self.fill:
            return
        for (stage, microbatch), left in self.left.items():
            if stage == 0 or self.rank_of[stage] != rank:
                continue
            piece = (self.setting.heavy if stage == self.last else 1.0) / PIECES
            while left > 1e-9 and gap >= piece:
                took = min(piece, left)
                left, gap = left - took, gap - piece
                self.filled += took
                self.busy[rank] += took
            self.left[stage, microbatch] = left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_argument(parser)
    given = parser.parse_args()
    rows = []
    for name, (ranks, microbatches) in itertools.product(SCHEDULES, SIZES):
        order = orders(name, ranks, microbatches)
        for setting in itertools.starmap(Setting, itertools.product((1.0, 3.0), (0.0, 1.0), (0.0, 0.3))):
            plain, filled = Play(order, setting, False).run(), Play(order, setting, True).run()
            rows.append(
                {
                    "schedule": name,
                    "ranks": ranks,
                    "microbatches": microbatches,
                    **setting._asdict(),
                    "ratio": filled.step / plain.step,
                    "bound": plain.busy / plain.step,
                    "waited": plain.waited / (ranks * plain.step),
                    "filled": filled.filled / (ranks * filled.step),
                }
            )
    keys = ("schedule", "ranks", "heavy", "latency", "jitter", "ratio", "bound", "waited", "filled")
    print(table(keys, [[f"{row[k]:.3f}" if k in keys[5:] else str(row[k]) for k in keys] for row in rows]))
    write(given.json, "waits", {"rows": rows})


if __name__ == "__main__":
    main()
