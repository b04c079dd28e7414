"""I and W on different threads, several microbatches at once, groups dropped elsewhere."""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.oracle import Stage, needs_zbpipe, zb
from support.processes import python
from torch import nn

f64 = torch.float64


def on_thread(function, *args):
    """Run on a thread of its own; hand back its result or its exception."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result(timeout=60)


def run_all(functions):
    """Run each on a thread of its own, all at once."""
    barrier = threading.Barrier(len(functions), timeout=60)
    with ThreadPoolExecutor(len(functions)) as pool:
        list(pool.map(lambda function: barrier.wait() is None or function(), functions, timeout=60))


def network():
    net = nn.Sequential(nn.Linear(4, 8, dtype=f64), nn.Tanh(), nn.Linear(8, 4, dtype=f64))
    return Stage(lambda m, x: (m.net(x) * m.s).sin() @ (m.a @ m.b), net=net, s=(4,), a=(4, 4), b=(4, 4))


def microbatch(m):
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    out = m(x)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(m(x), [x, *m.parameters()], grad)
    return x, out, grad, expected


def run_input(m, x, out, grad):
    return zb.stage_backward_input([out], [grad], [x], m.parameters())[1]


def run_weight(m, groups):
    return zb.stage_backward_weight(m.parameters(), groups)


def assert_right(m, x, expected):
    torch.testing.assert_close([x.grad, *(w.grad for w in m.parameters())], list(expected))


def input_pass_elsewhere(m, *job):
    run_weight(m, on_thread(run_input, m, *job))


def weight_pass_elsewhere(m, *job):
    on_thread(run_weight, m, run_input(m, *job))


def each_group_elsewhere(m, *job):
    for group in run_input(m, *job):
        on_thread(run_weight, m, [group])


@pytest.mark.parametrize(
    "passes", [input_pass_elsewhere, weight_pass_elsewhere, each_group_elsewhere], ids=lambda passes: passes.__name__
)
def test_passes_on_another_thread(passes):
    m = network()
    *job, expected = microbatch(m)
    passes(m, *job)
    assert_right(m, job[0], expected)


def test_hooks_in_python_run_on_the_other_thread():
    m = network()
    seen = []
    m.a.register_hook(lambda grad: seen.append(threading.current_thread().name))
    x, out, grad, expected = microbatch(m)
    seen.clear()
    groups = run_input(m, x, out, grad)
    on_thread(run_weight, m, groups)
    assert len(seen) == 1
    assert_right(m, x, expected)


def test_input_passes_of_two_microbatches_of_one_stage_at_once():
    m = network()
    jobs = [microbatch(m) for _ in range(8)]
    groups = []
    run_all([lambda job=job: groups.append(run_input(m, *job[:3])) for job in jobs])
    for each in groups:
        run_weight(m, each)
    for x, _, _, expected in jobs:
        torch.testing.assert_close(x.grad, expected[0])
    sums = [sum(job[3][i] for job in jobs) for i in range(1, 1 + len(list(m.parameters())))]
    torch.testing.assert_close([w.grad for w in m.parameters()], sums)


def test_one_group_cannot_run_twice_at_once():
    """Two threads ask for the same groups: each weight's gradient is added once."""
    m = network()
    x, out, grad, expected = microbatch(m)
    groups = run_input(m, x, out, grad)
    refused = []

    def run():
        try:
            run_weight(m, groups)
        except (RuntimeError, KeyError) as error:
            refused.append(error)

    run_all([run, run])
    assert len(refused) == 1
    assert_right(m, x, expected)


def sharing_microbatches(number):
    """A stage whose effective weight, after a chain of nodes, is computed once for all microbatches."""
    m = Stage(lambda m, x: x @ m.shared, a=(8, 8))
    m.a.register_hook(lambda grad: None)
    m.shared = m.a + 0.0
    for _ in range(300):
        m.shared = m.shared + 0.0
    xs = [torch.randn(4, 8, dtype=f64, requires_grad=True) for _ in range(number)]
    jobs = [(x, m(x), torch.randn(4, 8, dtype=f64)) for x in xs]
    return m, jobs, sum(x.detach().t() @ grad for x, _, grad in jobs)


def test_weight_passes_at_once_of_microbatches_that_share_nodes():
    for _ in range(10):
        m, jobs, expected = sharing_microbatches(4)
        groups = [run_input(m, *job) for job in jobs]
        run_all([functools.partial(run_weight, m, each) for each in groups])
        torch.testing.assert_close(m.a.grad, expected)


def test_weight_pass_beside_the_input_pass_of_a_microbatch_that_shares_nodes():
    m, jobs, expected = sharing_microbatches(20)
    groups = run_input(m, *jobs[0])
    for job in jobs[1:]:
        following = []
        run_all(
            [
                functools.partial(run_weight, m, groups),
                lambda job=job, following=following: following.extend(run_input(m, *job)),
            ]
        )
        groups = following
    run_weight(m, groups)
    torch.testing.assert_close(m.a.grad, expected)


@needs_zbpipe
def test_group_read_on_another_thread_while_its_weight_pass_runs():
    """Every answer is a state or a refusal."""
    m = network()
    m.a.register_hook(lambda grad: None)
    done, current, answers = threading.Event(), [], set()

    def read():
        finished = False
        while not finished:
            finished = done.is_set()
            for group in list(current):
                try:
                    answers.add(type((repr(group), group.bytes_held, group.weights)))
                except (RuntimeError, KeyError) as refusal:
                    answers.add(type(refusal))

    def work():
        try:
            for _ in range(10):
                x, out, grad, _ = microbatch(m)
                current[:] = run_input(m, x, out, grad)
                run_weight(m, current)
        finally:
            done.set()

    run_all([read, work])
    assert answers


class LooksForItsMainGrad(nn.Parameter):
    """Runs `looking` when a weight pass asks for the main_grad."""

    looking = None

    @property
    def main_grad(self):
        if self.looking is not None:
            self.looking()
        return None


@needs_zbpipe
@pytest.mark.parametrize("elsewhere", [False, True])
def test_groups_are_taken_before_a_weight_pass_asks_for_anything(elsewhere):
    """Another weight pass of the same groups, which begins while this one looks for a main_grad, is refused."""
    w = LooksForItsMainGrad(torch.randn(4, 4, dtype=f64))
    m = Stage(lambda m, x: x @ m.w, w=w)
    refusals = []

    def again():
        w.looking = None
        with pytest.raises(RuntimeError, match="already running in another call") as refusal:
            run_weight(m, groups)
        refusals.append(refusal)

    x, out, grad, expected = microbatch(m)
    groups = run_input(m, x, out, grad)
    w.looking = functools.partial(on_thread, again) if elsewhere else again
    with zb.policy(main_grad=True):
        run_weight(m, groups)
    assert len(refusals) == 1
    assert_right(m, x, expected)


@needs_zbpipe
def test_nothing_is_loaded_where_the_gil_is_off():
    """A free-threaded Python has turned it on when the library is loaded, unless PYTHON_GIL=0 forbids it."""
    code = "import sys; sys._is_gil_enabled = lambda: {}; import zbpipe; print(zbpipe.is_patched())"
    refused, loaded = (python("-c", code.format(is_on)) for is_on in (False, True))
    assert "ImportError: zbpipe needs the GIL, and this process runs without it (PYTHON_GIL=0" in refused.stderr
    assert refused.returncode == 1 and loaded.stdout == "False\n", loaded.stderr
