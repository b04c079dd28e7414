"""Thousands of steps of ZBV over two processes, with a fault every few hundred, beside an ordinary training in one process.

    python -m schedules.soak [STEPS [EVERY]]

Prints where one sees how far it is, and at the end what was seen; exits with 1 if a loss or weight differs in a bit, or something has grown.
"""

import array
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from schedules import fault_cases as cases
from schedules.fault_cases import MICROBATCHES, WORLD
from schedules.soak_ranks import LEARNING_RATE, MOMENTUM, WHAT, faults
from support import allocations
from support.pipelines import backwards
from support.processes import run_ranks


def ordinary(steps):
    """Losses of every microbatch, and the weights, of the whole model and torch.autograd.backward."""
    net, _ = cases.MODEL.build(cases.STAGES)
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, momentum=MOMENTUM)
    losses = array.array("d")
    for step in range(steps):
        optimizer.zero_grad()
        x, target = cases.batch(step)
        losses.extend(loss.item() for loss in backwards(net, cases.MODEL, x, target))
        optimizer.step()
    return losses, {name: w.tolist() for name, w in net.named_parameters()}


def run(folder, steps, every, *leak, timeout=150):
    """The ranks; raises what `run_ranks` raises."""
    variables = allocations.preloading(folder)
    run_ranks("schedules/soak_ranks.py", WORLD, folder, str(steps), str(every), *leak, timeout=timeout, **variables)


def differences(folder, steps, every):
    """What is wrong, in sentences, and the ranks' figures."""
    figures = []
    for rank in range(WORLD):
        file = folder / f"figures.{rank}"
        if not file.exists():
            return [f"rank {rank} did not finish: {(folder / f'output.{rank}').read_text()[-3000:]}"], []
        figures.append(json.loads(file.read_text()))
    wrong = []
    wanted, weights = ordinary(steps)
    got = array.array("d", (folder / "losses.0").read_bytes())
    if got != wanted:
        at = next((i for i, (a, b) in enumerate(zip(got, wanted)) if a != b), min(len(got), len(wanted)))
        wrong.append(f"the loss of step {at // MICROBATCHES}, microbatch {at % MICROBATCHES} differs")
    for rank, seen in enumerate(figures):
        wrong += [f"rank {rank}: weight {name} differs" for name, w in seen["weights"].items() if w != weights[name]]
        wrong += [f"rank {rank}: {what}: {seen['alive'][what]}" for what in WHAT if len(seen["alive"][what]) > 1]
        wrong += [
            f"rank {rank}: {name}: {seen['alive'][name]}" for name in ("groups", "sends") if seen["alive"][name][0][0]
        ]
        objects, groups = seen["objects"] or [0], len(seen["objects"])
        if objects[-1] - objects[0] > SPREAD_OF_OBJECTS + OBJECTS_OF_A_GROUP * groups:
            wrong.append(f"rank {rank}: objects: {objects}")
    failed, planned = sum(seen["fired"] for seen in figures), len(list(faults(steps, every)))
    if failed != planned:
        wrong.append(f"{failed} faults of {planned}")
    return wrong, figures


OBJECTS_OF_A_GROUP = 3  # of every hook for uncaught errors that torch's init_process_group puts around the last one
SPREAD_OF_OBJECTS = 200  # a step that failed leaves its stages' entries as they are


def main(steps=10_000, every=250):
    folder = Path(tempfile.mkdtemp(prefix="zbpipe_soak_"))
    print(f"follow it in {folder / 'output.0'}", flush=True)
    began = time.monotonic()
    run(folder, steps, every, timeout=60 + 5 * steps)
    wrong, figures = differences(folder, steps, every)
    print(f"{steps} steps in {time.monotonic() - began:.0f} s, {sum(seen['fired'] for seen in figures)} faults")
    for rank, seen in enumerate(figures):
        print(f"rank {rank}: alive after a step, and how often: {seen['alive']}")
    print("\n".join(wrong) or "every loss and weight has the bits of an ordinary training, and nothing has grown")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
