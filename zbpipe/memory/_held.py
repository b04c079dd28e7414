"""What parameter groups hold between I and W.

Note [To whom held bytes belong]

A storage is counted once in every sum, however many tensors, tasks and groups hold it. It belongs to each parameter
whose gradient is computed from it. Where several share it (a layer's output gradient: the weight and the bias), it
shows in full in each of their rows. So rows may add up to more than the total, and ``alone`` (what is held for that
parameter and no other) to less. A module's bytes are those of all parameters below it, each storage once.

Note [What counts as held]

Held is what W will read, even if somebody else holds it, too: what tasks hold, and what the nodes between tasks and
weights have saved. Not counted are:

- the memory of a parameter, or of a buffer of the given module, since it lives anyway;
- what saved-tensor hooks keep until W unpacks it, such as a checkpointed region's input (``incomplete`` says so);
- what an ``autograd.Function`` keeps on its context beside its saved tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from zbpipe import _C
from zbpipe._C import ParamGroup
from zbpipe._formatting import Unit, argument, in_words, table
from zbpipe._tasks import tasks_of


@dataclass(frozen=True)
class HeldStorage:
    """One block of memory that W will read.

    ``bytes`` is its whole size. ``roles`` are those of the tensors in it: "matrix" and "output gradient" (the two
    factors of a product), "saved" (by a node that W runs again), "light gradient" (of a vector, computed in I),
    "kept gradient" (of a matrix whose node ran whole in I), "waiting gradient" (a W that raised could not add it).
    ``nodes`` names the autograd nodes that hold it, ``shapes`` the tensors' shapes, ``parameters`` whom it serves.
    """

    bytes: int
    device: torch.device
    dtype: torch.dtype
    roles: tuple[str, ...]
    nodes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class ParameterRow:
    """What is held for one parameter: ``bytes`` in all, ``alone`` for no other one. ``shape`` is the parameter's.

    ``name`` is the one in the module, or "dtype[shape] #n" for the n-th unknown parameter.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    alone: int


@dataclass(frozen=True)
class Held:
    """What groups hold. See Note [To whom held bytes belong]; all sizes in bytes. ``print`` shows a table.

    ``bytes`` is what they hold; see Note [What counts as held]. ``parameters`` is sorted by bytes, the most first.
    ``incomplete`` is empty, or says what could not be counted.
    """

    storages: tuple[HeldStorage, ...]
    parameters: tuple[ParameterRow, ...]
    groups: int
    spent: int
    incomplete: str = ""
    _names: dict[str, list[str]] = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> int:
        """Of all storages, each once."""
        return sum(storage.bytes for storage in self.storages)

    @property
    def by_parameter(self) -> dict[str, int]:
        """Bytes held for each parameter, shared storages in full."""
        return {row.name: row.bytes for row in self.parameters}

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes held for the parameters of each module, "" for the whole; empty if no module was given.

        A parameter under several names counts for each module that has one.
        """

        def modules(storage: HeldStorage) -> Iterator[str]:
            for name in (name for parameter in storage.parameters for name in self._names.get(parameter, ())):
                # "" and "a", "a.b" for "a.b.weight".
                yield from accumulate(["", *name.split(".")[:-1]], lambda outer, inner: f"{outer}.{inner}".lstrip("."))

        return dict(sorted(_sums(self.storages, modules).items()))

    @property
    def by_role(self) -> dict[str, int]:
        """Bytes by role; a storage in several roles counts under all of them, joined by " + "."""
        return dict(_sums(self.storages, lambda storage: [" + ".join(storage.roles)]).most_common())

    def __str__(self) -> str:
        spent = f", {self.spent} of them spent" if self.spent else ""
        lines = [f"{in_words(self.bytes)} held in {len(self.storages)} storages by {self.groups} groups{spent}"]
        lines += [f"  {in_words(size)} {role}" for role, size in self.by_role.items()]
        lines += [f"incomplete: {self.incomplete}"] if self.incomplete else []
        unit = Unit.of(max((row.bytes for row in self.parameters), default=0))
        rows = [(row.name, str(list(row.shape)), unit(row.bytes), unit(row.alone)) for row in self.parameters]
        if rows:
            lines += ["", table(("parameter", "shape", f"held, {unit.name}", f"alone, {unit.name}"), rows, left=2)]
        return "\n".join(lines)


def held(groups: ParamGroup | Iterable[Any], module: torch.nn.Module | None = None) -> Held:
    """Counts what parameter groups hold for W, without running, unpacking or keeping anything.

    Args:
        groups: a group or groups of :func:`zbpipe.stage_backward_input`, of any number of microbatches. Spent ones
            hold nothing.
        module: whose parameters' names to use, and whose buffers not to count.

    Returns:
        The bytes by storage, parameter, module and role; see :class:`Held`. It holds no tensor.

    Raises:
        TypeError: an entry is no group, or ``module`` is no module.
        RuntimeError: a group's weight pass is running.

    Source:
        The memory tests by forward, I and W that pytorch/pytorch PR 138119 and 138504 wished for.
    """
    if not isinstance(groups, (ParamGroup, Iterable)):
        raise TypeError(f"groups is {argument(groups)}; expected a group or groups of stage_backward_input")
    if not isinstance(module, (torch.nn.Module, type(None))):
        raise TypeError(f"module is {argument(module)}; expected a torch.nn.Module, or None")
    listed = [groups] if isinstance(groups, ParamGroup) else list(groups)
    names: dict[int, list[str]] = {}  # by id(): the parameters are alive while a group is
    for name, parameter in () if module is None else module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    of_module = {known[0]: known for known in names.values()}
    alive = _C.storages_of([] if module is None else [*module.parameters(), *module.buffers()])
    shapes: dict[str, tuple[int, ...]] = {}  # of the parameters that are served
    parts: dict[int, list[HeldStorage]] = {}  # per storage one of each tensor in it
    incomplete: dict[str, None] = {}  # in order, without repetition

    def name_of(weight: torch.Tensor) -> str:
        unknown = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)} #{len(names) - len(of_module)}"
        name = names.setdefault(id(weight), [unknown])[0]
        if name not in shapes:
            alive.update(_C.storages_of([weight]))
            shapes[name] = tuple(weight.shape)
        return name

    for i, group in enumerate(listed):
        if not isinstance(group, ParamGroup):
            wanted = "a ParamGroup, as zbpipe.stage_backward_input returns them"
            raise TypeError(f"groups[{i}] is a {type(group).__name__}; expected {wanted}")
        for node, _, _, is_packed, _, tensors in tasks_of(group):
            if is_packed:
                incomplete["what saved-tensor hooks (checkpointing, offloading) keep for W is not counted"] = None
            nodes = () if node is None else (node,)
            for role, place, size, shape, dtype, device, weights in tensors:
                part = HeldStorage(size, device, dtype, (role,), nodes, (shape,), tuple(map(name_of, weights)))
                parts.setdefault(place, []).append(part)
    if parts.pop(0, None):
        incomplete["tensors without a storage of their own, such as sparse ones, are not counted"] = None
    storages = [_merged(those) for place, those in parts.items() if place not in alive]
    every = _sums(storages, lambda storage: storage.parameters)
    alone = _sums(storages, lambda storage: storage.parameters if len(storage.parameters) == 1 else ())
    rows = [ParameterRow(name, shape, every[name], alone[name]) for name, shape in shapes.items()]
    storages.sort(key=lambda storage: -storage.bytes)
    rows.sort(key=lambda row: -row.bytes)
    spent = sum(group.spent for group in listed)
    return Held(tuple(storages), tuple(rows), len(listed), spent, "; ".join(incomplete), of_module)


def _merged(parts: list[HeldStorage]) -> HeldStorage:
    def every(name: str) -> Any:
        return tuple(dict.fromkeys(one for part in parts for one in getattr(part, name)))

    return replace(parts[0], **{name: every(name) for name in ("roles", "nodes", "shapes", "parameters")})


def _sums(storages: Iterable[HeldStorage], keys: Callable[[HeldStorage], Iterable[str]]) -> Counter[str]:
    """Bytes by key; a storage counts once for each of its keys."""
    sums: Counter[str] = Counter()
    for storage in storages:
        sums.update(dict.fromkeys(keys(storage), storage.bytes))
    return sums
