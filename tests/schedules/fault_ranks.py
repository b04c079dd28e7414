"""What each process of test_faults.py runs: a step in which one rank fails, and what comes of the next.

    python fault_ranks.py RANK WORLD FOLDER LANE [PLANTED]

Each fault of the lane meets torch's own module and zbpipe at once, in processes of their own, and there: a step, the step with the
fault, in a new process group the same schedule again, in another a new schedule on the same stages (from
torch 2.15 on, which refuses the others, on new ones). What a rank saw goes to FOLDER.
"""

import contextlib
import ctypes
import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import types
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from schedules import fault_cases as cases
from schedules.fault_cases import MICROBATCHES, STAGES, Trip
from support import allocations
from support.blocks import loss_function
from support.pipelines import named, watch
from support.ranks import MODULES, join, on
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as stage_module

from zbpipe import _C  # counts what is left, and plants faults
from zbpipe._stage import losses  # the same
from zbpipe._stage.before_2_15 import outputs, sends, threads  # the same

NOT_ZBV = (cases.LOOP, cases.DUAL)
OTHERS = [fault for schedule in NOT_ZBV for fault in cases.faults_of(schedule)]
SOME_OTHERS = [fault for schedule in NOT_ZBV for fault in cases.some_of(cases.faults_of(schedule))]
LANES = {
    "ordinary": [*cases.faults_of(cases.ZBV), *SOME_OTHERS, *cases.REQUESTS, *cases.SIGNALS],
    "again": cases.AGAIN,
    "others": [fault for fault in OTHERS if fault not in SOME_OTHERS],
    "signals": [fault for schedule in NOT_ZBV for fault in cases.signals_of(schedule)],
    "requests": cases.MORE_REQUESTS,
    "held": [fault for fault in cases.SIGNALS if fault.hold],
    "plain": [cases.Fault("1I0", "a tensor's hook")],
}
ASKS_FOR_NEW_STAGES = torch.__version__ >= (2, 15)  # their receive buffers are the failed step's
threads._STAYS = 0.02  # seconds: what is counted is counted when threads have ended
LONGEST = 2.5  # times the timeout: threads that wait for a send wait for twice that
SOON = 0.5  # seconds
LOOK_EVERY = 0.01
PR_SET_PDEATHSIG = 1


class Job:
    """One rank of one job, from fault to recovery."""

    def __init__(self, fault, rank, folder, name):
        self.fault, self.rank, self.folder, self.name = fault, rank, folder, name
        self.mine = cases.mine(rank, fault.schedule)
        self.trip = Trip(fault)
        _, parts = cases.MODEL.build(STAGES)
        self.parts = {i: parts[i] for i in self.mine}
        if rank == fault.rank:
            self.parts[fault.stage].equip(self.trip)
        self.stages, self.groups = [], 0

    def meet(self):
        """The ranks' next process group."""
        self.groups += 1
        join(self.rank, cases.WORLD, self.folder, f"store {self.name} {self.groups}", self.fault.timeout)

    def make_schedule(self):
        if not self.stages:
            self.stages = [PipelineStage(part, i, STAGES, torch.device("cpu")) for i, part in self.parts.items()]
            for stage in self.stages:
                watch(stage, self.trip.around)
        kind = getattr(schedules, self.fault.schedule)
        self.schedule = kind(self.stages, MICROBATCHES, loss_fn=self.loss, scale_grads=False)

    def loss(self, out, target):
        self.trip.action = f"{STAGES - 1}F{self.losses}"  # it belongs to the action, and is no method of the stage's
        self.losses += 1
        self.trip.reach("the loss")
        return loss_function(out, target)

    def weights(self):
        return named(self.parts)

    def step(self, number):
        """The error's text, or losses and gradients, when the ranks have agreed that all of them have got so far: as numbers,
        which are none of the memory that is counted."""
        for w in self.weights().values():
            w.grad = None
        self.losses, seen = 0, []
        x, target = cases.batch(number)
        given = {"target": target, "losses": seen} if STAGES - 1 in self.mine else {}
        try:
            self.schedule.step(*([x] if 0 in self.mine else []), **given)
            dist.barrier()
        except BaseException as error:
            return told(error)
        return [loss.item() for loss in seen], {name: w.grad.tolist() for name, w in self.weights().items()}

    def leave(self):
        """As a program that gives the step up: what is left of the schedule goes, then the group."""
        keeps = self.fault.again and self.groups == 1
        if keeps:
            cut_connections()  # that the schedule's receives keep open
        else:
            self.schedule = None
            # One that begins again asks its peer for shapes, which stages that have stepped do not tell twice.
            self.stages = [] if ASKS_FOR_NEW_STAGES or self.fault.what == "SIGKILL" else self.stages
            gc.collect()
        dist.destroy_process_group()
        patience = time.monotonic() + self.fault.timeout / 3
        while not keeps and (left := sum(1 for _ in connections())) and time.monotonic() < patience:
            time.sleep(LOOK_EVERY)
        cut_connections()  # or what is left would keep the peer
        return 0 if keeps else left

    def flag(self, what, rank):
        return self.folder / f"{self.name}.{what}.{rank}"

    def failing_step(self):
        fault, trip = self.fault, self.trip
        if fault.what == "receive nothing" and self.rank == fault.rank:
            trip.fired = True
            wait_for(self.flag("failed", 1 - self.rank))
            return "takes no part"
        if fault.what == "interrupt the peer":
            self.flag("pid", self.rank).write_text(str(os.getpid()))
            trip.fired = True
            if self.rank != fault.rank:
                time.sleep(SOON)  # the other one waits for what this one has not sent
                os.kill(int(wait_for(self.flag("pid", fault.rank)).read_text()), signal.SIGINT)
                time.sleep(SOON)
        trip.is_armed = self.rank == fault.rank
        trip.hold = partial(wait_for, self.flag("left", fault.rank))
        got = self.step(1)
        trip.is_armed, trip.hold = False, None
        if self.rank != fault.rank:
            self.flag("failed", self.rank).write_text("")
        return got

    def run(self):
        """All of it. A rank that was killed begins again with `recover`."""
        self.meet()
        self.make_schedule()
        seen = {"first": self.step(0)}
        before = counts(self)
        seen["fault"] = self.failing_step()
        seen["fired"] = self.trip.fired
        seen["left of the group"] = self.leave()
        self.flag("left", self.rank).write_text("")
        seen |= self.recover()
        seen["left"] = left_since(before, self)
        self.leave()
        return seen

    def recover(self):
        self.groups = 1
        self.meet()
        seen = {}
        if self.fault.again:
            if not self.stages:
                self.make_schedule()
            seen["same schedule"] = self.step(1)
            self.leave()
            self.meet()
        self.make_schedule()
        return {**seen, "new schedule": self.step(1)}

    def begin_again(self):
        seen = self.recover()
        self.leave()
        return seen


def connections():
    """The sockets that are connected, as copies."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or no socket, or one that listens
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.getpeername():
                    yield end


def cut_connections():
    """As a network that fails: what waits on this side and on the other hears of it."""
    for end in connections():
        end.shutdown(socket.SHUT_RDWR)


def told(error):
    """The types from an error to its first cause, and what that says."""
    types = [type(error).__name__]
    while error.__cause__ is not None:
        error = error.__cause__
        types.append(type(error).__name__)
    return f"{' from '.join(types)}: {error}"


def wait_for(file):
    while not file.exists() or (file.name.count(".pid") and not file.read_text()):
        time.sleep(LOOK_EVERY)
    return file


def waiting_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("zbpipe")]


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
KEPT_BY_A_STAGE = ("fwd_cache", "bwd_cache", "backward_state", "dw_runner", "output_chunks", "_forward_chunk_states")
KEPT_BY_A_SCHEDULE = ("_internal_losses", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "backward_counter")


def counts(job):
    """What there is of everything that a step registers, keeps or starts."""
    end = time.monotonic() + LONGEST * job.fault.timeout
    while waiting_threads() and time.monotonic() < end:  # gloo may have forgotten one (architecture.md, Limits)
        time.sleep(LOOK_EVERY)
    sends.poll()
    gc.collect()
    weights = job.weights().values()
    seen = {
        "hooks on weights": sum(
            len(w._backward_hooks or ()) + len(w._post_accumulate_grad_hooks or ()) for w in weights
        ),
        "hooks on modules": sum(
            len(vars(m)[name]) for part in job.parts.values() for m in part.modules() for name in HOOKS
        ),
        "methods of torch's": hash(tuple(methods_of_torch())),
        "groups": sum(type(thing) is _C.ParamGroup for thing in gc.get_objects()),
        "sends": len(sends.under_way()),
        "outputs on their way": sum(map(len, outputs._on_their_way.values())),
        "spent losses": len(losses._spent),
        "queues of sends": len(threads._queues),
        "threads of Python": threading.active_count(),
        "threads": len(os.listdir("/proc/self/task")),
        "tracebacks": sum(type(thing) is types.TracebackType for thing in gc.get_objects()),
    }
    for name in KEPT_BY_A_STAGE:
        seen[name] = sum(len(getattr(stage, name, ())) for stage in job.stages)
    for name in KEPT_BY_A_SCHEDULE:
        seen[name] = len(getattr(job.schedule, name, ()))
    if allocations.are_counted():
        seen["bytes"], seen["blocks"] = allocations.live()
    return seen


def methods_of_torch():
    for owner in (stage_module._PipelineStageBase, PipelineStage, schedules._PipelineScheduleRuntime, schedules):
        yield from (id(value) for _, value in sorted(vars(owner).items()) if callable(value))


def left_since(before, job):
    """A thread outlives Python's join by what it destroys, which wants the GIL: it is given a moment."""
    end = time.monotonic() + LONGEST
    while True:
        left = difference(before, counts(job))
        if left.keys() != {"threads"} or time.monotonic() > end:
            return left
        time.sleep(LOOK_EVERY)


def difference(before, after):
    ended = after["threads"] < before["threads"]
    return {
        what: [before[what], now]
        for what, now in after.items()
        if before[what] != now and not (what == "threads" and ended)
    }


# Faults of ours, which the test must find.


def leave_a_hook(job):
    """As a pass that hooks a weight and does not come to take the hook back."""
    step = job.failing_step

    def failing_step():
        got = step()
        next(iter(job.weights().values())).register_hook(lambda grad: None)
        return got

    job.failing_step = failing_step


def keep_groups(job):
    kept = []
    job.kept = kept
    original = _C.input_pass

    def input_pass(*args):
        grads, groups = original(*args)
        if job.trip.is_armed:
            kept.extend(groups)
        return grads, groups

    _C.input_pass = input_pass


def keep_sends(job):
    kept, begin = [], sends.Send.__init__

    def kept_for_ever(self, work, ops):
        begin(self, work, ops)
        if job.trip.is_armed:
            kept.append(self)

    sends.Send.__init__ = kept_for_ever
    sends.Send._let_go = lambda self: None


def turn_a_bit(job):
    step = job.step

    def turned(number):
        got = step(number)
        if job.groups == 2:
            grad = next(iter(got[1].values()))
            grad[0] = math.nextafter(grad[0], math.inf)
        return got

    job.step = turned


def hang(job):
    job.leave = lambda: time.sleep(1000)


def stay_stopped(job):
    job.leave = lambda: os.kill(os.getpid(), signal.SIGSTOP)


def keep_the_group(job):
    """Sends that hold what they were posted with, the process group among it."""
    begin = sends.Send.__init__

    def holding(self, work, ops):
        begin(self, work, ops)
        self.ops = list(ops)

    sends.Send.__init__ = holding


PLANTED = {
    f.__name__: f for f in (leave_a_hook, keep_groups, keep_sends, keep_the_group, turn_a_bit, hang, stay_stopped)
}


# The processes of one rank.


def dies_with_its_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # Who runs in the background ignores it, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(fault, module, rank, folder, planted, again=False):
    child = os.fork()
    if child:
        return child
    name = f"{fault.id}.{module}"
    try:
        dies_with_its_parent()
        gc.freeze()  # what was imported is none of what is counted, and takes long to look through
        logging.disable()
        (folder / f"{name}.started.{rank}").write_text(str(os.getpid()))
        with on(module):
            job = Job(fault, rank, folder, name)
            if planted:
                PLANTED[planted](job)
            torch.save(job.begin_again() if again else job.run(), folder / f"{name}.{rank}")
    except BaseException:
        (folder / f"{name}.{rank}.failed").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def run_fault(fault, rank, folder, planted):
    begin = partial(start, fault, rank=rank, folder=folder, planted=planted)
    modules = {begin(module): module for module in (MODULES if not planted else ["zbpipe"])}
    stopped = {}
    try:
        while modules:
            for child in list(modules):
                ended, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
                if ended and os.WIFSTOPPED(status):
                    stopped[child] = time.monotonic()
                elif ended:
                    module = modules.pop(child)
                    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == getattr(signal, fault.what, None):
                        modules[begin(module, again=True)] = module
                    elif not (folder / f"{fault.id}.{module}.{rank}").exists():
                        with (folder / f"{fault.id}.{module}.{rank}.failed").open("a") as file:
                            file.write(f"ended with status {status}")
            for child in list(stopped):
                peer_failed = (folder / f"{fault.id}.{modules[child]}.failed.{1 - rank}").exists()
                is_soon = time.monotonic() < stopped[child] + SOON
                if {"soon": not is_soon, "failed": peer_failed}.get(fault.resume):
                    del stopped[child]
                    os.kill(child, signal.SIGCONT)
            time.sleep(LOOK_EVERY)
    finally:
        for child in modules:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def main(rank, world, folder, lane, planted=None):
    dies_with_its_parent()
    for fault in LANES[lane]:
        run_fault(fault, rank, folder, planted)
        (folder / f"{fault.id}.ended.{rank}").write_text("")
        wait_for(folder / f"{fault.id}.ended.{1 - rank}")  # or one fault that takes long would be many
    (folder / f"processor seconds.{rank}").write_text(str(sum(os.times()[:4])))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
