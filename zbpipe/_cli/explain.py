"""Say of each parameter whether W or I computes its gradient, and why. Also say
what is held from I to W, and the FLOPs of W's products. Nothing is trained.
NAME is a function without arguments that returns the stage and its inputs for
one microbatch:

    def stage():
        return Block(), torch.randn(64, 128)      # or a tuple of inputs

    python -m zbpipe explain model.py:stage
    python -m zbpipe explain mypackage.models:stage
    ZBPIPE_POLICY=defer=all python -m zbpipe explain model.py:stage

--first-stage: the inputs are data, and take no gradient.

Exit status: 0; 1 if the function or the stage's forward failed; 2 for a wrong
command line.
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

import zbpipe
from zbpipe._cli.files import file_to_write, search_first

SCHEMA = 1  # of --json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="FILE.py:NAME", help="or PACKAGE.MODULE:NAME")
    parser.add_argument("--first-stage", action="store_true", help="the inputs take no gradient")
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the plan to FILE")
    parser.set_defaults(run=run, parser=parser)


def run(given: argparse.Namespace) -> int:
    module, inputs = _stage(given)
    plan = zbpipe.explain(module, inputs, first_stage=given.first_stage)
    print(plan)
    if given.json:
        data = {"schema": SCHEMA, "zbpipe": zbpipe.__version__, "torch": torch.__version__, "what": given.what}
        given.json.write_text(json.dumps({**data, **plan.as_dict()}, indent=1) + "\n")
    return 0


def _stage(given: argparse.Namespace) -> tuple[torch.nn.Module, Any]:
    """What the function gives; exits if it is not there, or gives something else."""
    error: Callable[[str], NoReturn] = given.parser.error
    where, _, name = given.what.rpartition(":")
    if not where or not name.isidentifier():
        error(f"{given.what} names no function; expected FILE.py:NAME or PACKAGE.MODULE:NAME")
    function = getattr(_imported(where, error), name, None)
    if not callable(function):
        error(f"{where} has no function {name}")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module)):
        error(f"{name}() gave a {type(made).__name__}; expected a pair, a torch.nn.Module and its inputs")
    return made[0], made[1]


def _imported(where: str, error: Callable[[str], NoReturn]) -> Any:
    if not where.endswith(".py"):
        search_first(os.getcwd())
        try:
            found = importlib.util.find_spec(where)
        except ModuleNotFoundError:
            found = None
        if found is None:
            error(f"there is no module {where}; a file ends in .py")
        return importlib.import_module(where)
    path = Path(where)
    if not path.is_file():
        error(f"there is no file {where}")
    search_first(str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
