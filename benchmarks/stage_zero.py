"""Would it pay to split stage 0's backward? Its input needs no gradient, so torch runs its I and W as one, in W.

    python benchmarks/stage_zero.py --json stage_zero.json

Measures a transformer block's F, I and W, and the bytes held between them. Then simulates torch's zero-bubble schedules
with these costs, with stage 0 whole and split. Prints the step's length, the share of it in which ranks wait, and the
most bytes that rank 0 holds. Sends take no time.
"""

import argparse
import statistics
import time
from typing import NamedTuple

import torch
from bench.results import add_argument, write
from bench.stages import Block
from torch.distributed.pipelining import schedules

import zbpipe

WIDTH, HEADS, TOKENS = 256, 4, 128
ROUNDS = 15
KINDS = {"ScheduleInterleavedZeroBubble": "loop", "ScheduleZBVZeroBubble": "v", "ScheduleDualPipeV": "v"}


class Costs(NamedTuple):
    """Milliseconds of the passes, bytes held from F to I, from I to W, and of the output's gradient."""

    forward: float
    input: float
    weight: float
    activations: int
    deferred: int
    gradient: int


def measure():
    torch.set_num_threads(1)
    block = Block(WIDTH, HEADS)
    weights = list(block.parameters())
    own = {w.untyped_storage().data_ptr() for w in weights}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    times = []
    for _ in range(ROUNDS):
        x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
        start = time.perf_counter()
        out = block(x)
        forward = time.perf_counter()
        _, groups = zbpipe.stage_backward_input((out,), (torch.ones_like(out),), (x,), weights)
        after_input = time.perf_counter()
        deferred = zbpipe.memory.held(groups).bytes
        before_weight = time.perf_counter()
        zbpipe.stage_backward_weight(weights, groups)
        times.append((forward - start, after_input - forward, time.perf_counter() - before_weight))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(torch.randn(1, TOKENS, WIDTH, requires_grad=True))
    medians = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return Costs(*medians, sum(saved.values()), deferred, out.nbytes)


class Stage:
    """The parts of a PipelineStage that a schedule needs to make its order."""

    has_backward = True

    def __init__(self, index, rank, ranks, count):
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, ranks, count
        self.stage_index_to_group_rank = {}
        self.group = self.submod = self.device = None


def orders(kind, shape, ranks, microbatches):
    """Each rank's actions, as (letter, stage, microbatch)."""
    count = 2 * ranks
    mine = [0, count - 1] if shape == "v" else [0, ranks]
    made = getattr(schedules, kind)([Stage(i, 0, ranks, count) for i in mine], microbatches, loss_fn=lambda *_: None)
    return {rank: list(flat(row)) for rank, row in made.pipeline_order.items()}


def flat(row):
    for action in filter(None, row):
        for each in action.sub_actions or (action,):
            yield each.computation_type.value, each.stage_index, each.microbatch_index


def play(rows, costs, split):
    """The step's length, the share of waits, and the most bytes that rank 0 holds."""
    last = max(stage for row in rows.values() for _, stage, _ in row)
    length = {"F": costs.forward, "I": costs.input, "W": costs.weight, "B": costs.input + costs.weight}
    done, clock, place = {}, dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0)
    busy = 0.0
    while any(place[rank] < len(row) for rank, row in rows.items()):
        for rank, row in rows.items():
            while place[rank] < len(row):
                letter, stage, microbatch = row[place[rank]]
                needs = []
                if letter == "F" and stage:
                    needs = [("F", stage - 1, microbatch)]
                if letter in "IB" and stage < last:
                    needs = [("I", stage + 1, microbatch)]
                if any(need not in done for need in needs):
                    break
                takes = length[letter]
                if stage == 0 and not split:
                    takes = {"I": 0.0, "W": length["B"]}.get(letter, takes)
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + takes
                busy += takes
                done["I" if letter == "B" else letter, stage, microbatch] = clock[rank]
                place[rank] += 1
    end = max(clock.values())
    return end, 1 - busy / (end * len(rows)), most_held(rows[0], costs, split)


def most_held(row, costs, split):
    held = most = 0
    for letter, stage, _ in row:
        whole = stage == 0 and not split
        between = costs.activations + costs.gradient if whole else costs.deferred
        held += {"F": costs.activations, "I": between - costs.activations, "W": -between, "B": -costs.activations}[
            letter
        ]
        most = max(most, held)
    return most


def apart(row):
    """The most actions between stage 0's I and W of a microbatch."""
    place = {action: k for k, action in enumerate(row)}
    return max(place["W", 0, m] - k - 1 for (letter, stage, m), k in place.items() if (letter, stage) == ("I", 0))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_argument(parser)
    given = parser.parse_args()
    costs, played = measure(), []
    print(f"F {costs.forward:.2f} ms, I {costs.input:.2f} ms, W {costs.weight:.2f} ms; ", end="")
    print(f"held from F to I {costs.activations / 1e6:.2f} MB, from I to W {costs.deferred / 1e6:.2f} MB")
    print(
        f"{'schedule':30} ranks {'whole: ms':>10} waits {'MB':>6} {'split: ms':>10} waits {'MB':>6} {'length':>8} apart"
    )
    for kind, shape in KINDS.items():
        for ranks in (2, 4, 8):
            rows = orders(kind, shape, ranks, 4 * ranks)
            (whole, waits, held), (split, split_waits, split_held) = (play(rows, costs, s) for s in (False, True))
            played.append(
                {
                    "schedule": kind,
                    "ranks": ranks,
                    "length": split / whole,
                    "waits": waits,
                    "held": held,
                    "split_held": split_held,
                    "apart": apart(rows[0]),
                }
            )
            print(
                f"{kind:30} {ranks:5} {whole:10.1f} {waits:5.1%} {held / 1e6:6.1f} {split:10.1f} {split_waits:5.1%} "
                f"{split_held / 1e6:6.1f} {split / whole - 1:+8.2%} {apart(rows[0]):5}"
            )
    write(given.json, "stage_zero", {"costs": costs._asdict(), "schedules": played})


if __name__ == "__main__":
    main()
