"""The interpreter ends while groups live, or a pass runs: with status 0, and silently."""

import pytest
from support.oracle import needs_zbpipe
from support.processes import forks

pytestmark = needs_zbpipe

START = """
import atexit, builtins, sys, threading, time
import torch
import zbpipe
from torch import nn

torch.set_num_threads(1)
if sys.argv[1] == "with torch.distributed":
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))


def input_pass():
    x = torch.randn(4, 8, requires_grad=True)
    out = net(x)
    return zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], net.parameters())[1]


def weight_pass(groups):
    zbpipe.stage_backward_weight(net.parameters(), groups)


def raises(grad):
    raise ValueError("planned")


class Last:
    def __init__(self, action, *arguments):
        self.action, self.arguments = action, arguments

    def __del__(self):
        self.action(*self.arguments)
"""
ENDS = {
    "a variable": "kept = input_pass()",
    "a module": "torch.kept = input_pass()",
    "builtins": "builtins.kept = input_pass()",
    "a cycle": "kept = [input_pass()]\nkept.append(kept)",
    "a waiting thread": """
def wait(groups):
    threading.Event().wait()
threading.Thread(target=wait, args=(input_pass(),), daemon=True).start()
""",
    "an exit handler's arguments": "atexit.register(len, input_pass())",
    "an exit handler that runs W": "atexit.register(weight_pass, input_pass())",
    "an exit handler that runs I and W": "atexit.register(lambda: weight_pass(input_pass()))",
    "an object that runs W when it goes": "last = Last(weight_pass, input_pass())",
    "a W that failed": """
kept = input_pass()
net[0].weight.register_hook(raises)
try:
    weight_pass(kept)
except ValueError:
    pass
""",
    "deferred work": """
from support.functions import Handing
w = nn.Parameter(torch.randn(8, 8))
x = torch.randn(4, 8, requires_grad=True)
out = Handing.apply(x, w)
kept = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], [w])[1]
""",
    "a recording that runs": "recording = zbpipe.memory.record()\nrecording.__enter__()\nkept = input_pass()",
    "a check that runs": """
from zbpipe.leaks import check_tensor_leak
check = check_tensor_leak()
check.__enter__()
kept = input_pass()
""",
    "a patched torch": "zbpipe.patch()\nkept = input_pass()",
}
# A thread is in a pass, without the GIL, when the interpreter begins to end; when it is back, that has not ended yet.
# The products within are one call of Python's: of a tensor that Python has seen, libtorch itself takes the GIL to release
# what is saved, and a thread that does so in an ordinary backward aborts the process too.
DAEMON = """
big = nn.Linear(1500, 1500, bias=False)
x = torch.randn(1500, 1500, requires_grad=True)
out = torch.linalg.multi_dot([x, big.weight, big.weight])
grad = torch.ones_like(out)
in_pass = threading.Event()


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)


def run():
    if sys.argv[2] == "W":
        groups = zbpipe.stage_backward_input([out], [grad], [x], big.parameters())[1]
        in_pass.set()
        for _ in range(50):
            zbpipe.stage_backward_weight(big.parameters(), groups, retain_graph=True)
    else:
        in_pass.set()
        zbpipe.stage_backward_input([out], [grad], [x], big.parameters())


slow = Slow()
threading.Thread(target=run, daemon=True).start()
in_pass.wait()
time.sleep(0.01)
"""


def assert_silent(tmp_path, code, *arguments):
    output = tmp_path / "output"
    process = {"argv": ["-c", *arguments], "code": START + code, "output": [str(output)] * 2}
    (status,) = forks().run([process], timeout=60)
    assert (status, output.read_text()) == (0, "")


@pytest.mark.parametrize("distributed", ["with torch.distributed", "without"])
@pytest.mark.parametrize("end", ENDS)
def test_interpreter_ends_while_groups_are_kept_by(end, distributed, tmp_path):
    assert_silent(tmp_path, ENDS[end], distributed)


@pytest.mark.parametrize("pass_", ["I", "W"])
@pytest.mark.parametrize("distributed", ["with torch.distributed", "without"])
def test_interpreter_ends_while_a_daemon_thread_runs(pass_, distributed, tmp_path):
    assert_silent(tmp_path, DAEMON, distributed, pass_)


@pytest.mark.parametrize("fault", ["import os; os._exit(1)", "print('something')", "atexit.register(raises, 1)"])
def test_other_ends_are_seen(fault, tmp_path):
    with pytest.raises(AssertionError):
        assert_silent(tmp_path, fault, "without")
