"""What zbpipe.explain returns."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zbpipe._formatting import OPERATIONS, Unit, in_words, table
from zbpipe._policy import Policy

WIDTH = 80  # of what is printed


@dataclass(frozen=True)
class Use:
    """One gradient of a parameter, as the backward computes it.

    ``node`` is the autograd node that uses the parameter. ``runs_in`` is the pass that computes the gradient, "W" or
    "I"; W adds it in either case. ``why`` says why that pass. ``product`` has the shapes of the two matrices that W
    multiplies, such as "[16, 64] @ [64, 8]", or is empty. ``flops`` are the floating-point operations of that product:
    0 for what runs in I, None where they are not known ("?" in the table).
    """

    node: str
    runs_in: str
    why: str
    product: str
    flops: int | None


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter: its ``uses``, none if it gets no gradient, which ``note`` explains.

    ``bytes`` is what a microbatch holds for the parameter from I to W. ``alone`` is the part that serves no other
    parameter. ``note`` also says what makes W go through libtorch's engine instead of adding directly: hooks, a
    computation between the parameter and its use.
    """

    name: str
    shape: tuple[int, ...]
    uses: tuple[Use, ...]
    bytes: int
    alone: int
    note: str

    @property
    def runs_in(self) -> str:
        """ "W", "I", "I and W", or "" for a parameter that gets no gradient."""
        return " and ".join(sorted({use.runs_in for use in self.uses}))

    @property
    def flops(self) -> int | None:
        """Of all its uses; None if those of one are not known."""
        counts = [use.flops for use in self.uses]
        return None if None in counts else sum(count for count in counts if count is not None)


@dataclass(frozen=True)
class Explanation:
    """What zbpipe.explain found, for one microbatch; ``print`` shows a table.

    ``parameters`` are in the module's order. ``groups`` is the number of parameter groups. ``bytes_held`` is what they
    hold from I to W, each storage once. ``flops_in_w`` are the FLOPs of the products of W, each once.
    ``flops_are_known`` is True if W multiplies nothing else. W may multiply more where it recomputes a region, or
    runs handed-over work, nodes between a product and its parameter, or an output without a stage input behind it.
    ``notes`` say what is not counted.
    """

    parameters: tuple[ParameterPlan, ...]
    groups: int
    bytes_held: int
    flops_in_w: int
    flops_are_known: bool
    policy: Policy
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """All of it as dictionaries, lists, strings and numbers."""
        plans = [{**dataclasses.asdict(plan), "runs_in": plan.runs_in, "flops": plan.flops} for plan in self.parameters]
        return {**vars(self), "parameters": plans, "policy": self.policy.as_dict()}  # of the policy nothing is copied

    def __str__(self) -> str:
        in_w = sum(1 for plan in self.parameters if "W" in plan.runs_in)
        said = (
            f"W computes the gradients of {in_w} of {len(self.parameters)} parameters in {self.groups} "
            f"group{'s' * (self.groups != 1)}: "
            f"{'' if self.flops_are_known else 'at least '}"
            f"{Unit.of(self.flops_in_w, OPERATIONS).words(self.flops_in_w)}; "
            f"{in_words(self.bytes_held)} are held per microbatch"
        )
        flops = [use.flops or 0 for plan in self.parameters for use in plan.uses]
        work = Unit.of(max(flops, default=0), OPERATIONS)
        memory = Unit.of(max((plan.bytes for plan in self.parameters), default=0))
        rows = [row for plan in self.parameters for row in _rows(plan, memory, work)]
        header = ("parameter", "shape", "in", f"held, {memory.name}", work.name)
        lines = table(header, [cells for cells, _ in rows], left=3)
        head, rule, *others = lines.splitlines()
        above = [line for text in (said, *self.notes) for line in textwrap.wrap(text, WIDTH)]
        below = [part for line, (_, how) in zip(others, rows, strict=True) for part in (line, *_indented(how))]
        return "\n".join([*above, "", head, rule, *below])


def _rows(plan: ParameterPlan, memory: Unit, work: Unit) -> Iterator[tuple[tuple[str, ...], str]]:
    """A row for each use, and how its gradient comes to be."""
    name, shape, size, note = plan.name, str(list(plan.shape)), memory(plan.bytes), plan.note
    if not plan.uses:
        yield (name, shape, "-", size, ""), note
    for use in plan.uses:
        flops = "?" if use.flops is None else work(use.flops) if use.flops else ""
        how = "; ".join(filter(None, (use.product, use.why, note)))
        yield (name, shape, use.runs_in, size, flops), ": ".join(filter(None, (use.node, how)))
        name = shape = size = note = ""  # which stand in the first row alone


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="    ", subsequent_indent="      ")
