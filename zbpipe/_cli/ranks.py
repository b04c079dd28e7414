"""One report over all ranks of a torchrun job, through the store of its agent.

Every rank but the first gives its report to the store and waits until the first has printed it; what the first has not
had in time is printed by the rank itself, so that none is lost when a rank hangs, dies or stops early.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zbpipe.leaks._alike import numbered_spans

WAIT = 20.0  # seconds that the first rank waits for the others, after its own script has ended
_PATIENCE = 3 * WAIT  # of the others, who may be through long before it
_PRINTED = "printed"  # key of the ranks whose reports the first has printed
stdout: Any = None  # before the script ran, which may close it, or put something else in its place
_UNREACHABLE = (RuntimeError, OSError, ValueError)  # the agent has gone, or is another job's


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def say_together(
    report: dict[str, Any],
    text_of: Callable[[dict[int, dict[str, Any]], list[int]], str],
    has_failed: bool = False,
) -> None:
    """Print, on the first rank, the reports of all that ended in time; elsewhere, or without a store of the agent's,
    the rank's own if nobody has printed it. ``text_of`` is given reports by ranks, and the ranks that print their own.
    Where the script ``has_failed`` the rank prints its own at once, for others may wait for it to go."""
    store = None
    with contextlib.suppress(*_UNREACHABLE):
        store = _store()
    if store is None or has_failed or rank() != 0:
        if store is None or not _is_printed_by_first(store, None if has_failed else report):
            say(text_of({rank(): report}, []))
        return
    reports = {0: report, **_gathered(store)}
    say(text_of(reports, sorted(set(range(count())) - set(reports))))
    # Not before: a rank that ends with an error status has torchrun end this one.
    with contextlib.suppress(*_UNREACHABLE):
        store.set(_PRINTED, json.dumps(sorted(reports)))


def _store() -> Any:
    if count() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=WAIT), wait_for_workers=False)
    run, restart = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    return dist.PrefixStore(f"zbpipe/{run}/{restart}", store)


def _gathered(store: Any) -> dict[int, dict[str, Any]]:
    """The others' reports that come within the time."""
    found: dict[int, dict[str, Any] | None] = {}
    end = time.monotonic() + WAIT
    for r in range(1, count()):
        with contextlib.suppress(*_UNREACHABLE):
            if (left := end - time.monotonic()) > 0:
                store.wait([str(r)], timedelta(seconds=left))
            if store.check([str(r)]):
                found[r] = json.loads(store.get(str(r)))
    return {r: report for r, report in found.items() if report is not None}


def _is_printed_by_first(store: Any, report: dict[str, Any] | None) -> bool:
    """Gives the first rank a report, or none at all, and waits until it has printed what it was given."""
    with contextlib.suppress(*_UNREACHABLE):
        store.set(_PRINTED if rank() == 0 else str(rank()), json.dumps(report))
        if report is not None:
            store.wait([_PRINTED], timedelta(seconds=_PATIENCE))
            return rank() in (json.loads(store.get(_PRINTED)) or [])
    return False


def numbered(ranks: list[int]) -> str:
    """As "ranks 0 to 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {numbered_spans(ranks)}"


def heading(command: str, heads: dict[int, str], world: int) -> list[str]:
    """Which of `world` ranks a report is of, and what each says of itself, those that say the same once."""
    alike: dict[str, list[int]] = {}
    for r, head in sorted(heads.items()):
        alike.setdefault(head, []).append(r)
    return [
        f"zbpipe {command}: {numbered(sorted(heads))} of {world}",
        *(f"{numbered(ranks)}: {head}" for head, ranks in alike.items()),
    ]


def told_by_themselves(missing: list[int]) -> str:
    return f"{numbered(missing)}: failed, or not ended in time; each prints its own report when it ends"


def say(text: str) -> None:
    """Print at once, so that ranks do not interleave; where the output was closed, on standard error."""
    for stream in filter(None, (stdout, sys.stdout, sys.__stdout__, sys.stderr, sys.__stderr__)):
        try:
            stream.write(text + "\n")
            stream.flush()
        except BrokenPipeError:
            raise
        except (OSError, ValueError):
            continue
        return


def file_of(path: Path) -> Path:
    """The rank's own, if there are several, as step.rank0.json.gz."""
    stem = path.name.removesuffix("".join(path.suffixes[-2 if path.suffix == ".gz" else -1 :]))
    return path.with_name(f"{stem}.rank{rank()}{path.name.removeprefix(stem)}") if count() > 1 else path
