"""Starts the ranks as processes, and ends all of them when one fails, or on Ctrl-C.

Under torchrun (``RANK`` and ``WORLD_SIZE`` are set) this process is one rank, and torchrun starts and ends the ranks.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys

import torch
from torch.distributed import Store, TCPStore
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from demo.config import Config

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def launch(config: Config) -> int:
    """Runs the demo to its end. Returns its exit status: 0 if zbpipe's losses and gradients are right."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        config = dataclasses.replace(config, ranks=int(os.environ["WORLD_SIZE"]))
        store, rank, _ = next(rendezvous("env://"))
        return _work(rank, store, config)
    return _spawn(config)


def _spawn(config: Config) -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the profiler warns of storages older than the step
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: a free one
    ranks = start_processes(  # type: ignore[no-untyped-call]
        _spawned, args=(store.port, config), nprocs=config.ranks, join=False, start_method="spawn"
    )
    try:
        while not ranks.join():
            pass
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except (ProcessRaisedException, ProcessExitedException) as error:
        if getattr(error, "signal_name", None) == "SIGINT":  # Ctrl-C reached a rank before it reached this process
            print("\ninterrupted", file=sys.stderr)
            return INTERRUPTED
        print(f"\nThe demo failed: {str(error).strip()}", file=sys.stderr)
        return 1
    finally:
        for process in ranks.processes:
            if process.is_alive():
                process.terminate()
        for process in ranks.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    return int(store.get("status"))


def _spawned(rank: int, port: int, config: Config) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, without a traceback
    _work(rank, TCPStore("127.0.0.1", port, is_master=False), config)


def _work(rank: int, store: Store, config: Config) -> int:
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    from demo.worker import work

    return work(rank, store, config)
