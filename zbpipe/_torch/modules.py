"""What is private in modules: their dictionaries, the cache of parametrizations."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

# A module's dictionaries, and the word for one entry.
REGISTERED = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


def is_under_fully_shard(module: nn.Module) -> bool:
    """Whether the module is part of one under fully_shard."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def parametrizations_cache() -> dict[Any, Any]:
    """The weights that parametrizations have computed within ``parametrize.cached()``."""
    return parametrize._cache
