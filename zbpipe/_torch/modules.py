"""What is private in modules: their dictionaries, what parametrizations have computed."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

# What a module registers, and what one entry of it is called.
REGISTERED = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


def is_under_fully_shard(module: nn.Module) -> bool:
    """Whether a module that fully_shard wraps has this one, and its weights."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def parametrizations_cache() -> dict[Any, Any]:
    """What parametrizations have computed within ``parametrize.cached()``."""
    cache: dict[Any, Any] = parametrize._cache
    return cache
