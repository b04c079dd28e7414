"""Runs the cases of a module over four processes, and tells what became of one of them."""

import pytest

from support.processes import run_ranks

WORLD = 4


def parameters(cases):
    """pytest's parameters, the long cases marked as such. Any other kind is why the case is skipped."""
    marks = {"fast": (), "long": pytest.mark.long}
    return [
        pytest.param(name, marks=marks[kind] if kind in marks else pytest.mark.skip(reason=kind))
        for name, (kind, _) in cases.items()
    ]


class Runs:
    """Runs the fast and the long cases of `module` once each, when the first of them is asked for."""

    def __init__(self, module, factory):
        self.module, self.factory = module.__name__, factory
        self.cases = module.CASES
        self.folders = {}

    def judge(self, name):
        kind = self.cases[name][0]
        if kind not in self.folders:
            self.folders[kind] = self.factory.mktemp(f"{self.module}_{kind}")
            run_ranks("support/stacks/run_cases.py", WORLD, self.folders[kind], self.module, kind, timeout=500)
        folder = self.folders[kind]
        said = []
        for rank in range(WORLD):
            result = folder / f"{name}.{rank}"
            said.append(result.read_text() if result.exists() else "did not come to it")
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text != "passed"]
        if failed:
            printed = [(folder / f"output.{rank}").read_text()[-1000:] for rank in range(WORLD)]
            pytest.fail("\n".join([*failed, "The last that each rank printed:", *printed]), pytrace=False)
