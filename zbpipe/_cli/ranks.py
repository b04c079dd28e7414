"""One report over all ranks of a torchrun job, through the store of its agent.

Every rank but the first gives its text to the store and waits until the first has printed it. A rank prints its own
text if the first did not have it in time. So no text is lost when a rank hangs, dies or stops early.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from zbpipe.leaks._alike import numbered_spans, plain

WAIT = 20.0  # seconds that the first rank waits for the others, after its own script has ended
_PATIENCE = 3 * WAIT  # of the others, who may be through long before it
_SHOWN = 8  # texts that are not alike
_PRINTED = "printed"  # key of the ranks whose texts the first has printed
_UNREACHABLE = (RuntimeError, OSError, ValueError)  # the agent has gone, or is another job's


def rank() -> int:
    return int(os.environ.get("RANK") or 0)


def count() -> int:
    return int(os.environ.get("WORLD_SIZE") or 1)


def say_together(text: str, stdout: Any, has_failed: bool) -> None:
    """The first rank prints the texts of all that end in time. A rank prints its own if the first did not, and at once
    if its script ``has_failed``: others may wait for its end."""
    texts, late, store = {rank(): text}, list[int](), None
    with contextlib.suppress(*_UNREACHABLE):
        store = _store()
        if store is not None and rank() > 0:
            store.set(str(rank()), "" if has_failed else text)
            if not has_failed:
                store.wait([_PRINTED], timedelta(seconds=_PATIENCE))
                if str(rank()) in store.get(_PRINTED).decode().split():
                    return
        elif store is not None and not has_failed:
            texts |= _gathered(store)
            late = [r for r in range(count()) if r not in texts]
    _say(text if count() == 1 else _text_of(texts, late), stdout)
    # Not before: a rank that ends with an error status has torchrun end this one.
    with contextlib.suppress(*_UNREACHABLE):
        if store is not None and rank() == 0:
            store.set(_PRINTED, " ".join(map(str, texts)))


def _store() -> Any:
    if count() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=WAIT), wait_for_workers=False)
    run, restart = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    return dist.PrefixStore(f"zbpipe/{run}/{restart}", store)


def _gathered(store: Any) -> dict[int, str]:
    """The others' texts that come within the time."""
    found: dict[int, str] = {}
    end = time.monotonic() + WAIT
    for r in range(1, count()):
        with contextlib.suppress(*_UNREACHABLE):
            if (left := end - time.monotonic()) > 0:
                store.wait([str(r)], timedelta(seconds=left))
            if store.check([str(r)]) and (text := store.get(str(r)).decode()):
                found[r] = text
    return found


def _text_of(texts: dict[int, str], late: list[int]) -> str:
    """Those that are alike but for numbers and the table, which is the second part, once."""
    alike: dict[str, list[int]] = {}
    for r, text in texts.items():
        alike.setdefault(plain("\n".join(text.split("\n\n")[::2])), []).append(r)
    groups = list(alike.values())
    said = []
    for ranks in groups[:_SHOWN]:
        first = texts[ranks[0]]
        whose = "" if all(texts[r] == first for r in ranks) else f", with the numbers of rank {ranks[0]}"
        said.append(f"{_numbered(ranks)} of {count()}{whose}:\n{first}")
    if others := [r for ranks in groups[_SHOWN:] for r in ranks]:
        said.append(f"{_numbered(sorted(others))}: {len(groups) - _SHOWN} other reports")
    if late:
        said.append(f"{_numbered(late)}: failed, or not ended in time; each prints its own report when it ends")
    return "\n\n".join(said)


def _numbered(ranks: list[int]) -> str:
    """As "ranks 0 to 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {numbered_spans(ranks)}"


def _say(text: str, stdout: Any) -> None:
    """Print at once, so that ranks do not interleave; where the output was closed, on standard error."""
    for stream in filter(None, (stdout, sys.stderr, sys.__stderr__)):
        with contextlib.suppress(OSError, ValueError):
            print(text, file=stream, flush=True)
            return
