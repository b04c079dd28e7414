"""Makes the tables of README and docs from benchmarks/results, so that no figure is typed by hand.

python benchmarks/tables.py           # writes the tables into the pages
python benchmarks/tables.py --check   # status 1 if a page differs
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SCHEMA = {"demo": 4}  # of the others: 1
ROOT = Path(__file__).resolve().parent.parent
PINNED = "2.13.0"
NEWEST = (ROOT / "requirements" / "newest.txt").read_text().partition("torch==")[2].split()[0]
SPLIT = ("zbpipe", "torch", "store")  # the sides that split
ZBV = "ScheduleZBVZeroBubble"
SCHEDULES = {
    "ScheduleInterleavedZeroBubble": "interleaved zero bubble",
    ZBV: "ZBV",
    "ScheduleDualPipeV": "DualPipeV",
}


@functools.cache
def read(name: str, version: str) -> dict[str, Any]:
    """A benchmark's results. Raises ValueError if they are missing, or of another schema."""
    path, mend = ROOT / "benchmarks" / "results" / f"{name}-{version}.json", f"run make bench TORCH_VERSION={version}"
    if not path.exists():
        raise ValueError(f"{path} is missing: {mend}")
    found: dict[str, Any] = json.loads(path.read_text())
    if found["schema"] != (expected := SCHEMA.get(name, 1)):
        raise ValueError(f"{path} has schema {found['schema']}, expected {expected}: {mend}")
    return found


def figures(name: str, version: str = PINNED) -> Any:
    return read(name, version)["figures"]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(cells)} |" for cells in (header, *rows))
    return "\n".join([first, "|---" * len(header) + "|", *others])


def times(ratio: float) -> str:
    """A ratio in two or three digits."""
    return f"{ratio:.2f}x" if ratio < 2 else f"{ratio:.1f}x" if ratio < 10 else f"{ratio:.0f}x"


def milliseconds(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def around(spread: dict[str, float]) -> str:
    """The median of ratios, and the range of their middle half."""
    return f"{times(spread['median'])} ({times(spread['low'])[:-1]}-{times(spread['high'])[:-1]})"


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f}"


def machine() -> str:
    """The machines of all tables. Each ratio is of one run, and so of one machine."""
    tables = {
        "host_time": "host time",
        "operations": "experts, convolutions",
        "step_overhead": "whole steps",
        "memory": "memory and products",
        "instructions": "instructions",
    }
    made: dict[str, list[str]] = {}
    for name, title in tables.items():
        found = read(name, PINNED)
        made.setdefault(f"{found['device']}, on {found['date']}", []).append(title)
    where = " ".join(f"{', '.join(titles).capitalize()}: {device}." for device, titles in made.items())
    one, newest = read("host_time", PINNED), read("host_time", NEWEST)
    versions = f"torch {PINNED} for CPU and Python {one['python']}, unless they name another torch"
    newer = f"Torch {NEWEST} was measured on {newest['device']}, on {newest['date']}"
    return f"The figures are of {versions}. {newer}. {where}"


# README.


def in_short() -> str:
    """What changes for a user, the largest gains first."""
    host, stages = figures("host_time"), figures("memory")["stages"]
    zbv = [of["sides"] for of in figures("checkpointed")["rows"] if of["schedule"] == ZBV]
    deep = [of for of in figures("step_overhead") if of["schedule"] == ZBV]
    deepest = max(deep, key=lambda of: (of["ranks"], of["blocks"]))["ratio"]["median"]
    held = [megabytes(stages["transformer"][side]["bytes"]["held"]) for side in ("torch", "zbpipe")]

    def peak(policy: str) -> str:
        return " / ".join(times(sides[policy]["peak"] / sides["torch"]["peak"]) for sides in zbv)

    def host_of(side: str) -> str:
        return " / ".join(times(host[count][side]["ratio"]["median"]) for count in ("16", "64", "256"))

    time = " / ".join(times(sides["keep"]["step"]["median"]) for sides in zbv)
    again = {side: f"{zbv[0][side]['computed']:g}" for side in ("torch", "keep", "recompute")}
    plain = [demo_of(PINNED)[name] for name in ("ZBV", "Interleaved zero bubble", "DualPipeV")]

    def in_demo(what: str) -> str:
        return " / ".join(times(sides["zbpipe"][what] / sides["torch"][what]) for sides in plain)

    rows = [
        [
            "nothing checkpointed (`make demo`): time of a step of ZBV / interleaved zero bubble / DualPipeV",
            "1x",
            in_demo("seconds"),
        ],
        ["— peak memory", "1x", in_demo("peak")],
        ["every block checkpointed: time of a ZBV step on 2 / 4 / 8 ranks", "1x", time],
        ['— peak memory with `checkpoint="keep"`, the default', "1x", peak("keep")],
        ['— with `checkpoint="recompute"`', "1x", peak("recompute")],
        ['— with `checkpoint="input_pass"`', "1x", peak("input_pass")],
        [
            "— recomputations of a block, per microbatch (torch: in I, and in W once per group of weights)",
            again["torch"],
            f'{again["keep"]}; {again["recompute"]} with `"recompute"`',
        ],
        ["many tiny operations: time of a ZBV step on 2 ranks, 64 blocks of width 8 a stage", "1x", times(deepest)],
        [
            "host time of I + W, relative to an unsplit backward, 16 / 64 / 256 blocks of width 16",
            host_of("torch"),
            host_of("zbpipe"),
        ],
        ["memory held from I to W by one microbatch of 4 transformer blocks", *(f"{of} MB" for of in held)],
    ]
    return markdown(["", "torch's module", "zbpipe"], rows + real_size_in_short())


def picture() -> str:
    """The caption of docs/pictures/timeline.svg."""
    made = json.loads((ROOT / "docs" / "pictures" / "timeline.json").read_text())
    torchs, ours = (max(end for rank in made["ms"][side] for *_, end in rank) for side in ("torch", "zbpipe"))
    return (
        f"One step of ZBV on two ranks, blocks checkpointed, the median of nine: {torchs:.0f} ms on torch's module, "
        f"{ours:.0f} ms on zbpipe, {times(ours / torchs)} (torch {made['torch']}). Both ran under memory.record(), "
        "which slows them."
    )


# docs/numbers.md.


def host_time() -> str:
    rows = []
    for blocks, sides in figures("host_time").items():
        row = [blocks, milliseconds(sides["unsplit"]["first_ms"]["median"])]
        for side in SPLIT:
            halves = (milliseconds(sides[side][half]["median"]) for half in ("first_ms", "second_ms"))
            row += [" + ".join(halves), around(sides[side]["ratio"])]
        rows.append(row)
    header = ["blocks", "unsplit", "zbpipe I + W", "ratio", "torch I + W", "ratio", "store I + W", "ratio"]
    newest = figures("host_time", NEWEST)

    def of(side: str) -> str:
        return ", ".join(times(sides[side]["ratio"]["median"]) for sides in newest.values())

    ratios = f"zbpipe {of('zbpipe')}; torch's own module {of('torch')}; store {of('store')}"
    return f"{markdown(header, rows)}\n\nOn torch {NEWEST}, in the same order: {ratios}."


def operations() -> str:
    measured, stacks = figures("operations"), ("4", "16", "64")
    kinds = list(dict.fromkeys(stack.partition(", ")[2] for stack in measured))

    def of(kind: str, side: str) -> str:
        return " / ".join(times(measured[f"{layers}, {kind}"][side]["ratio"]["median"]) for layers in stacks)

    rows = [[kind, of(kind, "zbpipe"), of(kind, "torch")] for kind in kinds]
    return markdown(["layers of", "zbpipe I + W", "torch I + W"], rows)


def instructions() -> str:
    def ratio(counts: dict[str, float], side: str) -> str:
        return f"{counts[side] / counts['unsplit']:.2f}x"

    stacks, kinds = dict[str, dict[str, float]](), []
    for stack, counts in figures("instructions").items():
        blocks, _, kind = stack.partition(", ")
        if kind:
            kinds.append(f"{kind} {ratio(counts, 'zbpipe')}")
        else:
            stacks[blocks] = counts
    rows = [
        [blocks, f"{counts['unsplit'] / 1e6:.1f}", *(ratio(counts, side) for side in SPLIT)]
        for blocks, counts in stacks.items()
    ]
    made = markdown(["blocks", "unsplit, million", *(f"{side} I + W" for side in SPLIT)], rows)
    return f"{made}\n\nzbpipe on {min(stacks, key=int)} blocks: {', '.join(kinds)} (kinds: `bench/host_time.py`)."


def step_overhead() -> str:
    by_version = {version: figures("step_overhead", version) for version in (PINNED, NEWEST)}
    places = sorted({(row["ranks"], row["blocks"]) for row in by_version[PINNED]})
    rows = []
    for schedule, label in SCHEDULES.items():
        for version, measured in by_version.items():
            cells = {(row["ranks"], row["blocks"]): row for row in measured if row["schedule"] == schedule}
            rows.append([label, version, *(step(cells[place]) for place in places)])
    header = [f"{ranks} rank{'s' * (ranks > 1)}, {blocks} blocks" for ranks, blocks in places]
    return markdown(["schedule", "torch", *header], rows)


def step(row: dict[str, Any]) -> str:
    before, after = (milliseconds(row[key]["median"]) for key in ("torch_ms", "zbpipe_ms"))
    return f"{before} → {after}, {around(row['ratio'])}"


def memory() -> str:
    measured = figures("memory")
    rows = []
    for name, sides in measured["stages"].items():
        b = {side: sides[side]["bytes"] for side in sides}
        split = ("torch", "store", "zbpipe")
        again = [f"{b[side]['computed']:g}" for side in split]
        rows.append(
            [
                name,
                megabytes(b["unsplit"]["after_forward"]),
                " / ".join(megabytes(b[side]["peak_input"]) for side in ("unsplit", *split)),
                *(" / ".join(megabytes(b[side][key]) for side in split) for key in ("held", "peak_weight")),
                " / ".join(again) if set(again) != {"0"} else "",
            ]
        )
        for policy in ("checkpoint=recompute", "checkpoint=input_pass") if "checkpointed" in name else ():
            of = measured["policies"][name][policy]["bytes"]
            key, _, value = policy.partition("=")
            sizes = [megabytes(of[key]) for key in ("after_forward", "peak_input", "held", "peak_weight")]
            rows.append([f'zbpipe with `{key}="{value}"`', *sizes, f"{of['computed']:g}"])
    header = ["stage", "after forward", "peak in I: unsplit / torch / store / zbpipe"]
    header += [f"{what}: torch / store / zbpipe" for what in ("held from I to W", "peak in W", "blocks recomputed")]
    return markdown(header, rows)


def products() -> str:
    """Time of I and W, and of W alone."""
    measured = figures("memory")
    sides = measured["stages"]["transformer of width 1,024"]
    whole = sides["unsplit"]["times"]["total"]["median"]
    of = {side: times(sides[side]["times"]["total"]["median"] / whole) for side in SPLIT}
    words = "Time of I + W on transformer blocks of width 1,024, relative to an unsplit backward: "
    words += f"zbpipe {of['zbpipe']}, torch {of['torch']}, store {of['store']}. "
    words += "Time of W on four 1,024 x 1,024 matrices that have a gradient already, relative to torch's W:"
    names = ["zbpipe", "zbpipe, fused", "store", "plain mm and add"]
    rows = [
        [tokens, *(times(ms[name]["median"] / ms["torch"]["median"]) for name in names)]
        for tokens, ms in measured["existing_gradients_ms"].items()
    ]
    header = ["tokens", "zbpipe", "zbpipe, `fused=True`", "store", "a product and an addition by hand"]
    return f"{words}\n\n{markdown(header, rows)}"


def demo_of(version: str) -> dict[str, dict[str, Any]]:
    made = read("demo", version)
    if made["wrong"]:
        raise ValueError(f"the demo of torch {version} was wrong: {made['wrong'][0]}")
    found: dict[str, dict[str, Any]] = {}
    for run in made["runs"]:
        found.setdefault(run["schedule"], {})[run["side"]] = run
    return found


def demo() -> str:
    rows = []
    for version in (PINNED, NEWEST):
        for schedule, sides in demo_of(version).items():
            before, after = (sides[side]["peak"] for side in ("torch", "zbpipe"))
            peaks = f"{megabytes(before)} → {megabytes(after)} MB ({after / before:.2f}x)"
            before, after = (sides[side]["seconds"] for side in ("torch", "zbpipe"))
            rows.append([schedule, version, peaks, f"{before * 1e3:.0f} ms; {times(after / before)}"])
    return markdown(
        ["schedule", "torch", "peak of the step, torch → zbpipe", "time of a step: torch; zbpipe, relative"], rows
    )


# Other pages.


def compiled() -> str:
    rows = [
        [
            f"`{name}`" if "." in name else name,
            *(times(of[key]["median"]) for key in ("I", "W", "sum")),
            f"{of['flops_in_w']:.0%}",
        ]
        for name, of in figures("compile").items()
    ]
    return markdown(["blocks run by", "I", "W", "I + W", "weight products' FLOPs in W"], rows)


def stage_zero() -> str:
    measured = figures("stage_zero")
    rows = [
        [
            SCHEDULES[of["schedule"]],
            f"{of['length'] - 1:+.2%}",
            f"{of['waits']:.1%}",
            f"{megabytes(of['held'])} / {megabytes(of['split_held'])} MB",
            str(of["apart"]),
        ]
        for of in measured["schedules"]
        if of["ranks"] == 4
    ]
    header = ["schedule, 4 ranks, 16 microbatches", "length of a step, whole relative to split", "time that ranks wait"]
    header += ["most that rank 0 holds, whole / split", "actions between 0I and 0W"]
    costs = {name: f"{size / 1e6:.2f} MB" for name, size in measured["costs"].items()}
    words = f"A block holds {costs['deferred']} for W, and its forward saved {costs['activations']}, so a split frees "
    words += f"only the output's gradient ({costs['gradient']})."
    return f"{markdown(header, rows)}\n\n{words}"


def checkpointed_steps() -> str:
    words = ("torch", "keep", "recompute", "input_pass")
    rows = []
    for of in figures("checkpointed")["rows"]:
        sides = [of["sides"][word] for word in words]
        peaks = [megabytes(sides[0]["peak"]), *(times(side["peak"] / sides[0]["peak"]) for side in sides[1:])]
        again = [f"{side['computed']:.3g}" for side in sides]
        took = [times(side["step"]["median"]) for side in sides[1:]]
        cells = (" / ".join(cell) for cell in (peaks, again, took))
        rows.append([SCHEDULES[of["schedule"]], f"{of['ranks']}, {of['microbatches']}", *cells])
    header = ["schedule", "ranks, microbatches", "peak of a step: torch in MB / `keep` / `recompute` / `input_pass`"]
    header += ["recomputed: torch / `keep` / `recompute` / `input_pass`", "time: `keep` / `recompute` / `input_pass`"]
    return markdown(header, rows)


def of_gpus() -> list[dict[str, Any]]:
    """What `make gpu` found, of each machine and torch. A file may have some of the parts alone."""
    return [json.loads(path.read_text()) for path in sorted((ROOT / "benchmarks" / "results").glob("gpu-*.json"))]


def gpu() -> str:
    made = []
    for found in of_gpus():
        measured, rows = found["figures"], []
        if host := measured.get("host_time"):
            of = {side: " / ".join(times(of[side]["ratio"]["median"]) for of in host.values()) for side in SPLIT[:2]}
            what = f"host time of I + W, relative to an unsplit backward, {' / '.join(host)} blocks"
            rows.append([what, of["torch"], of["zbpipe"]])
        for deep in measured.get("step_overhead", ()):
            if deep["schedule"] == ZBV:
                what = f"time of a ZBV step, stages of {deep['blocks']} tiny blocks"
                rows.append([what, "1x", times(deep["ratio"]["median"])])
        for row in measured.get("checkpointed", {}).get("rows", ()):
            if row["schedule"] == ZBV:
                keep, torchs = (row["sides"][side] for side in ("keep", "torch"))
                what = "time of a ZBV step with checkpointed blocks"
                rows.append([what, "1x", times(keep["step"]["median"])])
                rows.append(["peak memory of that step", "1x", times(keep["peak"] / torchs["peak"])])
        if stages := measured.get("memory", {}).get("stages"):
            held = (f"{megabytes(stages['transformer'][side]['bytes']['held'])} MB" for side in ("torch", "zbpipe"))
            rows.append(["memory held from I to W by one microbatch of 4 transformer blocks", *held])
        status = "; ".join(part for part in found["status"].split("; ") if not part.startswith("host time"))
        made.append(f"{status}.\n\n{markdown(['', 'torch', 'zbpipe'], rows)}" if rows else f"{status}.")
    return "\n\n".join(made)


def of_real_size() -> list[tuple[str, dict[str, Any]]]:
    """Machine and figures, the newest last."""
    runs = [found for found in of_gpus() if "real_size" in found["figures"]]
    return [
        (f"{found['device']}, torch {found['torch']}, driver {found['driver']}, {date}", found["figures"]["real_size"])
        for date, found in sorted(((run["parts"]["real size"]["date"], run) for run in runs), key=lambda one: one[0])
    ]


def real_size() -> str:
    """Blocks of a real model's size."""
    made = []
    for machine, measured in of_real_size():
        rows = []
        for kind, cases in measured.items():
            for case, sides in cases.items():
                for number, (side, of) in enumerate(sides.items()):
                    rows.append(["" if number else f"{kind}, {case}", side, *real_size_of(of)])
        header = ["", "", "time of I + W", "I", "W", "host time, ms", "peak", "held, MB", "kernels", "inexact"]
        made.append(f"{machine}:\n\n{markdown(header, rows)}")
    return "\n\n".join(made) or "Not measured yet."


def real_size_of(side: dict[str, Any]) -> list[str]:
    if "error" in side:
        return ["raises", *[""] * 7]
    if "step_ms" in side:  # a whole step
        return [times(side["ratio"]["median"]), "", "", "", times(side["peak_ratio"]), "", "", ""]
    return [
        *(times(side[key]["median"]) for key in ("ratio", "I", "W")),
        " + ".join(milliseconds(side["ms"][key]["median"]) for key in ("host_input", "host_weight")),
        times(side["peak_ratio"]),
        megabytes(side["held"]),
        "" if side["kernels"] is None else f"{side['kernels']:,}",
        f"{side['inexact']:.0e}" if "inexact" in side else "",
    ]


def real_size_in_short() -> list[list[str]]:
    """README's rows, of the newest run."""
    rows = []
    for machine, measured in of_real_size()[-1:]:
        where = machine.partition(", driver")[0]
        for kind, ours, words in (
            ("dense", "zbpipe", "blocks of Llama 3 8B's size"),
            ("checkpointed", "keep", "the same, each checkpointed"),
        ):
            for case, sides in list(measured.get(kind, {}).items())[:1]:  # the one with the most tokens
                pair = [sides["torch"], sides[ours]]
                what = f"{words}, {case} ({where}): time of I + W, relative to unsplit backwards"
                rows.append([what, *("raises" if "error" in of else times(of["ratio"]["median"]) for of in pair)])
                peaks = ("" if "error" in of else times(of["peak_ratio"]) for of in pair)
                rows.append(["— peak memory", *peaks])
    return rows


def bubbles() -> str:
    measured = figures("bubbles")
    rows = []
    for row, of in zip(measured["rows"], measured["waits"], strict=True):
        schedule = {**SCHEDULES, "ScheduleInterleaved1F1B": "interleaved 1F1B"}[row["schedule"]]
        forward, *costs = row["costs"]
        rows.append(
            [
                f"{schedule}{', checkpointed' if row['checkpointed'] else ''}",
                " : ".join(["1", *(f"{cost / forward:.1f}" for cost in costs)]),
                *(f"{share:.0%}" for share in of["ranks"].values()),
                times(row["measured"]["median"] / row["model"]),
            ]
        )
    header = ["", "F : I : W", *(f"{ranks} ranks" for ranks in measured["waits"][0]["ranks"])]
    header.append(f"measured, {measured['rows'][0]['ranks']} ranks")
    return markdown(header, rows)


def recorder() -> str:
    measured = figures("recorder")
    us = measured["microseconds"]
    rows = [[f"`{name}`", f"{us[name] - us['nothing']:+.2f}"] for name in us if name != "nothing"]
    files = [
        [f"`.{name.partition('.')[2]}`", f"{of['processor']:.1f}", f"{of['MB']:.1f}", f"{of['memory']:.1f}"]
        for name, of in measured["files"].items()
    ]
    header = [f"{measured['events']:,} events as", "CPU seconds", "MB", "MB of memory meanwhile"]
    return f"{markdown(['', 'µs per block of memory'], rows)}\n\n{markdown(header, files)}"


def leaks() -> str:
    measured = figures("leaks")
    keys = ["check", "text", "picture"]
    rows = [
        [of["case"], f"{of['leaks']:,}", *(f"{of[key]:.1f}" for key in keys), f"{of['MB']:.0f}"]
        for of in measured["large"]
    ]
    ms = {
        name: f"{measured[name]:.0f} ms" for name in ("clean check", "find_holders of one", "gc.get_referrers of one")
    }
    words = (
        f"A clean check takes {ms['clean check']}, and a search for one tensor's holders {ms['find_holders of one']}; "
    )
    words += f"one `gc.get_referrers` takes {ms['gc.get_referrers of one']}. In CPU seconds:"
    return f"{words}\n\n{markdown(['what is left', 'leaks', *keys, 'MB of memory'], rows)}"


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"picture": picture, "in_short": in_short},
    "docs/index.md": {"picture": picture},
    "docs/numbers.md": {
        "host_time": host_time,
        "operations": operations,
        "instructions": instructions,
        "step_overhead": step_overhead,
        "memory": memory,
        "products": products,
        "demo": demo,
        "real_size": real_size,
        "gpu": gpu,
        "machine": machine,
    },
    "docs/compatibility.md": {"compile": compiled, "stage_zero": stage_zero},
    "docs/what_to_expect.md": {"bubbles": bubbles},
    "docs/memory.md": {"checkpointed steps": checkpointed_steps, "recorder": recorder},
    "docs/leaks.md": {"leaks": leaks},
}


def with_tables(page: str, text: str) -> str:
    for name, make in TABLES[page].items():
        begin, end = f"<!-- {name}: made by benchmarks/tables.py -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise ValueError(f"{page} has no place for the table; write {begin!r}, and {end!r} behind it")
        text = f"{before}{begin}\n\n{make()}\n\n{end}{after}"
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page differs")
    given = parser.parse_args()
    texts = {page: (ROOT / page).read_text() for page in TABLES}
    try:
        wanted = {page: with_tables(page, text) for page, text in texts.items()}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    differ = [page for page, text in wanted.items() if text != texts[page]]
    if not given.check:
        for page in differ:
            (ROOT / page).write_text(wanted[page])
    if differ:
        said = "not as measured: run benchmarks/tables.py, or make bench" if given.check else "written"
        print(f"{', '.join(differ)}: {said}")
    return 1 if differ and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
