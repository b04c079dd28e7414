"""What lives and what does not, seen by other means than zbpipe.leaks."""

import contextlib
import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zbpipe import _C  # asks whether the allocator is watched


def collects():
    """Whether the collector runs by itself."""
    return gc.isenabled() and gc.get_threshold()[0] > 0


def records():
    """Whether anything watches torch's CPU allocator."""
    before = _C.next_serial()
    torch.empty(1)
    return _C.next_serial() != before


class Watch(TorchDispatchMode):
    """Remembers, without holding it, the storage of every tensor that an operation makes inside."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self.storages.append(StorageWeakRef(tensor.untyped_storage()))
        return result

    def alive(self, *kept):
        """Number of watched storages that live, but for those of the tensors in `kept`."""
        ours = {t.untyped_storage()._cdata for t in kept if t is not None}
        return len({ref.cdata for ref in self.storages if not ref.expired()} - ours)


@contextlib.contextmanager
def no_collector():
    """The collector off; at the end no tensor may be found in its garbage."""
    while gc.collect():  # what is freed may leave more to free, as what was compiled does
        pass
    gc.disable()
    flags = gc.get_debug()
    try:
        yield
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [
            type(thing).__name__ for thing in gc.garbage if isinstance(thing, (torch.Tensor, torch.autograd.graph.Node))
        ]
        native = [type(thing).__name__ for thing in gc.garbage if "ParamGroup" in type(thing).__name__]
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
        gc.enable()
        gc.collect()
    assert found == [], "tensors or nodes in gc.garbage"
    assert native == [], "groups in gc.garbage"
