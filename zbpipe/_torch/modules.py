"""What is private in modules: their dictionaries, hooks before a forward, what parametrizations have computed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

# What a module registers, and what one entry of it is called.
REGISTERED = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


def hooks_before_forward(module: nn.Module) -> Iterable[Any]:
    return module._forward_pre_hooks.values()


def is_under_fully_shard(module: nn.Module) -> bool:
    """Whether a module that fully_shard wraps has this one, and its weights."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def parametrizations_cache() -> dict[Any, Any]:
    """What parametrizations have computed within ``parametrize.cached()``."""
    cache: dict[Any, Any] = parametrize._cache
    return cache
