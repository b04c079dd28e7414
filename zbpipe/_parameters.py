"""The parameters that a pass is given, had in one walk where they come as ``module.parameters()``: torch's stage gives
them so, to I and to W of each microbatch, and its generators take as long as a tenth of a backward."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zbpipe import _C
from zbpipe._torch.modules import NAMED_MODULES, module_of_untouched_walk


def listed(weights: Iterable[torch.Tensor] | None) -> Iterable[torch.Tensor] | None:
    """What ``module.parameters()`` would give, if ``weights`` is that and nobody has begun to ask it; else ``weights``.

    The generator is exhausted then, too.
    """
    module = module_of_untouched_walk(weights)
    found = _C.parameters_of(module, NAMED_MODULES) if module is not None else None
    if found is None:
        return weights
    weights.close()  # type: ignore[union-attr]
    return found
