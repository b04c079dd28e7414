"""Leaks of the past, each in a small reconstruction: what happened, with the holder that made it happen, and no more.

Each function makes the fault with tensors of `SIZE` float32 elements and returns what its caller would go on holding
(a stage, a schedule, a queue), or None. The threads that they come from are named by number of pytorch/pytorch, or
else by project.
"""

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

SIZE = 1024
BYTES = 4 * SIZE


def activation():
    """A tensor in the middle of a graph."""
    return torch.ones(SIZE, requires_grad=True) * 2


# 185331: the receive buffers of a stage are its inputs, in each step the same; what each step hangs on them stays.


class StageWithReusedBuffers:
    def __init__(self):
        self.receive_buffer = torch.zeros(SIZE, requires_grad=True)

    def step(self):
        output = self.receive_buffer.exp()
        grads = torch.ones_like(output)

        def capture(grad):
            return grad * grads

        self.receive_buffer.register_hook(capture)  # and no handle.remove()
        output.backward(grads)
        self.receive_buffer.grad = None


class StageWithPrehooksOnAccumulators:
    """As upstream does it: prehooks on the input's accumulator, which the stage's cache keeps."""

    def __init__(self):
        self.receive_buffer = torch.zeros(SIZE, requires_grad=True)
        self.input_nodes = [torch.autograd.graph.get_gradient_edge(self.receive_buffer).node]

    def step(self):
        output = self.receive_buffer.exp()
        saved = [torch.ones_like(output)]

        def capture(grads):
            saved.append(grads)

        self.input_nodes[0].register_prehook(capture)
        output.backward(saved[0])
        self.receive_buffer.grad = None


# Forum thread on a leak in run_backward: outputs that were sent get other data, so that the engine must be called from
# C++, round the check of shapes. The node that computed the output has saved it, and keeps its memory.


def custom_backward(output, grad):
    Variable._execution_engine.run_backward(
        tensors=(output,),
        grad_tensors=(grad,),
        keep_graph=True,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )


class ScheduleThatSwapsData:
    def __init__(self):
        self.output_tensors = []

    def step(self):
        output = activation().exp()
        output.data = torch.empty(1)
        custom_backward(output, torch.ones(SIZE))
        self.output_tensors.append(output)


def output_deallocated_by_data():
    schedule = ScheduleThatSwapsData()
    schedule.step()
    return schedule


# The same thread: a Function that keeps its own result as an attribute is a cycle through C++.


class KeepsItsOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        result = x.exp()
        ctx.result = result
        return result

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.result


def graph_kept_by_its_saved_output():
    output = KeepsItsOutput.apply(activation())
    output.backward(torch.ones(SIZE))


# microsoft/DeepSpeed 8032: a gathered parameter is a view of a padded buffer, and keeps all of it.


class PartitionedParameter:
    def __init__(self):
        self.gathered = None

    def gather(self):
        padded = torch.zeros(SIZE)
        self.gathered = padded[:10].view(2, 5)


def view_of_a_padded_buffer():
    parameter = PartitionedParameter()
    parameter.gather()
    return parameter


# Groups that no W ever runs, in a queue of work for bubbles.


class WeightQueue:
    def __init__(self, backward_input, layer):
        self.backward_input = backward_input
        self.layer = layer
        self.deferred = []

    def step(self):
        x = torch.ones(4, 16, requires_grad=True)
        output = self.layer(x.sin())
        _, groups = self.backward_input([output], [torch.ones_like(output)], [x], self.layer.parameters())
        self.deferred.append(groups)


def groups_never_run(backward_input, layer):
    queue = WeightQueue(backward_input, layer)
    queue.step()
    return queue


# An exception in the middle of a step, kept for a report: its traceback has the frames, they have the activations.


class Trainer:
    def __init__(self):
        self.errors = []

    def step(self):
        hidden = activation()
        output = hidden.exp()
        output.register_hook(raise_in_the_middle)
        try:
            output.backward(torch.ones(SIZE))
        except RuntimeError as error:
            self.errors.append(error)


def raise_in_the_middle(grad):
    raise RuntimeError("in the middle")


def exception_in_the_middle():
    trainer = Trainer()
    trainer.step()
    return trainer


# A checkpointed region whose outputs are kept: nothing of it is saved in the graph, the region's arguments are, by the
# closure that would compute it again. To unpack would be to compute it.


class CheckpointedStage(nn.Module):
    def __init__(self, compile_block=False):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.runs = 0
        self.compiled = torch.compile(self.block, backend="aot_eager") if compile_block else self.block
        self.kept = []

    def region(self, x):
        self.runs += 1
        return self.compiled(x)

    def forward(self, x):
        return checkpoint(self.region, x * 2, use_reentrant=False)


class ScheduleThatKeepsOutputs:
    def __init__(self, stage):
        self.stage = stage
        self.outputs = []

    def step(self):
        self.outputs.append(self.stage(torch.ones(4, 16, requires_grad=True)))


def checkpointed_output_kept(stage):
    schedule = ScheduleThatKeepsOutputs(stage)
    schedule.step()
    return schedule
