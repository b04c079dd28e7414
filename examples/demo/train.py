"""One training run on one rank, and the ordinary backward with which every run is compared."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from demo.config import Config, ScheduleKind
from demo.measure import StepMemory, knowing_blocks, measure_step
from demo.model import Block, loss_fn
from demo.text import batch

Gradients = dict[str, torch.Tensor | None]
"""Gradients by ``"<stage>.<parameter>"``, averaged over microbatches; None where a parameter has none."""


@dataclass
class Difference:
    """How far two sets of gradients are apart.

    ``absolute`` is the largest difference of any element. ``relative`` is, over all parameters, the largest difference
    within one parameter divided by the largest gradient of that parameter. Infinite where one side alone has a gradient
    or a difference is not a number.
    """

    absolute: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True)
class Step:
    """One training step over all ranks: the mean ``loss`` of its microbatches (nats per byte), the wall time of the
    slowest rank and the CPU time of all ranks together (all threads), in seconds.
    """

    loss: float
    seconds: float
    cpu_seconds: float


@dataclass
class Run:
    """One rank's results of one run: a schedule, trained on one side.

    ``steps`` has an item per step and is the same on all ranks. ``from_ordinary`` and ``from_torch`` compare this
    rank's gradients of the first step. ``error`` is None, or why this rank could not finish; ``failed_at`` is then the
    time of day.
    """

    schedule: str
    side: str
    steps: list[Step] = field(default_factory=list)
    from_ordinary: Difference | None = None
    from_torch: Difference | None = None
    memory: StepMemory | None = None
    error: str | None = None
    failed_at: float = math.inf


def ordinary_gradients(stages: Sequence[nn.Sequential], text: torch.Tensor, config: Config) -> Gradients:
    """Gradients of the first step from ``loss.backward()`` on the whole, unsplit model, microbatch by microbatch."""
    model = nn.Sequential(*copy.deepcopy(list(stages))).to(config.device)
    tokens, targets = batch(text, 0, config)
    for x, y in zip(tokens.chunk(config.microbatches), targets.chunk(config.microbatches), strict=True):
        loss_fn(model(x), y).backward()  # type: ignore[no-untyped-call]
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        found[name] = None if parameter.grad is None else parameter.grad / config.microbatches
    return found


def difference(ours: Gradients, theirs: Gradients) -> Difference:
    """Compares the gradients in ``ours`` with those of the same names in ``theirs``."""
    result = Difference()
    for name, mine in ours.items():
        other = theirs[name]
        if mine is None and other is None:
            continue
        if mine is None or other is None:
            return Difference(math.inf, math.inf)
        apart = float((mine - other).abs().max())
        if math.isnan(apart):
            return Difference(math.inf, math.inf)
        result.absolute = max(result.absolute, apart)
        if apart > 0:
            scale = float(other.abs().max())
            result.relative = max(result.relative, apart / scale if scale > 0 else math.inf)
    return result


class Trainer:
    """One rank's part of a pipeline: its stages, torch's schedule over them, and an optimizer.

    Starts from copies of ``models`` (the whole model's stages), so that every run starts from the same weights. The
    default process group must exist.
    """

    def __init__(self, rank: int, kind: ScheduleKind, models: Sequence[nn.Sequential], config: Config) -> None:
        self.config = config
        self.device = torch.device(config.device)
        indices = config.stages_of(rank, kind)
        self.has_first = 0 in indices
        self.has_last = config.num_stages - 1 in indices
        self.rank_of_last = config.rank_of_last_stage(kind)
        self.modules = {index: copy.deepcopy(models[index]).to(self.device) for index in indices}
        for module in self.modules.values():
            for block in module:
                if isinstance(block, Block):
                    block.checkpointed = kind.checkpointed
        self.stages = [PipelineStage(m, i, config.num_stages, self.device) for i, m in self.modules.items()]
        schedule_class = getattr(pipelining, kind.class_name)
        self.schedule = schedule_class(self.stages, config.microbatches, loss_fn=loss_fn)
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(0.9, 0.95))

    def forward_backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        """Runs the schedule once; gradients start from None. Returns this rank's mean loss, NaN without the last stage.

        ``tokens`` and ``targets`` are ``int64 [batch, context]``.
        """
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        self.schedule.step(
            *([tokens] if self.has_first else []),
            target=targets if self.has_last else None,
            losses=losses if self.has_last else None,
            return_outputs=False,
        )
        return float(torch.stack([loss.detach() for loss in losses]).mean()) if losses else math.nan

    def train_step(self, tokens: torch.Tensor, targets: torch.Tensor) -> Step:
        """One whole step with its optimizer. Returns the same on all ranks."""
        self._wait_for_all()
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = self.forward_backward(tokens, targets)
        self.optimizer.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        mine = [loss, seconds, time.process_time() - cpu_start]
        everyone = [torch.empty(3, dtype=torch.float64, device=self.device) for _ in range(self.config.ranks)]
        dist.all_gather(everyone, torch.tensor(mine, dtype=torch.float64, device=self.device))
        losses, of_ranks, cpu_seconds = torch.stack(everyone).T.tolist()
        return Step(losses[self.rank_of_last], max(of_ranks), sum(cpu_seconds))

    def gradients(self) -> Gradients:
        """Copies of this rank's gradients as they stand."""
        return {
            f"{index}.{name}": None if parameter.grad is None else parameter.grad.clone()
            for index, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }

    def clear(self) -> None:
        """Drops the last step's gradients and states, so that the next step starts with weights and buffers alone."""
        self.optimizer.zero_grad(set_to_none=True)
        for stage in self.stages:
            stage.clear_runtime_states()

    def _wait_for_all(self) -> None:
        """A barrier that works alike on gloo and NCCL."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def train(
    trainer: Trainer,
    text: torch.Tensor,
    run: Run,
    on_first_gradients: Callable[[Gradients], None],
    on_step: Callable[[Step], None],
) -> None:
    """Trains for ``config.steps`` steps, then measures the memory of another one, and fills ``run``.

    ``on_first_gradients`` gets the gradients of step 0 (computed once more, on untouched weights, before training
    starts, so that step times stay clean). ``on_step`` gets each step.
    """
    config = trainer.config
    trainer.forward_backward(*batch(text, 0, config))
    on_first_gradients(trainer.gradients())
    for number in range(config.steps):
        step = trainer.train_step(*batch(text, number, config))
        run.steps.append(step)
        on_step(step)
    _measure(trainer, text, run)


def _measure(trainer: Trainer, text: torch.Tensor, run: Run) -> None:
    config = trainer.config
    last = batch(text, config.steps, config)
    with knowing_blocks(trainer.device):
        trainer.forward_backward(*last)
        trainer.clear()
        run.memory = measure_step(lambda: trainer.forward_backward(*last), trainer.stages, trainer.device)
