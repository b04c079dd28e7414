"""What each process of tests/stacks runs: the cases of one module, one after the other.

    python run_cases.py RANK WORLD FOLDER MODULE KIND

MODULE (stacks.ddp_cases) has CASES, a dictionary from a case's name to (kind, function); the cases of KIND run. For each
the process writes "passed", or the error, to FOLDER/NAME.RANK. A case that fails ends the process: other ranks may wait
for it.
"""

import importlib
import sys
import traceback
import warnings
from pathlib import Path

import torch.distributed as dist

from support.ranks import join

warnings.simplefilter("ignore")  # torch's own, of the parts of it that are being tested


def main(rank, world, folder, module, kind):
    join(rank, world, folder, seconds=45)
    for name, (of_kind, case) in importlib.import_module(module).CASES.items():
        if of_kind != kind:
            continue
        result = folder / f"{name}.{rank}"
        try:
            case()
        except Exception as error:
            result.write_text("".join(traceback.format_exception(error))[-6000:])
            raise
        result.write_text("passed")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
