"""A parameter group's tasks in words: what W will do for which weight, and why I does the rest."""

from __future__ import annotations

from typing import Any

import torch

from zbpipe._C import ParamGroup

# In the order of csrc/core/pass/zbp_layout.h and zbp_kind.h.
_KINDS = ("product", "deferred", "whole", "root", "handed over")  # the last one is a whole node's, -1
_WHYS = ["separable", "root", "post hook", "policy", "excluded", "function", "unknown", "self-check"]
_WHYS += ["packed", "matrices", "light"]


def tasks_of(group: ParamGroup) -> list[tuple[Any, ...]]:
    """Each task as csrc/shim/group/zbp_describe.h says, with words in the place of numbers, and with a list of weights
    in the place of each end or ends."""
    weights, hops, tasks = group._described
    hops_from: dict[int, list[tuple[int, int]]] = {}
    for outside, weight, further in hops:
        hops_from.setdefault(outside, []).append((weight, further))

    def behind(*ends: tuple[int, int]) -> list[torch.Tensor]:
        ahead, met = set(ends), set(ends)
        while ahead := {end for weight, outside in ahead if weight < 0 for end in hops_from[outside]} - met:
            met |= ahead
        return [weights[weight] for weight in sorted({weight for weight, _ in met if weight >= 0})]

    return [
        (
            name,
            kind if isinstance(kind, str) else _KINDS[kind],
            "" if why is None else _WHYS[why],
            is_packed,
            [(*face, behind(end)) for *face, end in faces],
            [(*one, behind(*ends)) for *one, ends in tensors],
        )
        for name, kind, why, is_packed, faces, tensors in tasks
    ]


def place_of(node: str, kind: str, why: str, defer: str) -> tuple[str, str]:
    """The pass, "W" or "I", that computes the gradients of a task of this kind, and why. defer: the policy's."""
    if kind == "handed over":
        return "W", "handed over by zbpipe.defer"
    if kind == "root":
        return "W", "no stage input is behind it: W runs its whole backward"
    if why == "matrices":
        return "W", "the node is run again: its factors are of a subclass, sparse, complex, conjugated or left packed"
    if kind in ("product", "deferred"):
        return "W", "" if kind == "product" else "the node is run again for its weights"
    compiled = node.startswith("CompiledFunction")
    return "I", {
        "function": f"{'compiled' if compiled else 'custom Function that defers nothing'}: runs whole in I",
        "post hook": "a hook on its node is owed all of its gradients at once",
        "policy": f"policy defer={defer!r}",
        "excluded": "policy exclude= names one of its parameters",
        "unknown": "the node is not known to compute its weights' gradients apart",
        "self-check": "self-check: this torch differs from zbpipe in what the node computes or saves",
        "packed": "the policy leaves what is checkpointed or packed to I (checkpoint)",
        "light": "a vector: policy defer='matrices'",
    }[why]
