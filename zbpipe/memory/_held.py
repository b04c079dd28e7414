"""What parameter groups hold between I and W.

Note [To whom held bytes belong]

A storage is counted once in every sum, however many tensors, tasks and groups hold it. It belongs to
each parameter whose gradient is computed from it: to one alone, or shared, and then it shows in full in
each of their rows (a layer's output gradient: the weight's and the bias's). So rows may add up to more than
the total, and ``alone`` (what is held for that parameter and no other) to less. A module's bytes are those of
all parameters below it, each storage once.

Note [What counts as held]

What W will read, whoever else holds it too: what tasks hold, and what the nodes between them and the weights have
saved. But not the memory of a parameter, or of a buffer of the module that was given: it lives anyway. Nor what
saved-tensor hooks keep to be unpacked in W, as a checkpointed region its input: ``incomplete`` says so. Nor what an
``autograd.Function`` keeps on its context beside its saved tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from zbpipe import _C
from zbpipe._C import ParamGroup
from zbpipe._formatting import Unit, in_words, table
from zbpipe._torch.autograd import storage_id


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
    _names: dict[str, tuple[str, ...]] = field(default_factory=dict, repr=False)

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
        sums: dict[str, int] = {}
        for storage in self.storages:
            names = {name for parameter in storage.parameters for name in self._names.get(parameter, ())}
            for prefix in {prefix for name in names for prefix in _prefixes(name)}:
                sums[prefix] = sums.get(prefix, 0) + storage.bytes
        return dict(sorted(sums.items()))

    @property
    def by_role(self) -> dict[str, int]:
        """Bytes by role; a storage in several roles counts under all of them, joined by " + "."""
        sums: dict[str, int] = {}
        for storage in self.storages:
            role = " + ".join(storage.roles)
            sums[role] = sums.get(role, 0) + storage.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        spent = f", {self.spent} of them spent" if self.spent else ""
        lines = [
            f"{in_words(self.bytes)} held in {len(self.storages)} storages by {self.groups} groups{spent}",
            *(f"  {in_words(size)} {role}" for role, size in self.by_role.items()),
        ]
        if self.incomplete:
            lines.append(f"incomplete: {self.incomplete}")
        unit = Unit.of(max((row.bytes for row in self.parameters), default=0))
        rows = [(row.name, str(list(row.shape)), unit(row.bytes), unit(row.alone)) for row in self.parameters]
        if rows:
            lines += ["", table(("parameter", "shape", f"held, {unit.name}", f"alone, {unit.name}"), rows, left=2)]
        return "\n".join(lines)


def held(groups: ParamGroup | Iterable[Any], module: torch.nn.Module | None = None) -> Held:
    """Counts what parameter groups hold for W, without running, unpacking or keeping anything.

    Args:
        groups: a group or groups of :func:`zbpipe.stage_backward_input`, of any number of microbatches. Spent ones
            hold nothing. Dictionaries of torch's own module are taken as well, as far as they can be seen: their
            output gradients ("grads"); the saved tensors of the graph that they also keep are not counted, and
            ``incomplete`` says so.
        module: whose parameters' names to use, and whose buffers not to count.

    Returns:
        The bytes by storage, parameter, module and role; see :class:`Held`. It holds no tensor.

    Raises:
        TypeError: an entry is no group.
        RuntimeError: a group's weight pass is running.

    Source:
        The memory tests by forward, I and W that pytorch/pytorch PR 138119 and 138504 wished for.
    """
    listed = [groups] if isinstance(groups, (ParamGroup, dict)) else list(groups)
    counted = _Counted(module)
    spent = 0
    for i, group in enumerate(listed):
        if isinstance(group, ParamGroup):
            spent += group.spent
            for node, _, _, is_packed, _, tensors in group._describe():
                counted.add(node, tensors)
                if is_packed:
                    counted.incomplete[_PACKED] = 0
        elif isinstance(group, dict) and "params" in group and "intermediates" in group:
            counted.add_torch_group(group)
        else:
            raise TypeError(
                f"groups[{i}] is a {type(group).__name__}; expected a ParamGroup, as zbpipe.stage_backward_input "
                "returns them"
            )
    return counted.close(len(listed), spent)


_PACKED = "what saved-tensor hooks (checkpointing, offloading) keep for W is not counted"

_Tensor = tuple[str, int, int, tuple[int, ...], torch.dtype, torch.device, list[torch.Tensor]]
"""As ParamGroup._describe() gives them: role, storage, bytes, shape, dtype, device, the weights that it serves."""


class _Counted:
    """Collects; keeps names and numbers alone. The module is borrowed until close()."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        self.names_of: dict[int, list[str]] = {}
        self.name_of: dict[int, str] = {}  # by id(): the parameters are alive while a group is
        self.shape_of: dict[str, tuple[int, ...]] = {}
        self.found: dict[int, list[HeldStorage]] = {}  # per storage one of each tensor in it
        self.unknown = 0
        self.incomplete: dict[str, int] = {}  # in order, without repetition
        self.alive: set[int] = set()  # storages that live anyway
        if module is not None:
            self.alive = _C.storages_of([*module.parameters(), *module.buffers()])
            for name, parameter in module.named_parameters(remove_duplicate=False):
                self.names_of.setdefault(id(parameter), []).append(name)

    def name(self, weight: torch.Tensor) -> str:
        if id(weight) not in self.name_of:
            words = f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)} #{self.unknown}"
            name = self.names_of.get(id(weight), [words])[0]
            self.unknown += id(weight) not in self.names_of
            self.name_of[id(weight)] = name
            self.alive |= _C.storages_of([weight])
            self.shape_of[name] = tuple(weight.shape)
        return self.name_of[id(weight)]

    def add(self, node: str | None, tensors: Iterable[_Tensor]) -> None:
        nodes = () if node is None else (node,)
        for role, storage, size, shape, dtype, device, weights in tensors:
            names = tuple(map(self.name, weights))
            if storage == 0:
                self.incomplete["tensors without a storage of their own, such as sparse ones, are not counted"] = 0
            else:
                tensor = HeldStorage(size, device, dtype, (role,), nodes, (shape,), names)
                self.found.setdefault(storage, []).append(tensor)

    def add_torch_group(self, group: dict[str, Any]) -> None:
        self.incomplete["the saved tensors of the graph that groups of torch's own module keep cannot be seen"] = 0
        weights = [node.variable for node in group["params"]]
        for node, grads in zip(group["intermediates"] or (), group.get("grads") or (), strict=False):
            tensors = [_seen(t, weights) for t in grads if isinstance(t, torch.Tensor)]
            self.add(node.name() if node is not None else None, tensors)

    def close(self, groups: int, spent: int) -> Held:
        storages = [_merged(parts) for place, parts in self.found.items() if place not in self.alive]
        sums = {name: [0, 0] for name in self.shape_of}
        for storage in storages:
            for name in storage.parameters:
                sums[name][0] += storage.bytes
                sums[name][1] += storage.bytes if len(storage.parameters) == 1 else 0
        rows = [ParameterRow(name, shape, *sums[name]) for name, shape in self.shape_of.items()]
        return Held(
            storages=tuple(sorted(storages, key=lambda storage: -storage.bytes)),
            parameters=tuple(sorted(rows, key=lambda row: -row.bytes)),
            groups=groups,
            spent=spent,
            incomplete="; ".join(self.incomplete),
            _names={known[0]: tuple(known) for known in self.names_of.values()},
        )


def _merged(parts: list[HeldStorage]) -> HeldStorage:
    def all_of(name: str) -> Any:
        return tuple(dict.fromkeys(one for part in parts for one in getattr(part, name)))

    lists = (all_of(name) for name in ("roles", "nodes", "shapes", "parameters"))
    return HeldStorage(parts[0].bytes, parts[0].device, parts[0].dtype, *lists)


def _seen(t: torch.Tensor, weights: list[torch.Tensor]) -> _Tensor:
    storage = t.untyped_storage()
    return "output gradient", storage_id(storage), storage.nbytes(), tuple(t.shape), t.dtype, t.device, weights


def _prefixes(name: str) -> list[str]:
    """The modules that a parameter is in: "" and "a", "a.b" for "a.b.weight"."""
    parts = name.split(".")[:-1]
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
