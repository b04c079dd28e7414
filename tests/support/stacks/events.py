"""What a step does, in order: collectives, products, and the stage's passes around them."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.pipelines import watch

NO_COLLECTIVES = ("send", "recv_", "recv_any_source_", "wait_tensor", "_wrap_tensor_autograd")
SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")


class Events(TorchDispatchMode):
    """The log of what happens within it: names of collectives ("allreduce_"), "product" for a matrix product, and
    (stage, "F" | "I" | "B" | "W", microbatch) where a pass of a stage begins, with "end" behind it where it ends.

    It sees what runs on this thread, libtorch's own calls and the engine's among them. DTensors take themselves apart
    before it looks.
    """

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, torch.distributed.tensor.DTensor) for t in types):
            return NotImplemented
        name = func._schema.name
        namespace, short = name.split("::")
        if namespace in ("c10d", "_c10d_functional") and short not in NO_COLLECTIVES:
            self.log.append(short)
        elif name in PRODUCTS:
            self.log.append("product")
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls):
        """Under any other dispatch mode dynamo leaves code as it is."""
        return True

    def watch(self, stage):
        def around(action, run):
            mark = (int(action[0]), action[1], int(action[2:]))
            self.log.append(mark)
            result = run()
            self.log.append((*mark, "end"))
            return result

        watch(stage, around)

    def collectives(self):
        """How often each collective ran."""
        return dict(Counter(event for event in self.log if isinstance(event, str) and event != "product"))

    def within(self, letters, stage=None):
        """The events of these passes, as [(stage, microbatch, [event, ...]), ...]."""
        found, inner = [], None
        for event in self.log:
            if isinstance(event, str):
                if inner is not None:
                    inner.append(event)
            elif event[-1] == "end":
                inner = None
            elif event[1] in letters and stage in (None, event[0]):
                inner = []
                found.append((event[0], event[2], inner))
        return found
