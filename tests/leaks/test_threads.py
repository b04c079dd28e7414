"""Searches beside threads that change and free what is looked at."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.processes import python

COMPILER = shutil.which(os.environ.get("CC", "cc"))

# What the scripts begin with. torch's own of a thread's outlives its join, and asks for the GIL when the thread has ended:
# not while Python ends.
START = """
import gc, os, sys, threading, time
import torch
from torch import nn
import zbpipe
from zbpipe.leaks import check_tensor_leak, find_holders
from zbpipe.leaks._heap import Heap  # of little, to look often

torch.set_num_threads(1)
stop = threading.Event()
looks = 0


def look_into(things, ignored=()):
    heap = Heap({}, [globals(), *ignored])
    heap.add_roots([things])
    heap.explore()


def beside(work, look, goes_on=lambda: looks == 0):
    global looks
    thread = threading.Thread(target=work)
    thread.start()
    end = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < end or goes_on():
        look()
        looks += 1
    stop.set()
    thread.join()
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        time.sleep(0.01)
    print("looks", looks)
"""

TRAINING_BESIDE_CHECKS = """
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(12)])


def ordinary():
    while not stop.is_set():
        model(torch.randn(4, 8)).sum().backward()
        model.zero_grad()


def split():
    while not stop.is_set():
        x = torch.randn(4, 8, requires_grad=True)
        out = model(x)
        groups = zbpipe.stage_backward_input([out], [torch.ones(4, 8)], [x], model.parameters())[1]
        zbpipe.stage_backward_weight(model.parameters(), groups)
        model.zero_grad()


def look():
    with check_tensor_leak(action="record"):
        pass
    find_holders(model[0][0].weight)


beside({"ordinary": ordinary, "split": split}[sys.argv[2]], look)
"""

# What each search meets is nodes that somebody keeps, what they have saved, and weights.
SEARCHES_BESIDE_PASSES = """
sys.setswitchinterval(1e-5)
stage = nn.Sequential(*[nn.Sequential(nn.Conv1d(4, 4, 1), nn.LayerNorm(8)) for _ in range(8)])
nodes = []
steps = 0


def passes():
    global steps
    while not stop.is_set():
        x = torch.randn(2, 4, 8, requires_grad=True)
        out = x
        kept = []
        for part in stage.modules():
            if not isinstance(part, nn.Sequential):
                out = part(out)
                kept.append(out.grad_fn)
        nodes[:] = kept
        with zbpipe.policy(defer="all"):
            groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], stage.parameters())[1]
            zbpipe.stage_backward_weight(stage.parameters(), groups)
        stage.zero_grad()
        steps += 1


types = [torch.Tensor, nn.Parameter, type(lambda: None), type(torch.ones(1, requires_grad=True).exp().grad_fn)]
gc.collect()
gc.freeze()
beside(passes, lambda: look_into(nodes, types), lambda: looks <= 100 or steps <= 10)
"""

GRADIENTS_THAT_GO = """
import ctypes

slow = ctypes.c_int.in_dll(ctypes.CDLL(None), "times_given_away")
leaves = [nn.Parameter(torch.ones(3)) for _ in range(4)]


def zero_grads():
    while not stop.is_set():
        for leaf in leaves:
            leaf.grad = torch.ones(3)
        for leaf in leaves:
            {}


beside(zero_grads, lambda: look_into(leaves))
print("times given away", slow.value)
"""


@pytest.fixture
def said_by(tmp_path):
    """Runs a script to its end, and gives what it has printed."""

    def run(text, *arguments, **variables):
        script = tmp_path / "script.py"
        script.write_text(text)
        done = python(script, *arguments, **variables)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.mark.parametrize("seconds", ["2", pytest.param("20", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [(TRAINING_BESIDE_CHECKS, ["ordinary"]), (TRAINING_BESIDE_CHECKS, ["split"]), (SEARCHES_BESIDE_PASSES, [])],
    ids=["ordinary", "split", "often"],
)
def test_another_thread_may_free_what_is_looked_at(text, arguments, seconds, said_by):
    assert said_by(START + text, seconds, *arguments).startswith("looks")


@pytest.mark.parametrize(
    "way",
    ["leaf.grad = None", "setattr(leaf, 'grad', None)", "with torch.device('cpu'): leaf.grad = None"],
    ids=["an assignment", "setattr", "a mode"],
)
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_a_gradient_may_go_when_it_was_looked_at(way, tmp_path, said_by):
    """To set `leaf.grad` gives the GIL away before it frees the gradient, which the leaf still refers to."""
    library = tmp_path / "slow_threads.so"
    source = Path(__file__).with_name("slow_threads.c")
    preloaded = os.environ.get("LD_PRELOAD", "")
    # make asan preloads a sanitizer, which would find the compiler's own leaks.
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True, env=env)
    said = said_by(START + GRADIENTS_THAT_GO.format(way), "3", LD_PRELOAD=f"{preloaded}:{library}".lstrip(":"))
    if said.endswith(" 0\n"):
        pytest.skip("this Python calls its own functions without the dynamic linker")


DYING = """
import sys
import torch
import zbpipe
from zbpipe.leaks import find_holders


class Last:
    def __call__(self, *args):
        pass

    def __del__(self):
        found.append(find_holders(wanted))


found, wanted = [], torch.ones(3)
linear = torch.nn.Linear(3, 3)
x = torch.randn(2, 3, requires_grad=True)
out = linear(x).exp()
out.grad_fn.register_hook(Last())
if sys.argv[1] == "input pass":
    zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], linear.parameters())
else:
    out.detach_()
assert len(found) == 1 and found[0].chain
assert out.grad_fn is None
print("found")
"""


@pytest.mark.parametrize("by", ["input pass", "detach_"])
def test_a_node_that_is_dying_is_not_looked_at(by, said_by):
    """The tensor refers to it until it has been freed, and what it frees may run Python code."""
    assert said_by(DYING, by) == "found\n"


# libtorch makes a view's node anew under a lock of the view's, and runs the subclass's code meanwhile.
WITHIN_A_LOCK = """
import threading
import torch
from torch.utils._pytree import tree_map
import zbpipe
from zbpipe.leaks import find_holders


class Wrapper(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        look()
        plain = tree_map(lambda t: t.inner if isinstance(t, Wrapper) else t, args)
        out = func(*plain, **(kwargs or {}))
        return args[0] if func is torch.ops.aten.mul_.Tensor else tree_map(Wrapper, out)


def look():
    pass


def search():
    find_holders(wanted)
    found.append(1)


def search_here_and_beside():
    global look
    look = lambda: None
    thread = threading.Thread(target=search)
    thread.start()
    search()
    thread.join()


wanted, found = torch.ones(3), []
base = Wrapper(torch.ones(2, 3)).requires_grad_() * 2
view = base.view(6)
base.mul_(3)
look = search_here_and_beside
view.grad_fn
print(len(found))
"""


def test_a_search_waits_for_no_lock_of_libtorchs(said_by):
    assert said_by(WITHIN_A_LOCK) == "2\n"


WITHIN_A_TRANSFORM = """
import sys
import numpy as np
import torch
import zbpipe
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.dlpack import to_dlpack
from zbpipe import _C  # a chain says it in words
from zbpipe.leaks import find_holders

array = np.ones(1000)
wanted, capsule = torch.from_numpy(array), to_dlpack(torch.ones(4))


def look():
    return [holder.text for holder in find_holders(wanted).chain]


if sys.argv[1] == "grad":
    torch.func.grad(lambda x: (look(), x.sum())[1])(torch.ones(3))
else:
    with FakeTensorMode():
        look()
print([label for _, label, _ in _C.references_of(_C.handle_of(wanted.untyped_storage()))])
"""


@pytest.mark.parametrize("within", ["grad", "fake"])
def test_the_first_look_at_foreign_memory_may_be_within_a_transform(within, said_by):
    assert said_by(WITHIN_A_TRANSFORM, within) == "['numpy array']\n"


TRACING_THAT_ENDS = """
import gc, weakref
import torch
from zbpipe import _C  # to ask for a stack after the end


class Cycle:
    pass

def deep(n):
    if n:
        return deep(n - 1)
    cycle = Cycle()
    cycle.me = cycle
    weakref.finalize(cycle, _C.trace_stop)
    del cycle
    gc.set_threshold(1)
    kept.append(torch.empty(1000))

kept = []
recorder = _C.Recorder(0)
recorder.start()
gc.collect()
gc.freeze()
since = _C.next_serial()
_C.trace_start()
deep(40)
gc.set_threshold(700)
gc.collect()
(*_, number), = _C.live_blocks(since)
print(_C.trace_of(number))
"""


def test_a_collection_may_end_the_tracing(said_by):
    """Python makes frames while a stack is read, and may collect then."""
    assert said_by(TRACING_THAT_ENDS) == "[]\n"
