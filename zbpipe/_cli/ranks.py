"""One report over all ranks of a torchrun job, through the store of its agent.

Every rank but the first gives its report to the store and waits until the first has printed it; what the first has not
had in time is printed by the rank itself, so that none is lost when a rank hangs, dies or stops early.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zbpipe.leaks._alike import numbered_spans

WAIT = 20.0  # seconds that the first rank waits for the others, after its own script has ended
_PATIENCE = 3 * WAIT  # of the others, who may be through long before it
_BETWEEN_LOOKS = 0.05


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def gathered(report: dict[str, Any], has_failed: bool = False) -> tuple[dict[int, dict[str, Any]], list[int]]:
    """The reports that this rank is to print, and on the first one the ranks that print their own.

    On the first rank those that came in time, and its own; elsewhere none if the first has printed this one, else this
    one. Without a store of the agent's to be reached, this one on each rank; likewise where the script ``has_failed``,
    for others may wait for this rank to go.
    """
    alone: tuple[dict[int, dict[str, Any]], list[int]] = {rank(): report}, []
    if count() == 1:
        return alone
    try:
        store = _store()
        if store is None:
            return alone
        if has_failed:
            store.set("printed" if rank() == 0 else str(rank()), json.dumps(None))
            return alone
        if rank() != 0:
            return _as_other(store, report), []
        found = _as_first(store, report)
        return found, sorted(set(range(count())) - set(found))
    except (RuntimeError, OSError, ValueError):  # the agent has gone, or is another job's
        return alone


def _store() -> Any:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=WAIT), wait_for_workers=False)
    run, restart = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    return dist.PrefixStore(f"zbpipe/{run}/{restart}", store)


def _as_first(store: Any, report: dict[str, Any]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any] | None] = {0: report}
    end = time.monotonic() + WAIT
    while True:
        missing = [r for r in range(count()) if r not in found]
        for r in missing:
            if store.check([str(r)]):
                found[r] = json.loads(store.get(str(r)))
        if len(found) == count() or time.monotonic() > end:
            break
        time.sleep(_BETWEEN_LOOKS)
    taken = {r: theirs for r, theirs in found.items() if theirs is not None}
    store.set("printed", json.dumps(sorted(taken)))
    return taken


def _as_other(store: Any, report: dict[str, Any]) -> dict[int, dict[str, Any]]:
    store.set(str(rank()), json.dumps(report))
    end = time.monotonic() + _PATIENCE
    while not store.check(["printed"]) and time.monotonic() < end:
        time.sleep(_BETWEEN_LOOKS)
    is_printed = store.check(["printed"]) and rank() in (json.loads(store.get("printed")) or [])
    return {} if is_printed else {rank(): report}


def numbered(ranks: list[int]) -> str:
    """As "ranks 0 to 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {numbered_spans(ranks)}"


def say(text: str) -> None:
    """Print at once, so that ranks do not interleave."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def file_of(path: Path) -> Path:
    """The rank's own, if there are several."""
    return path.with_name(f"{path.stem}.rank{rank()}{path.suffix}") if count() > 1 else path
