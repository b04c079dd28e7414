"""Torch 2.11's schedules open, in their first step, a connection between every two neighbouring stages, also where both
are on one rank; gloo refuses ("Pair is not connected"), so that no V schedule and no schedule on one rank runs over it.
2.12 opens these connections otherwise. Here what a rank would send to itself is left out.

On such a torch tests/conftest.py puts this folder at the head of sys.path, which the tests hand to their ranks as
PYTHONPATH, and Python imports a module of this name when it starts: no script of a rank has to know of it. What is run
as a user runs it, the examples, the demo and the commands, gets no sys.path from the tests, and stays as it is.
Torch itself is not imported here.
"""

import sys
from importlib.machinery import PathFinder

STAGE = "torch.distributed.pipelining.stage"


class Finder:
    """Lets the module of the stages come from where it is, and changes it when it has been imported."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != STAGE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        exec_module = spec.loader.exec_module

        def exec_and_leave_out(module):
            exec_module(module)
            leave_out_own_rank(module)

        spec.loader.exec_module = exec_and_leave_out
        return spec


def leave_out_own_rank(module):
    base = module._PipelineStageBase
    every = base._get_init_p2p_neighbors_ops

    def of_other_ranks(stage):
        return [op for op in every(stage) if op.peer != module.dist.get_rank()]

    base._get_init_p2p_neighbors_ops = of_other_ranks


sys.meta_path.insert(0, Finder)
