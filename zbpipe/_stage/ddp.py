"""DistributedDataParallel around I and W: the wrapper, or the composable ``replicate``, which has one in its state.

Nothing is reduced here: DDP's hooks reduce in the last W, bucket by bucket, while W runs.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel

from zbpipe._formatting import enumeration
from zbpipe._torch import ddp
from zbpipe._torch.autograd import leaves_behind, version_of


@contextlib.contextmanager
def accumulating(module: Any) -> Iterator[None]:
    """A context in which a forward of `module` does not make DDP expect a backward."""
    if isinstance(module, DistributedDataParallel):
        with module.no_sync(), ddp.without_delayed_reduction(module):
            yield
    elif (state := ddp.replicate_state(module)) is not None:
        with ddp.without_sync(state) as driver, ddp.without_delayed_reduction(driver):
            yield
    else:
        yield


@contextlib.contextmanager
def contributing(
    stage: Any, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool
) -> Iterator[tuple[dict[str, Any], bool]]:
    """A context for a backward, or a W, of a DDP stage. It yields replacements for the last two arguments.

    Note [The first backward of a static graph]
    With static_graph DDP counts the calls of each weight's hook until it first reduces. From then on it waits for as
    many calls. It must count a single backward, not all those of a step. So the very first backward is reduced by
    itself, when it has ended, as DDP does with no_sync outside of pipelines.
    """
    driver = ddp.driver(stage.submod)
    counts = ddp.counts_first_backward(driver)
    if counts:
        ddp.expect_backward(driver, [])
    elif last_backward:
        if backward_type == "weight":
            groups, searches = bwd_kwargs["param_groups"], driver.find_unused_parameters
            if not driver.static_graph and not searches:
                _refuse_unused(stage, groups)
            served = [w for group in groups for w in group.weights] if searches and not driver.static_graph else []
            bwd_kwargs = {**bwd_kwargs, "stage_output": _mentions(served)}
        if driver is not stage.submod:  # else torch's stage does it
            ddp.expect_backward(driver, _with_tensors_for_edges(bwd_kwargs["stage_output"]))
    yield bwd_kwargs, last_backward and not counts
    if counts:
        ddp.reduce_all(driver, last_backward)


def _mentions(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors behind which DDP finds these weights, and no others."""
    with torch.enable_grad():
        return [weight.view_as(weight) for weight in weights]


def _with_tensors_for_edges(outputs: Any) -> Any:
    """A stage's outputs, behind which DDP looks for unused weights. DDP takes tensors, and torch 2.15 keeps edges of
    the outputs that it has sent: tensors that lead to the same weights replace the edges."""
    if not isinstance(outputs, (tuple, list)):
        return outputs
    edges = [output for output in outputs if isinstance(output, GradientEdge)]
    others = [output for output in outputs if not isinstance(output, GradientEdge)]
    return [*others, *_mentions(leaves_behind(edges))]


def _refuse_unused(stage: Any, param_groups: Iterable[Any]) -> None:
    """Refuses a last W without weights that DDP waits for: DDP would not reduce all gradients. Raises RuntimeError."""
    served = {id(weight) for group in param_groups for weight in group.weights}
    driver = ddp.driver(stage.submod)
    awaited = {id(w) for name, w in driver.module.named_parameters() if name not in driver.parameters_to_ignore}
    missing = [
        name
        for name, weight in stage.submod.named_parameters()
        if weight.requires_grad and id(weight) in awaited and id(weight) not in served
    ]
    if missing:
        raise RuntimeError(
            f"the step's last microbatch does not use {enumeration(missing)} of stage {stage.stage_index}, and "
            "DistributedDataParallel waits for their gradients: make it with find_unused_parameters=True"
        )


@contextlib.contextmanager
def adding_nothing(stage: Any) -> Iterator[None]:
    """A context for an I that must add to no weight's gradient: DDP reduces in W. Raises RuntimeError."""
    weights = dict(stage.submod.named_parameters())
    before = [_mark(weight.grad) for weight in weights.values()]
    yield
    added = [name for (name, weight), mark in zip(weights.items(), before, strict=True) if _mark(weight.grad) != mark]
    if added:
        raise RuntimeError(
            f"the input pass of stage {stage.stage_index} has added to the gradients of {enumeration(added)}, as a "
            "checkpoint with use_reentrant=True does, and DistributedDataParallel would not reduce all gradients; "
            "checkpoint with use_reentrant=False, or apply fully_shard"
        )


def _mark(grad: torch.Tensor | None) -> tuple[int, int] | None:
    return None if grad is None else (id(grad), version_of(grad))
