"""The faults of test_faults.py: where in a step each comes, and as what. Beside them the model that is trained."""

import functools
import os
import signal
from dataclasses import dataclass, replace

import torch
from support import allocations
from support.blocks import SCHEDULES, WIDTH, ZERO_BUBBLE, Linears, blocks, f64, stages_of
from support.functions import function_of
from support.pipelines import Model, backwards

WORLD, STAGES, MICROBATCHES, ROWS = 2, 4, 4, 2
LOOP, ZBV, DUAL = ZERO_BUBBLE  # in DualPipeV most backwards are whole


class Planted(Exception):
    """What no library raises."""


@dataclass(frozen=True)
class Fault:
    """
    where: the action within which it comes: kind (F, I, W or B), stage and microbatch; the stage's rank is the one that fails.
    site: what meets it there.
    what: "raise", "memory" (the n-th request for memory is refused), or a signal that the rank sends itself; "interrupt the
        peer" has the other rank send it while this one waits; "receive nothing": the rank takes no part in the step.
    resume: when a stopped rank goes on: "soon", or when its peer has "failed".
    timeout: of the process group, in seconds.
    again: the schedule that has failed is kept, and asked for the next step.
    hold: an action of the peer, which goes on when the rank has failed and given its group up.
    """

    where: str
    site: str
    what: str = "raise"
    n: int = 0
    schedule: str = ZBV
    resume: str = ""
    timeout: int = 30
    again: bool = False
    hold: str = ""

    @property
    def stage(self):
        return int(self.where[0])

    @property
    def rank(self):
        return next(rank for rank in range(WORLD) if self.stage in mine(rank, self.schedule))

    @property
    def name(self):
        """As in the table, but for the schedule."""
        action = f"{self.where[1]} of {'the last stage' if self.stage == STAGES - 1 else f'stage {self.stage}'}"
        held = ", while its gradient is not received" if self.hold else ""
        stopped = {"soon": "is stopped, and goes on", "failed": "is stopped for longer than the timeout"}
        return {
            "raise": f"{self.site} raises in {action}{held}",
            "memory": f"no memory for request {self.n} of {action}",
            "SIGINT": f"Ctrl-C in {action}, in {self.site}",
            "interrupt the peer": "Ctrl-C while the rank waits to receive",
            "SIGKILL": f"the rank is killed in {action}",
            "SIGSTOP": f"the rank {stopped.get(self.resume)}",
            "receive nothing": "the rank takes no part: it neither receives nor sends",
        }[self.what]

    @property
    def id(self):
        options = (self.n, self.resume, self.again, self.hold, self.timeout)
        return f"{self.schedule} {self.where} {self.site} {self.what} {' '.join(map(str, options))}".replace(" ", "_")


def mine(rank, schedule):
    return stages_of(rank, WORLD, STAGES // WORLD, SCHEDULES[schedule][1])


BACKWARD = ("a Function's backward", "a tensor's hook", "a module's backward hook")
WEIGHT = ("a weight's hook", "a weight's post-accumulate hook")


def faults_of(schedule):
    """An exception in each kind of action, from each place that can raise there."""
    found = [("2F1", "a module's forward"), ("2F1", "a module's forward hook"), ("3F1", "the loss")]
    # The middle stages' I, that of the last (from its loss), and the first stage's W, which is its whole backward.
    inputs = ["1I3"] if schedule == DUAL else ["1I0", "3I0"]
    found += [(where, site) for where in inputs for site in BACKWARD]
    found += [(where, BACKWARD[0]) for where in (["0W3"] if schedule == DUAL else ["0W0", "0W3"])]
    weights = {ZBV: "2W1", DUAL: "2W3"}.get(schedule, "1W1")
    found += [(where, site) for where in (weights, "0W3") for site in WEIGHT]
    if schedule == DUAL:
        found += [(where, site) for where in ("2B0", "3B2") for site in BACKWARD + WEIGHT]
    return [Fault(where, site, schedule=schedule) for where, site in found]


def some_of(faults):
    """The first of each action."""
    return [*{(fault.stage, fault.where[1]): fault for fault in reversed(faults)}.values()][::-1]


ACTIONS = ("2F1", "1I0", "3I0", "2W1", "0W0")
REQUESTS = [Fault(where, "", "memory", n) for where in ACTIONS for n in (1, 3)]
# As far as an action asks for so many.
MORE_REQUESTS = [Fault(where, "", "memory", n) for where in ACTIONS for n in range(1, 40) if n not in (1, 3)]
SIGNALS = [
    Fault("1W0", "a weight's hook", hold="3F1"),
    Fault("2F1", "a module's forward", "SIGINT"),
    Fault("1I0", "a tensor's hook", "SIGINT"),
    Fault("3I0", "a Function's backward", "SIGINT"),
    Fault("2W1", "a weight's hook", "SIGINT"),
    Fault("1F0", "", "interrupt the peer"),
    Fault("2F1", "a module's forward", "SIGKILL"),
    Fault("1I0", "a tensor's hook", "SIGKILL"),
    Fault("2F1", "a module's forward", "SIGSTOP", resume="soon"),
    Fault("2F1", "a module's forward", "SIGSTOP", resume="failed", timeout=8),
    Fault("1F0", "", "receive nothing", timeout=8),
]


def signals_of(schedule):
    others = {"1I0": "1I3", "3I0": "3B2", "2W1": "2W3"} if schedule == DUAL else {}
    return [
        replace(fault, schedule=schedule, where=others.get(fault.where, fault.where))
        for fault in SIGNALS
        if not fault.hold
    ]


# The schedule that failed is asked for the next step.
AGAIN = [
    Fault(where, site, again=True)
    for where, site in (
        ("0F0", "a module's forward"),
        ("2F1", "a module's forward"),
        ("3F1", "the loss"),
        ("1I0", "a tensor's hook"),
        ("3I0", "a tensor's hook"),
        ("2W1", "a weight's hook"),
        ("0W3", "a weight's hook"),
    )
]


class Trip:
    """Sets the fault off, once, where it belongs."""

    def __init__(self, fault):
        self.fault, self.is_armed, self.fired = fault, False, False
        self.action = None  # the one under way
        self.hold = None

    def fire(self, what=None):
        self.is_armed, self.fired = False, True
        what = what or self.fault.what
        if what == "raise":
            raise Planted("planted")
        os.kill(os.getpid(), getattr(signal, what))

    def reach(self, site):
        if self.is_armed and (self.action, site) == (self.fault.where, self.fault.site):
            self.fire()

    def begin(self, action):
        self.action = action
        if self.hold is not None and action == self.fault.hold:
            self.hold()
        if self.is_armed and self.fault.what == "memory" and action == self.fault.where:
            self.refused = allocations.refused()
            allocations.refuse(self.fault.n)

    def around(self, action, run):
        self.begin(action)
        try:
            return run()
        finally:
            self.end()

    def end(self):
        if self.is_armed and self.fault.what == "memory" and self.action == self.fault.where:
            allocations.refuse(0)
            self.is_armed, self.fired = False, allocations.refused() > self.refused
        self.action = None


@functools.partial(function_of, lambda x, trip: x.clone())
def through(x, trip, grad):
    trip.reach("a Function's backward")
    return grad.clone()


class Block(Linears):
    trip = None

    def equip(self, trip):
        """Puts the site of `trip` into the block."""
        self.trip, site = trip, trip.fault.site

        def reach(*args):
            trip.reach(site)

        hooks = {
            "a module's forward hook": self.up.register_forward_hook,
            "a module's backward hook": self.up.register_full_backward_hook,
            "a weight's hook": self.up.weight.register_hook,
            "a weight's post-accumulate hook": self.up.weight.register_post_accumulate_grad_hook,
        }
        if site in hooks:
            hooks[site](reach)

    def forward(self, x):
        h = self.up(self.norm(x)).tanh()
        if self.trip is not None:
            self.trip.reach("a module's forward")
            if self.trip.fault.site == "a Function's backward":
                h = through(h, self.trip)
            elif self.trip.fault.site == "a tensor's hook" and h.requires_grad:
                trip = self.trip
                h.register_hook(lambda grad: trip.reach("a tensor's hook"))
        return x + self.down(h)


def batch(step):
    torch.manual_seed(100 + step)
    return torch.randn(2, ROWS * MICROBATCHES, WIDTH, dtype=f64).unbind(0)


MODEL = Model(functools.partial(blocks, kind=Block), batch=batch, microbatches=MICROBATCHES)


def ordinary(step):
    """Losses and gradients by the whole model and an ordinary backward."""
    net, _ = MODEL.build(STAGES)
    losses = backwards(net, MODEL, *batch(step))
    return [loss.item() for loss in losses], {name: w.grad.tolist() for name, w in net.named_parameters()}
