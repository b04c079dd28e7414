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


@pytest.mark.parametrize("passes", [input_pass_elsewhere, weight_pass_elsewhere, each_group_elsewhere])
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
        with pytest.raises(RuntimeError, match="is in another call's hands") as refusal:
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


# What other threads release while it is looked at. In a process of its own, where freed memory is overwritten: what reads
# it crashes there, or waits for a lock that is no longer one.
LOOKED_AT = """
import threading, torch, zbpipe, zbpipe.memory
torch.set_num_threads(1)
ROUNDS = {rounds}
def pass_of(x, y, w):
    return zbpipe.stage_backward_input([y], [torch.ones_like(y)], [x], [w])[1]
def last(groups):
    try:
        zbpipe.stage_backward_weight([w], groups)
    except RuntimeError:
        pass
{code}
print("done")
"""

# A computed weight that two microbatches share. Another thread's W of the second releases it.
HELD = """
index = torch.meshgrid(*[torch.arange(2)] * 8, indexing="ij")
w = torch.randn((2,) * 8, requires_grad=True)
for _ in range(ROUNDS):
    u = w
    for _ in range(100):
        u = u[index]  # a list of saved tensors, which a backward frees
    u = u.reshape(16, 16)
    xs = [torch.randn(4, 16, requires_grad=True) for _ in range(2)]
    groups = [pass_of(x, x @ u, w) for x in xs]
    del u
    zbpipe.stage_backward_weight([w], groups[0], retain_graph=True)
    thread = threading.Thread(target=last, args=(groups[1],))
    thread.start()
    while thread.is_alive():
        zbpipe.memory.held(groups[0]), groups[0][0]._reads_weights
    thread.join()
"""

# Written in place through views. Its second backward is wrong, and an ordinary one says so: right, or an error in words.
WRITTEN = """
w, c = torch.randn(16, 16, requires_grad=True), torch.rand(16)
for _ in range(ROUNDS):
    u = w * 1.0
    for i in range(200):
        u[i % 16].mul_(c)
    (x, y), (x2, y2) = [(x, x @ u) for x in (torch.randn(4, 16, requires_grad=True) for _ in range(2))]
    del u
    thread = threading.Thread(target=last, args=(pass_of(x, y, w),))
    thread.start()
    try:
        pass_of(x2, y2, w)
    except RuntimeError:
        pass
    thread.join()
"""


@needs_zbpipe
@pytest.mark.long
@pytest.mark.parametrize(("code", "rounds"), [(HELD, 400), (WRITTEN, 200)], ids=["held", "written in place"])
def test_what_another_thread_releases_is_looked_at_under_its_lock(code, rounds):
    done = python("-W", "ignore", "-c", LOOKED_AT.format(rounds=rounds, code=code), MALLOC_PERTURB_="165")
    assert done.stdout.endswith("done\n"), done.stderr[-2000:]
