"""One step of ZBV with checkpointed blocks on two processes, on torch's own split backward and on zbpipe.

    python docs/pictures/timeline.py          # measures: timeline.json, and draws it: timeline.svg
    python docs/pictures/timeline.py --draw   # draws what was measured

Each bar is one action as it ran: forward, input pass (I) or weight pass (W; of stage 0 the whole backward, for nobody
waits for its I). Between the bars a rank sends, or waits for its neighbour. Of nine steps after a warm-up, the one of
median length is drawn; sides take turns. The stages are those of benchmarks/checkpointed.py on two ranks. Needs
matplotlib; one thread per process, on the CPU over gloo.
"""

import itertools
import json
import socket
import sys
import time
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import zbpipe
from zbpipe.memory._export import COLOURS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import checkpointed

RANKS, MICROBATCHES, SIZES = 2, 4, checkpointed.Sizes(blocks=2, width=64, tokens=128)
WARM_UP, STEPS = 3, 9
WORDS = {"forward": "forward", "I": "input pass (I)", "W": "weight pass (W)"}
SIDES = {  # the policy, and the caption
    "torch": (None, "torch.distributed.pipelining"),
    "zbpipe": ("keep", "the same schedule after zbpipe.patch()"),
}
DATA, PICTURE = (Path(__file__).with_suffix(suffix) for suffix in (".json", ".svg"))


class Side(checkpointed.Side):
    def __init__(self, name):
        super().__init__("ScheduleZBVZeroBubble", MICROBATCHES, SIDES[name][0], SIZES, "cpu")
        self.name, self.steps = name, []

    def record(self):
        """Adds a step: (kind, stage, microbatch, begin, end) of each action of this rank, in seconds."""
        given = [self.x] if self.is_first else []
        target = {"target": self.x} if self.is_last else {}
        for stage in self.stages:
            stage.clear_runtime_states()
        with zbpipe.patch() if self.policy else torch.enable_grad():
            dist.barrier()
            with zbpipe.memory.record(max_events=0) as recording:
                with recording.phase("clock"):
                    now = time.monotonic()  # one clock for all processes
                recording.watch(self.schedule)
                self.schedule.step(*given, **target)
        clock, *actions = recording.phases
        begin = now - clock.begin_ns / 1e9
        self.steps.append(
            [(p.kind, p.stage, p.microbatch, begin + p.begin_ns / 1e9, begin + p.end_ns / 1e9) for p in actions]
        )


def work(rank, port):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS, timeout=timedelta(minutes=5)
    )
    sides = [Side(name) for name in SIDES]
    for _ in range(WARM_UP + STEPS):
        for side in sides:
            side.record()
    found = {}
    for side in sides:
        of_ranks = [None] * RANKS
        dist.all_gather_object(of_ranks, side.steps[WARM_UP:])
        steps = sorted(zip(*of_ranks, strict=True), key=length)
        start = begin_of(steps[STEPS // 2])
        found[side.name] = [
            [[kind, stage, microbatch, round(1e3 * (begin - start), 3), round(1e3 * (end - start), 3)]
             for kind, stage, microbatch, begin, end in actions]
            for actions in steps[STEPS // 2]
        ]  # fmt: skip
    if rank == 0:
        version = torch.__version__.partition("+")[0]
        data = {"schema": 1, "date": date.today().isoformat(), "torch": version, "ms": found}
        DATA.write_text(json.dumps(data) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def begin_of(step):
    return min(begin for *_, begin, _ in itertools.chain.from_iterable(step))


def length(step):
    """Of a step as it was measured, or as it is in the data: there in ms."""
    return max(end for *_, end in itertools.chain.from_iterable(step)) - begin_of(step)


def titles(data):
    """The captions of the panels."""
    took = {side: length(step) for side, step in data["ms"].items()}
    ratio = f", {took['zbpipe'] / took['torch']:.2f}x"
    return {side: f"{SIDES[side][1]}: {ms:.1f} ms{ratio if side == 'zbpipe' else ''}" for side, ms in took.items()}


def draw(data):
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "zbpipe", "font.size": 9, "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, panels = plt.subplots(len(SIDES), 1, sharex=True, figsize=(9.5, 3.6), layout="constrained")
    for axes, (side, title) in zip(panels, titles(data).items(), strict=True):
        for row, rank in enumerate(data["ms"][side]):
            for kind, _, microbatch, begin, end in rank:
                axes.barh(row, end - begin, left=begin, height=0.78, color=COLOURS[kind], edgecolor="white", lw=0.4)
                if microbatch is not None and end - begin > 0.012 * length(data["ms"]["torch"]):
                    axes.text((begin + end) / 2, row, str(microbatch), ha="center", va="center", fontsize=6.5)
        axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
        axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
        axes.invert_yaxis()
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
    panels[-1].set_xlabel(
        "milliseconds from the step's first action; numbers are microbatches, in each of a rank's two stages"
    )
    kinds = [kind for kind in WORDS if any(kind == of for step in data["ms"].values() for r in step for of, *_ in r)]
    boxes = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in kinds]
    figure.legend(
        boxes, [WORDS[k] for k in kinds], loc="outside upper right", ncols=len(kinds), frameon=False, fontsize=8
    )
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    if sys.argv[1:] != ["--draw"]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(work, (port,), nprocs=RANKS)
    draw(json.loads(DATA.read_text()))
