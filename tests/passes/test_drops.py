"""Groups dropped where nobody holds the GIL: by a deleter on a thread that Python has never seen, by the engine, by I."""

import pytest
from support.oracle import needs_zbpipe
from support.processes import in_own_process

pytestmark = needs_zbpipe

BODY = """
import ctypes, gc, threading, weakref
import numpy as np
from support.functions import Asks
from torch import nn
import zbpipe
from zbpipe import memory

libc = ctypes.CDLL(None)


class Holding(np.ndarray):
    pass


class Told:
    def __init__(self, call):
        self.call = call

    def __call__(self):
        return self.call()

    def __del__(self):
        died_on.append(threading.get_native_id())


def hand_over(x, w, grad):
    return zb.defer(Told(lambda: x.t() @ grad), 1), None


def checkpointed(part):
    return lambda x: torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)


died_on = []
w = nn.Parameter(torch.randn(8, 8))
net = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
weights = [w, *net.parameters()]


def input_pass(**policy):
    x = torch.randn(4, 8, requires_grad=True)
    out = checkpointed(net)(net(Asks.apply(x, w, None, hand_over)))
    with zb.policy(**policy):
        return zb.stage_backward_input([out], [torch.ones_like(out)], [x], weights)[1]


def that_holds(groups):
    array = np.ones(4, dtype=np.float32).view(Holding)
    array.groups = groups
    return torch.from_numpy(array)


# Each takes the tensor out of a list: Python 3.10 keeps a call's arguments until it returns.


def dropped_by_a_deleter(only):
    capsule = torch.utils.dlpack.to_dlpack(only.pop())
    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
    managed = python.PyCapsule_GetPointer(capsule, b"dltensor")
    assert python.PyCapsule_SetName(capsule, USED) == 0
    (deleter,) = (ctypes.c_void_p * 1).from_address(managed + 48 + 8)
    thread = ctypes.c_ulong()
    pthread_create, pthread_join = libc.pthread_create, libc.pthread_join
    pthread_create.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
    assert pthread_create(ctypes.addressof(thread), None, deleter, managed) == 0
    pthread_join(thread, None)


USED = b"used_dltensor"


def dropped_by_the_engine(only):
    leaf = torch.ones(4, requires_grad=True)
    out = (leaf * only.pop()).sum()
    out.backward()


def dropped_by_an_input_pass(only):
    leaf, weight = torch.ones(2, 4, requires_grad=True), nn.Parameter(torch.randn(4, 4))
    out = (leaf * only.pop()) @ weight
    zb.stage_backward_input([out], [torch.ones_like(out)], [leaf], [weight])


def check(drop, policy, is_elsewhere):
    input_pass(**policy)
    gc.collect()
    died_on.clear()
    gc.disable()
    with memory.record() as recording:
        groups = input_pass(**policy)
        assert recording.live > 0
        kept = [weakref.ref(group) for group in groups]
        drop([that_holds([groups.pop() for _ in range(len(groups))])])
        assert [ref() for ref in kept] == [None] * len(kept)
        assert len(died_on) == 1 and (died_on[0] != threading.get_native_id()) == is_elsewhere
        assert recording.live == 0, recording.live
    assert all(weight.grad is None for weight in weights)
"""

DROPS = {"a_deleter": True, "the_engine": False, "an_input_pass": False}  # on another thread than this


@pytest.mark.parametrize("policy", [{}, {"defer": "all"}, {"checkpoint": "input_pass"}, {"checkpoint": "recompute"}])
@pytest.mark.parametrize("by", DROPS)
def test_groups_are_dropped_without_the_gil(by, policy):
    in_own_process(f"{BODY}\nfor _ in range(3):\n    check(dropped_by_{by}, {policy}, {DROPS[by]})")


def test_groups_that_nobody_drops_are_seen():
    with pytest.raises(AssertionError, match="AssertionError"):
        in_own_process(f"{BODY}\nkept_too = []\ncheck(kept_too.append, {{}}, True)")
