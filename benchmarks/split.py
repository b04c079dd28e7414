"""The cost of the split backward on this machine: torch's own module beside zbpipe."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from bench import host_time, memory
from bench.memory import POLICIES, POLICIES_OF, SIDES, STAGES, TOKENS, Result
from bench.results import Spread, write

from zbpipe import is_patched
from zbpipe._formatting import table

DESCRIPTION = """\
Measures the split backward on this machine, on one core: zbpipe beside torch's
own module, and beside "store", layers that put their weights' products into a
queue, as some training loops have (the model must be made of such layers). An
unsplit backward is the reference. It takes two minutes, on an idle machine.

  host_time   ms of I and W on tiny transformer blocks, whose kernels cost
              next to nothing
  memory      exact bytes of one microbatch of six kinds of stages, and their
              times; zbpipe's policies

I is the input pass, W the weight pass; "held" is the memory kept from I to W.
Ratios are to the unsplit backward.

    python benchmarks/split.py
    python benchmarks/split.py --only host_time --blocks 16 64
    python benchmarks/split.py --json results
"""
KINDS = ("host_time", "memory")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    parser = argparse.ArgumentParser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS, metavar="KIND", help="host_time or memory (default: both)")
    parser.add_argument(
        "--blocks", type=_several, nargs="+", default=[1, 4, 16, 64], metavar="N", help="of host_time (1 4 16 64)"
    )
    parser.add_argument(
        "--stages", nargs="+", choices=list(STAGES), default=list(STAGES), metavar="STAGE", help="of memory (all)"
    )
    parser.add_argument("--device", default="cpu", help="where the stages are: cpu (default), or cuda")
    parser.add_argument("--repeat", type=_several, metavar="N", help="runs of each side (host_time 30, memory 5)")
    parser.add_argument(
        "--json", type=Path, metavar="FOLDER", help="write host_time-TORCH.json and memory-TORCH.json to this folder"
    )
    given = parser.parse_args(arguments)
    if is_patched():
        parser.error("torch's module is patched, so there is nothing to compare with; unset ZBPIPE_PATCH")
    if given.json is not None and not given.json.is_dir():
        parser.error(f"--json {given.json}: there is no such folder; make it first")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        where = platform.machine() if given.device == "cpu" else torch.cuda.get_device_name(given.device)
        print(f"torch {torch.__version__}, {where}, one thread")
        if given.only in (None, "host_time"):
            _host_time(given)
        if given.only in (None, "memory"):
            _memory(given)
    finally:
        torch.set_num_threads(threads)
    return 0


def _several(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _say(what: str) -> None:
    print(f"measuring {what}", file=sys.stderr, flush=True)


# Host time.


def _host_time(given: argparse.Namespace) -> None:
    measured = {}
    for blocks in given.blocks:
        _say(f"the host time of {blocks} block{'s' * (blocks > 1)}")
        measured[blocks] = host_time.measure(blocks, given.repeat or 30, given.device)
    rows = [_host_row(str(blocks), sides) for blocks, sides in measured.items()]
    print(f"\nhost time of one backward, ms; I + W to an unsplit one\n{table(_host_header('blocks', measured), rows)}")
    write(given.json, "host_time", measured, given.device)
    others = {}
    for weights in host_time.OPERATIONS:
        for blocks in given.blocks:
            _say(f"the host time of {blocks} layers of {weights}")
            others[f"{blocks}, {weights}"] = host_time.measure(blocks, given.repeat or 30, given.device, weights)
    rows = [_host_row(stack, sides) for stack, sides in others.items()]
    print(f"\nthe same of other operations\n{table(_host_header('layers', others), rows)}")
    write(given.json, "operations", others, given.device)


def _host_header(stack: str, measured: Mapping[Any, dict[str, dict[str, Spread]]]) -> list[str]:
    sides = next(iter(measured.values()))
    return [stack, "unsplit", *(cell for side in sides if side != "unsplit" for cell in (f"{side} I + W", ""))]


def _host_row(stack: str, sides: dict[str, dict[str, Spread]]) -> list[str]:
    row = [stack, _milliseconds(sides["unsplit"]["first_ms"])]
    for side, of in sides.items():
        if side != "unsplit":
            row += [f"{_milliseconds(of['first_ms'])} + {_milliseconds(of['second_ms'])}", f"{of['ratio'].median:.2f}x"]
    return row


def _milliseconds(of: Spread) -> str:
    return f"{of.median:.2f}" if of.median < 10 else f"{of.median:.1f}" if of.median < 1000 else f"{of.median:.0f}"


# Memory.


def _memory(given: argparse.Namespace) -> None:
    repeat = given.repeat or 5
    measured, policies = {}, {}
    for name in given.stages:
        _say(f"the memory of a stage: {name}")
        measured[name] = memory.measure(STAGES[name], SIDES, repeat, given.device)
        if name in POLICIES_OF:
            sides = {side: POLICIES[side] for side in POLICIES_OF[name]}
            policies[name] = memory.measure(STAGES[name], sides, repeat, given.device)
    _say("W where gradients exist")
    existing = {tokens: memory.time_existing(tokens, repeat, given.device) for tokens in TOKENS}
    for name, sides in measured.items():
        _print_stage(name, sides)
    for name, sides in policies.items():
        _print_stage(f"{name}: zbpipe's policies", sides)
    others = [side for side in next(iter(existing.values())) if side != "torch"]
    rows = [
        [str(tokens), f"{ms['torch'].median:.2f}", *(f"{ms[side].median / ms['torch'].median:.2f}x" for side in others)]
        for tokens, ms in existing.items()
    ]
    matrices = f"{memory.LAYERS} matrices of {memory.WIDTH} x {memory.WIDTH}"
    print(f"\nW where gradients exist, {matrices}: torch in ms, the others to it")
    print(table(["tokens", "torch", *others], rows))
    write(
        given.json,
        "memory",
        {"stages": _plain(measured), "policies": _plain(policies), "existing_gradients_ms": existing},
        given.device,
    )


def _plain(of_stages: dict[str, dict[str, Result]]) -> dict[str, Any]:
    return {name: {side: asdict(result) for side, result in sides.items()} for name, sides in of_stages.items()}


def _print_stage(title: str, sides: dict[str, Result]) -> None:
    header = ["", "forward", "I peak", "held", "W peak", "again", "I", "W", "I + W"]
    print(f"\n{title}, MB\n{table(header, list(_stage_rows(sides)))}")


def _stage_rows(sides: dict[str, Result]) -> Sequence[list[str]]:
    reference = sides["unsplit"].times
    rows = []
    for side, result in sides.items():
        b, t = result.bytes, result.times
        if b is None or t is None or reference is None:
            rows.append([f"{side} raises: {result.error}", *[""] * 8])
            continue
        whole = reference.total.median
        sizes = (b.after_forward, b.peak_input, b.held, b.peak_weight)
        ratios = [f"{of.median / whole:.2f}x" for of in (t.input_pass, t.weight_pass, t.total)]
        rows.append(
            [
                side.removeprefix("checkpoint="),
                *("" if size is None else f"{size / 1e6:.2f}" for size in sizes),
                f"{b.computed:g}",
                *(ratios if side != "unsplit" else ["", "", f"{whole:.1f} ms"]),
            ]
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
