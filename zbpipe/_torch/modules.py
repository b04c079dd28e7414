"""What is private in modules: their dictionaries, how they walk them, what parametrizations have computed."""

from __future__ import annotations

import inspect
from types import GeneratorType
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

# What a module registers, and what one entry of it is called.
REGISTERED = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}


_PARAMETERS, _NAMED_PARAMETERS = nn.Module.parameters, nn.Module.named_parameters
_NAMED_MEMBERS = nn.Module._named_members
NAMED_MODULES = nn.Module.named_modules


def module_of_untouched_walk(parameters: object) -> nn.Module | None:
    """The module, if these are its ``parameters()`` with all of its children's, nobody has begun to ask for them, and
    the walk would be torch's own; of its children NAMED_MODULES tells."""
    if type(parameters) is not GeneratorType or parameters.gi_code is not _PARAMETERS.__code__:
        return None
    frame = parameters.gi_frame
    if frame is None or inspect.getgeneratorstate(parameters) != inspect.GEN_CREATED:
        return None
    module: nn.Module = frame.f_locals["self"]
    is_torchs = (
        frame.f_locals["recurse"]
        and getattr(module.named_parameters, "__func__", None) is _NAMED_PARAMETERS
        and getattr(module._named_members, "__func__", None) is _NAMED_MEMBERS
    )
    return module if is_torchs else None


def is_under_fully_shard(module: nn.Module) -> bool:
    """Whether a module that fully_shard wraps has this one, and its weights."""
    return bool(getattr(module, "_is_fsdp_managed_module", False))


def parametrizations_cache() -> dict[Any, Any]:
    """What parametrizations have computed within ``parametrize.cached()``."""
    cache: dict[Any, Any] = parametrize._cache
    return cache
