"""A word where the weight passes of a zero-bubble schedule have nothing to do."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from zbpipe._C import ParamGroup
from zbpipe._formatting import in_words
from zbpipe._policy import get_policy
from zbpipe._tasks import place_of, tasks_of
from zbpipe._torch.autograd import version_of

ENOUGH = 0.2  # of the elements of the matrices that take a gradient: W's share from which nothing is said

# Nodes that lay a matrix beside activations, such as a table's rows: its gradient costs nothing that W could take over.
_LIGHT = ("Cat", "Stack", "Where", "IndexPut", "CopySlices", "Div")
# Of what runs whole in I though no policy asks for that.
_REMEDIES = {
    "function": 'zbpipe.compile, or torch.compile with backend="zbpipe", around the blocks; or zbpipe.defer in the '
    "Function's backward",
    "post hook": "no hook on the node (Node.register_hook)",
    "unknown": "another operation",
    "self-check": "a torch that zbpipe knows, or a newer zbpipe",
}

stages: weakref.WeakSet[Any] = weakref.WeakSet()  # those whose first I has been looked at
_said: set[str] = set()


@contextlib.contextmanager
def looking_at_first(stage: Any, microbatch: int) -> Iterator[None]:
    """Around a stage's I. After its first one warns, on the logger ``zbpipe``, if W is left next to nothing."""
    if stage in stages:
        yield
        return
    before = {weight: _sums_of(weight) for weight in _matrices(stage.submod.parameters())}
    yield
    stages.add(stage)
    with contextlib.suppress(Exception):  # also of a logger's filters
        inner = [weight for weight, sums in before.items() if _sums_of(weight) != sums]
        said = word(stage.backward_state[microbatch][1], inner)
        if said and (said := f"stage {stage.stage_index}: {said}") not in _said:
            _said.add(said)
            logging.getLogger("zbpipe").warning("%s", said)


def word(groups: Iterable[ParamGroup], inner: Iterable[torch.Tensor]) -> str:
    """What is to be said after an I that returned these groups; "" if W has enough to do, or if the policy leaves it
    nothing. ``inner``: weights that have got a gradient within I, by a backward of a reentrant checkpoint's own."""
    policy = get_policy()
    if policy.defer == "nothing" or policy.checkpoint == "input_pass":
        return ""
    in_w, in_i = set[torch.Tensor](), dict[torch.Tensor, set[tuple[str, str, str]]]()
    kept: dict[int, int] = {}  # bytes by storage
    for node, kind, why, _, faces, tensors in (task for group in groups for task in tasks_of(group)):
        of_i = [tensor for tensor in tensors if tensor[0] == "kept gradient"]
        kept |= {place: size for _, place, size, *_ in of_i}
        for weight in _matrices(weight for *_, weights in faces for weight in weights):
            if kind == "handed over" and any(weight in weights for *_, weights in of_i):
                use = node, "its gradient is returned beside what is handed over", ""
            elif kind == "whole" and why in _REMEDIES and not node.startswith(_LIGHT):
                use = node, place_of(node, kind, why, policy.defer)[1], _REMEDIES[why]
            else:
                in_w |= {weight} if kind != "whole" else set()
                continue
            in_i.setdefault(weight, set()).add(use)
    in_i = {weight: uses for weight, uses in in_i.items() if weight not in in_w}
    inner = set(inner) - in_w - in_i.keys()
    every = [*in_w, *in_i, *inner]
    if _elements(in_w) >= ENOUGH * _elements(every):
        return ""
    parts = [
        f"the weight pass computes the gradients of {len(in_w)} of {len(every)} matrices, "
        f"{100 * _elements(in_w) / _elements(every):.0f} % of their elements, so it fills next to no bubble"
    ]
    uses = Counter(use for weight in in_i for use in in_i[weight])
    parts += [f"{count} by {node}: {reason}" for (node, reason, _), count in uses.most_common(4)]
    remedies = dict.fromkeys(remedy for *_, remedy in uses if remedy)
    if inner:
        remedies["checkpoint with use_reentrant=False"] = None
        parts.append(f"{len(inner)} by a backward within the input pass, as a reentrant checkpoint's")
    if kept:
        parts.append(f"{in_words(sum(kept.values()))} of gradients wait for the weight pass, per microbatch")
    return f"{'; '.join(parts)}. What helps: {'; '.join([*remedies, 'zbpipe.explain, which lists each parameter'])}"


def _matrices(weights: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (weight for weight in weights if not is_lazy(weight) and weight.dim() > 1)  # an unused lazy one has no shape


def _elements(weights: Iterable[torch.Tensor]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)


def _sums_of(weight: Any) -> list[tuple[int, int]]:
    """Which tensors take the weight's gradient, and how often these were written."""
    sums = (weight.grad, getattr(weight, "main_grad", None))
    return [(id(one), version_of(one)) for one in sums if isinstance(one, torch.Tensor)]
