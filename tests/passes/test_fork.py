"""A fork between I and W: each process has groups of its own, and drops them or runs W as if the other were not there."""

import pytest
from support.oracle import needs_zbpipe
from support.processes import in_own_process

pytestmark = needs_zbpipe

BODY = """
import gc, os, threading
from torch import nn

net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4))
x = torch.randn(3, 4, requires_grad=True)
grad = torch.randn(3, 4)
expected = torch.autograd.grad(net(x), list(net.parameters()), grad)
WATCHED = {watched}
if WATCHED:  # W runs in the engine
    for w in net.parameters():
        w.register_hook(lambda grad: None)


def input_pass():
    out = net(x)
    return zb.stage_backward_input([out], [grad], [x], net.parameters())[1]


def weight_pass(groups, times=1):
    zb.stage_backward_weight(net.parameters(), groups)
    for w, e in zip(net.parameters(), expected):
        torch.testing.assert_close(w.grad, e * times)


def forked(run):
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def in_child():
    assert [group.spent for group in groups] == [False] * len(groups)
    what()
    assert all(group.spent for group in groups) if what is not drop else not groups


def drop():
    groups.clear()
    gc.collect()
    weight_pass(input_pass())


def run():
    weight_pass(groups)


def run_and_go_on():
    weight_pass(groups)
    weight_pass(input_pass(), times=2)


def run_on_a_thread():
    failed = []
    def body():
        try:
            weight_pass(groups)
        except BaseException as error:
            failed.append(error)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not failed, failed
"""

FORKS = {
    "the child drops": "what = drop",
    "the child runs W": "what = run",
    "the child goes on": "what = run_and_go_on",
    "the child runs W on a thread": "what = run_on_a_thread",
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("what", FORKS)
def test_fork_between_the_passes(what, watched):
    in_own_process(
        BODY.replace("{watched}", str(watched))
        + FORKS[what]
        + """
groups = input_pass()
forked(in_child)
assert all(w.grad is None for w in net.parameters())
assert not any(group.spent for group in groups)
weight_pass(groups)
"""
    )


@pytest.mark.parametrize("watched", [False, True])
def test_fork_while_another_thread_is_in_a_pass(watched):
    """The child's copy of those groups is in no pass that could ever end: it is refused, and the child's own are right."""
    in_own_process(
        BODY.replace("{watched}", str(watched))
        + """
big = nn.Linear(1500, 1500)
a = torch.randn(1500, 1500, requires_grad=True)
out = big(big(a))
theirs = zb.stage_backward_input([out], [torch.ones_like(out)], [a], big.parameters())[1]
begun = threading.Event()

def other():
    begun.set()
    zb.stage_backward_weight(big.parameters(), theirs)

groups = input_pass()
thread = threading.Thread(target=other)
thread.start()
begun.wait()
while not any("running" in repr(group) for group in theirs):
    time.sleep(0.001)

def what():
    weight_pass(groups)
    try:
        zb.stage_backward_weight(big.parameters(), theirs)
    except RuntimeError as refusal:
        assert "in another call's hands" in str(refusal)
    else:
        raise AssertionError("not refused")
    theirs.clear()
    gc.collect()

forked(in_child)
thread.join()
weight_pass(groups)
assert all(group.spent for group in theirs)
"""
    )


def test_a_child_that_failed_is_seen():
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        in_own_process(BODY.replace("{watched}", "False") + "\nforked(lambda: 1 / 0)")
