"""What each process of soak.py runs: steps of ZBV, among them some that fail, and what is alive after each.

    python soak_ranks.py RANK WORLD FOLDER STEPS EVERY [LEAK]

After every EVERY steps a step fails, in another way each time; the ranks meet in a new process group and take it again. Losses,
weights and counts go to FOLDER; how far it is, to standard output.
"""

import array
import gc
import json
import logging
import random
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from schedules import fault_cases as cases
from schedules.fault_cases import Fault
from schedules.fault_ranks import LONGEST, Job, dies_with_its_parent
from support import allocations

import zbpipe
from zbpipe import _C  # counts what is alive
from zbpipe._stage.before_2_15 import sends, threads  # the same

LEARNING_RATE, MOMENTUM = 1e-3, 0.9
KINDS = [
    *(Fault(where, site) for where, site in (
        ("2F1", "a module's forward"),
        ("3F1", "the loss"),
        ("1I0", "a tensor's hook"),
        ("3I0", "a Function's backward"),
        ("1I2", "a module's backward hook"),
        ("2W1", "a weight's hook"),
        ("2W0", "a weight's post-accumulate hook"),
        ("0W3", "a Function's backward"),
    )),
    *(Fault(where, "", "memory", n) for n in (1, 2) for where in ("2F1", "1I0", "3I1", "2W1", "0W2")),
    Fault("2F1", "a module's forward", "SIGINT"),
    Fault("1I0", "a tensor's hook", "SIGINT"),
    Fault("1W0", "a weight's hook", hold="3F1"),
]  # fmt: skip
COLLECT_EVERY = 20
SETTLED = 3  # steps after which nothing new is made: momentum, what torch keeps
PATIENCE = LONGEST * KINDS[0].timeout  # seconds for a thread to be done with a send


def faults(steps, every):
    """By step. The same in all ranks."""
    choose, drawn = random.Random(1), []
    for step in range(every, steps, every):
        drawn = drawn or choose.sample(KINDS, len(KINDS))
        yield step, drawn.pop()


class Soaked(Job):
    def __init__(self, rank, folder):
        super().__init__(KINDS[0], rank, folder, "soak")
        for part in self.parts.values():
            part.trip = None
        self.count_fired = 0
        self.objects = []  # after each fault
        self.optimizer = torch.optim.SGD(self.weights().values(), LEARNING_RATE, momentum=MOMENTUM)

    def meet_anew(self):
        self.meet()
        self.make_schedule()

    def equip(self, fault):
        """Its site, for one step: handles to take it out again."""
        self.fault = self.trip.fault = fault
        if self.rank != fault.rank:
            return []
        return self.parts[fault.stage].equip(self.trip)

    def step(self, number):
        """The error's text, or the losses."""
        self.optimizer.zero_grad()
        return self.attempt(number)

    def fail(self, number, fault):
        """A step with the fault, and what all ranks do then. Returns the error's types."""
        handles = self.equip(fault)
        self.number = number
        for flag in (self.flag(what, rank) for what in ("left", "failed") for rank in range(cases.WORLD)):
            flag.unlink(missing_ok=True)
        dist.barrier()
        got = self.failing_step()
        fired = self.trip.fired
        self.trip.fired = False
        self.count_fired += fired
        for handle in handles:
            handle.remove()
        if self.rank == fault.rank:
            self.parts[fault.stage].trip = None
        self.leave()
        self.flag("left", self.rank).write_text("")
        self.meet_anew()
        gc.collect()  # torch's errors are cycles
        self.objects.append(len(gc.get_objects()))
        return got.partition(":")[0] if isinstance(got, str) else "no error"


def alive():
    end = time.monotonic() + PATIENCE
    while (waited_for := being_waited_for()) and time.monotonic() < end:
        time.sleep(0.0002)
    sends.poll()
    return (
        *allocations.live(),
        sum(type(thing) is _C.ParamGroup for thing in gc.get_objects()),
        len(sends.under_way()) + waited_for,
    )


def being_waited_for():
    return sum(queue.now is not None or bool(queue.left) for queue in list(threads._queues.values()))


WHAT = ("bytes of tensors", "blocks of tensors", "groups", "sends")


def main(rank, world, folder, steps, every, leak=None):
    dies_with_its_parent()
    logging.disable()
    gc.freeze()
    zbpipe.patch()
    job = Soaked(rank, folder)
    job.meet_anew()
    planned, losses, kept, counted = dict(faults(steps, every)), array.array("d"), [], [Counter() for _ in WHAT]
    gc.disable()  # no tensor may wait for it; what torch makes of trees of arguments is cycles, without any
    for number in range(steps):
        if number in planned:
            print(f"step {number}: {planned[number].name}: {job.fail(number, planned[number])}", flush=True)
        got = job.step(number)
        if isinstance(got, str):
            raise RuntimeError(f"step {number}: {got}")
        losses.extend(got)
        job.optimizer.step()
        if leak and number % 7 == 6:
            kept.append(torch.empty(1))
        if number >= SETTLED:
            for counter, value in zip(counted, alive(), strict=True):
                counter[value] += 1
        if number % COLLECT_EVERY == 0:
            gc.collect()
    with open(folder / f"losses.{rank}", "wb") as file:
        losses.tofile(file)
    figures = {
        "alive": {what: sorted(counter.items()) for what, counter in zip(WHAT, counted, strict=True)},
        "objects": job.objects,
        "fired": job.count_fired,
        "weights": {name: w.tolist() for name, w in job.weights().items()},
    }
    (folder / f"figures.{rank}").write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
