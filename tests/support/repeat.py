"""A plugin of pytest: each test's body runs again and again in one process, and nothing may grow from run to run.

    PYTHONMALLOC=debug python -m pytest -p support.repeat passes

Counted after each run, when the collector has run: Python's objects that it knows, blocks of Python's memory, tensors, and
zbpipe's groups with the bytes that they hold. What a run leaves behind once (caches, what is compiled or imported) is not
growth: that is what every run leaves.
"""

import array
import gc
import itertools
import sys

import pytest
import torch

import zbpipe
from support import processes

LOOKS, SELDOM, MANY = 5, 20, 200

# Beginnings of tests' names.
IN_OTHER_PROCESSES = "what it runs is in processes of its own"
NOT_REPEATED = {
    "passes/test_drops.py": IN_OTHER_PROCESSES,
    "passes/test_exit.py": IN_OTHER_PROCESSES,
    "passes/test_fork.py": IN_OTHER_PROCESSES,
    "passes/test_interpreters.py": IN_OTHER_PROCESSES,
    "passes/test_programs.py": "each run is hundreds of programs, which hypothesis keeps",
    "policy/test_policy.py::test_environment_variable": IN_OTHER_PROCESSES,
}
CYCLE = "a hook of the test refers to the stage that it hangs on, through autograd's graph: Python's collector sees no cycle"
TRACED = "torch keeps what it has noted of symbolic shapes, without zbpipe too"
REENTRANT = "torch's reentrant checkpoint leaves blocks, fewer and fewer over hundreds of calls, without zbpipe too"
COMPILED = "torch.compile leaves a wrapper of each module that it is called with, without zbpipe too"
ANOMALY = "torch's anomaly mode leaves what it has told of, without zbpipe too"
GROWS = {
    "passes/test_dtypes.py::test_anomaly_mode_finds_a_nan_in_the_input_pass": ANOMALY,
    "passes/test_groups.py::test_groups_of_symbolic_sizes_can_be_asked_about": TRACED,
    "release/test_make_viewless.py::test_under_checkpoint[": REENTRANT,
    "release/test_make_viewless.py::test_as_the_output_of_a_checkpoint[True]": REENTRANT,
    "explain/test_refusals.py::test_modules_that_are_replicated_or_sharded[compiled]": COMPILED,
    "explain/test_refusals.py::test_compiled_modules[": COMPILED,
    "passes/test_hooks.py::test_hooks[several tensors]": CYCLE,
    "passes/test_hooks.py::test_hook_in_the_weight_pass_that_runs_the_input_pass_of_the_next_microbatch[": CYCLE,
    "passes/test_weights.py::test_hook_on_a_weight_below_a_shared_computation": CYCLE,
    "passes/test_weights.py::test_casts_cached_by_one_autocast_block_around_all_forwards": CYCLE,
}


def in_own_process(*_args, **_kwargs):
    pytest.skip("not repeated: " + IN_OTHER_PROCESSES)


processes.in_own_process = in_own_process  # before the tests' modules take it


def reason_of(item, table):
    name = item.nodeid.removeprefix("tests/")
    return next((reason for start, reason in table.items() if name.startswith(start)), None)


WHAT = ("objects", "blocks", "tensors", "groups", "bytes held by groups")


def look(into, at):
    """Writes the counts where there is room for them: what a look makes must not be counted by the next."""
    gc.collect()
    objects = gc.get_objects()
    into[at] = len(objects)
    for i in range(2, len(WHAT)):
        into[at + i] = 0
    for thing in objects:
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            into[at + 2] += 1
        elif kind is zbpipe.ParamGroup:
            into[at + 3] += 1
            into[at + 4] += thing.bytes_held
    del objects, thing
    into[at + 1] = sys.getallocatedblocks()


def grown(looks):
    """What every run has added to."""
    series = {what: list(looks[i :: len(WHAT)]) for i, what in enumerate(WHAT)}
    return {
        what: counts
        for what, counts in series.items()
        if all(later > earlier for earlier, later in itertools.pairwise(counts))
    }


# torch's own queues what it is to seed on devices that nobody uses, with the stack of each call.
torch.manual_seed = torch.default_generator.manual_seed


# A tensor's hooks of this kind are unseen by Python's collector: one that refers to the tensor's owner keeps both.
_register = torch.Tensor.register_post_accumulate_grad_hook
_handles = []


def register_post_accumulate_grad_hook(tensor, hook):
    _handles.append(_register(tensor, hook))
    return _handles[-1]


torch.Tensor.register_post_accumulate_grad_hook = register_post_accumulate_grad_hook


def run(item):
    torch.manual_seed(0)
    try:
        item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
    finally:
        while _handles:
            _handles.pop().remove()


def looked_at(item, runs, between):
    """As many looks, with so many runs before each."""
    looks = array.array("q", bytes(8 * len(WHAT) * runs))
    for at in range(0, len(looks), len(WHAT)):
        for _ in range(between):
            run(item)
        look(looks, at)
    return looks


def grows_by_one_a_run(item, between):
    """What every run adds to, where few looks are; the first of these runs still fill caches."""
    return {
        what: counts
        for what, counts in grown(looked_at(item, 4, between)[len(WHAT) :]).items()
        if min(later - earlier for earlier, later in itertools.pairwise(counts)) >= between
    }


def grows(item):
    """What grows from look to look, and still does by one a run where few looks are."""
    often = grown(looked_at(item, LOOKS, 1))
    growth = grows_by_one_a_run(item, SELDOM) if often else {}
    if list(growth) == ["blocks"]:  # caches of Python and torch fill over hundreds of runs, ever slower
        growth = grows_by_one_a_run(item, MANY)
    return {what: counts for what, counts in growth.items() if what in often}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if reason_of(pyfuncitem, NOT_REPEATED):
        pytest.skip("not repeated: " + reason_of(pyfuncitem, NOT_REPEATED))
    run(pyfuncitem)
    gc.collect()
    gc.freeze()  # looks are short: at what this test makes alone
    try:
        run(pyfuncitem)
        growth = grows(pyfuncitem)
    finally:
        gc.unfreeze()
    if growth and not reason_of(pyfuncitem, GROWS):
        pytest.fail(f"grows from run to run: {growth}", pytrace=False)
    return True
