"""One step of ZBV on two processes, action by action, on torch's own split backward and on zbpipe: timeline.svg.

    python docs/pictures/timeline.py [FILE]

Each bar is one action as it ran: forward, input pass (I) or weight pass (W; of stage 0 the whole backward, for nobody
waits for its I). Between the bars a rank sends, or waits for its neighbour. Of seven steps after a warm-up, the one of
median length is drawn. Needs matplotlib; one thread per process, on the CPU over gloo.
"""

import itertools
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import matplotlib
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

import zbpipe

matplotlib.use("svg")
import matplotlib.pyplot as plt

RANKS, MICROBATCHES, ROWS, WIDTH, LAYERS = 2, 6, 192, 384, 6
WARM_UP, STEPS = 4, 7
COLOURS = {"forward": "#9db8c9", "I": "#1f6f8b", "W": "#e0a458"}
WORDS = {"forward": "forward", "I": "input pass (I)", "W": "weight pass (W)"}


def stage_module():
    blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    return nn.Sequential(*blocks)


def steps_of(rank, side):
    """The recorded steps of one rank: for each, (kind, stage, microbatch, begin, end) of its actions, in seconds."""
    torch.manual_seed(rank)
    mine = [rank, 2 * RANKS - 1 - rank]
    stages = [PipelineStage(stage_module(), i, 2 * RANKS, torch.device("cpu")) for i in mine]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().mean())
    x = torch.randn(MICROBATCHES * ROWS, WIDTH)
    found = []
    with zbpipe.patch() if side == "zbpipe" else torch.enable_grad():
        for step in range(WARM_UP + STEPS):
            dist.barrier()
            with zbpipe.memory.record(max_events=0) as recording:
                with recording.phase("clock"):
                    now = time.monotonic()  # one clock for all processes
                recording.watch(schedule)
                schedule.step(*([x] if 0 in mine else []), **({"target": x} if 2 * RANKS - 1 in mine else {}))
            for stage in stages:
                stage.submod.zero_grad()
                stage.clear_runtime_states()
            if step >= WARM_UP:
                clock, *actions = recording.phases
                begin = now - clock.begin_ns / 1e9
                found.append(
                    [(p.kind, p.stage, p.microbatch, begin + p.begin_ns / 1e9, begin + p.end_ns / 1e9) for p in actions]
                )
    return found


def work(rank, port, file):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, timeout=timedelta(minutes=5)
    )
    sides = {}
    for side in ("torch", "zbpipe"):
        of_ranks = [None] * RANKS
        dist.all_gather_object(of_ranks, steps_of(rank, side))
        steps = sorted(zip(*of_ranks, strict=True), key=length)
        sides[side] = steps[len(steps) // 2]
    if rank == 0:
        draw(sides, file)
    dist.destroy_process_group()


def length(step):
    actions = list(itertools.chain.from_iterable(step))
    return max(end for *_, end in actions) - min(begin for *_, begin, _ in actions)


def draw(sides, file):
    plt.rcParams.update({"svg.hashsalt": "zbpipe", "font.size": 9, "svg.fonttype": "path"})
    figure, panels = plt.subplots(len(sides), 1, sharex=True, figsize=(9.5, 3.6), layout="constrained")
    names = {"torch": "torch.distributed.pipelining", "zbpipe": "the same schedule after zbpipe.patch()"}
    for axes, (side, step) in zip(panels, sides.items(), strict=True):
        start = min(begin for rank in step for *_, begin, _ in rank)
        for row, rank in enumerate(step):
            for kind, _, microbatch, begin, end in rank:
                left, width = 1e3 * (begin - start), 1e3 * (end - begin)
                axes.barh(row, width, left=left, height=0.78, color=COLOURS[kind], edgecolor="white", linewidth=0.4)
                if width > 0.9 and microbatch is not None:
                    axes.text(
                        left + width / 2, row, str(microbatch), ha="center", va="center", fontsize=6.5, color="white"
                    )
        axes.set_title(f"{names[side]}: {1e3 * length(step):.1f} ms", loc="left", fontsize=9.5, fontweight="bold")
        axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel("milliseconds from the step's first action; numbers are microbatches")
    boxes = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(
        boxes, [WORDS[kind] for kind in COLOURS], loc="outside upper right", ncols=3, frameon=False, fontsize=8
    )
    figure.savefig(file, metadata={"Date": None})


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg")).absolute()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, target), nprocs=RANKS)
