"""The table of patch()'s changes in torch: every name, its replacement, and the need that must be met."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from zbpipe import passes
from zbpipe._patch.places import Function, Place, holding, wrapping
from zbpipe._stage import backward, data_parallel, losses, scale
from zbpipe._stage.before_2_15 import methods, sends
from zbpipe._torch import pipelining, probe

# By the names of torch's functions, which are replaced wherever they were imported, under whatever name.
REPLACEMENTS: dict[str, Function] = {
    name: losses.grads_for_inputs if name == pipelining.GRADS_FOR_INPUTS else vars(passes)[name]
    for name in pipelining.REPLACED
}


def accept_compiled_stages(stages: Any, schedule_name: str) -> None:
    """In place of torch's check, which raises."""


class Wrap(NamedTuple):
    """A function to call around torch's method, or function, of this name. If ``need`` (of the probe) is not met,
    torch's is left alone. So it is for "releases" from torch 2.15 on, which does these itself."""

    name: str
    wrapper: Function
    need: str = "stages"


# Methods of the base class of all stages.
OF_ALL_STAGES = (
    Wrap("backward_one_chunk", backward.backward_one_chunk),
    Wrap("scale_grads", scale.scale_grads, "the scale of main_grad"),
    Wrap("forward_one_chunk", methods.forward_one_chunk, "releases"),
    Wrap("get_fwd_recv_ops", methods.get_fwd_recv_ops, "releases"),
    Wrap("get_bwd_recv_ops", methods.get_bwd_recv_ops, "releases"),
    Wrap("get_fwd_send_ops", methods.get_fwd_send_ops, "releases"),
    Wrap("get_bwd_send_ops", methods.get_bwd_send_ops, "releases"),
    Wrap("set_local_fwd_input", methods.set_local_fwd_input, "releases"),
    Wrap("set_local_bwd_input", methods.set_local_bwd_input, "releases"),
    Wrap("clear_runtime_states", methods.clear_runtime_states, "releases"),
)
# Methods of the base class and of torch's subclasses: each definition.
OF_EACH_CLASS = (
    *(Wrap(name, methods.prepare, "releases") for name in pipelining.PREPARE),
    Wrap(pipelining.COMPUTE_OUTPUTS, data_parallel.compute_outputs),
    Wrap("forward_maybe_with_nosync", data_parallel.forward_maybe_with_nosync),
    Wrap("backward_maybe_with_nosync", data_parallel.backward_maybe_with_nosync),
    Wrap("backward_weight_one_chunk", data_parallel.backward_weight_one_chunk),
)
# Functions of the schedules' module.
OF_SCHEDULES = (Wrap(pipelining.BATCH_P2P, sends.batch_p2p, "releases"),)


def functions(originals: dict[str, Function], schedules: ModuleType) -> Iterator[Place]:
    """The places of torch's functions, which are `originals`, and of the check that refuses compiled stages."""
    yield from holding(originals, REPLACEMENTS)
    check = vars(schedules).get(pipelining.COMPILE_CHECK)
    if check is not None and not probe.differences("compiled stages"):
        yield from holding({pipelining.COMPILE_CHECK: check}, {pipelining.COMPILE_CHECK: accept_compiled_stages})


def wraps(schedules: ModuleType) -> Iterator[Place]:
    """The places to wrap in this torch, which meets the need "stages"."""
    tables = (
        ([pipelining.stage_base()], OF_ALL_STAGES),
        (pipelining.stage_classes(), OF_EACH_CLASS),
        ([schedules], OF_SCHEDULES),
    )
    left = {need for need in {row.need for _, rows in tables for row in rows} if probe.differences(need)}
    left.update(["releases"] if pipelining.releases_by_itself() else [])
    for owners, rows in tables:
        for owner, row in itertools.product(owners, rows):
            if row.need not in left:
                yield from wrapping(owner, row.name, row.wrapper)
