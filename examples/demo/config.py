"""The demo's configuration, and the schedules and sides that it compares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STAGES_PER_RANK = 2
"""Virtual stages on each rank: ZBV and DualPipeV need exactly two."""


@dataclass(frozen=True)
class ScheduleKind:
    """One of torch's pipeline schedules.

    ``label`` is what tables show, ``class_name`` its class in ``torch.distributed.pipelining``. ``v_shaped`` says how
    stages are dealt to ranks: rank r of R has stages r and 2R-1-r if True, r and R+r if False. ``checkpointed`` says
    whether each block runs under ``torch.utils.checkpoint``.
    """

    label: str
    class_name: str
    v_shaped: bool
    checkpointed: bool = False


SCHEDULES = {
    "1f1b": ScheduleKind("Interleaved 1F1B", "ScheduleInterleaved1F1B", v_shaped=False),  # splits nothing: to compare
    "zbv": ScheduleKind("ZBV", "ScheduleZBVZeroBubble", v_shaped=True),
    "interleaved": ScheduleKind("Interleaved zero bubble", "ScheduleInterleavedZeroBubble", v_shaped=False),
    "dualpipev": ScheduleKind("DualPipeV", "ScheduleDualPipeV", v_shaped=True),
    "checkpointed": ScheduleKind("ZBV, checkpointed", "ScheduleZBVZeroBubble", v_shaped=True, checkpointed=True),
}

SIDES = ("torch", "zbpipe")
"""The two backwards, in the order in which they run."""


@dataclass(frozen=True)
class Config:
    """One run of the demo. ``width`` is the model's hidden size, ``context`` a sequence's length in bytes of text.

    ``head_width`` is the hidden size of the last stage's head, which makes that stage cost about three times as much as
    another one.
    """

    ranks: int = 2
    steps: int = 12
    schedules: tuple[str, ...] = tuple(SCHEDULES)
    out: Path = Path("zbpipe_demo.png")
    json: Path | None = None
    device: str = "cpu"
    seed: int = 1667
    width: int = 96
    heads: int = 4
    blocks_per_stage: int = 4
    head_width: int = 24 * 96
    context: int = 64
    microbatches: int = 8
    microbatch_size: int = 4
    learning_rate: float = 3e-3

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return STAGES_PER_RANK * self.ranks

    @property
    def batch_size(self) -> int:
        """Sequences in one step, over all microbatches."""
        return self.microbatches * self.microbatch_size

    def stages_of(self, rank: int, kind: ScheduleKind) -> tuple[int, ...]:
        """Indices of the stages that ``rank`` owns under ``kind``, ascending."""
        last = self.num_stages - 1 - rank if kind.v_shaped else self.ranks + rank
        return (rank, last)

    def rank_of_last_stage(self, kind: ScheduleKind) -> int:
        """The rank that computes the loss."""
        return 0 if kind.v_shaped else self.ranks - 1
