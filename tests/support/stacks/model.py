"""The model that the cases pipeline and shard, and what it learns from: the same numbers in every process."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

STAGES = 4
MICROBATCHES = 8
REPLICAS = 2
BATCH, WIDTH = 16, 8
STEPS = 2
LEARNING_RATE = 0.01


class Mixer(nn.Module):
    """A linear layer, and a product with the sum of two weights."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)
        self.extra = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 4)

    def forward(self, x):
        return self.up(x).tanh() @ (self.down + self.extra)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mixer = Mixer()

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Convolution(Block):
    """Its W wants a weight's shape, whose memory may be gone."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        return super().forward(x) + self.convolution(x.unsqueeze(1)).squeeze(1).sin()


class Adapted(Convolution):
    """W runs a product of weights, which reads both, and views of one."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(WIDTH, 2) / 4)
        self.b = nn.Parameter(torch.randn(2, WIDTH) / 4)

    def forward(self, x):
        return super().forward(x) + x @ (self.a @ self.b)


def make_parts(block=Block, dtype=torch.float64, count=STAGES):
    """A block for each stage."""
    torch.manual_seed(1)
    return [block().to(dtype) for _ in range(count)]


def batch(step, replica, dtype=torch.float64, sequence=()):
    """Inputs and targets, (BATCH, *sequence, WIDTH) each."""
    torch.manual_seed(100 + 10 * step + replica)
    shape = (BATCH, *sequence, WIDTH)
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def loss_function(out, target):
    loss = (out - target).pow(2).sum()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def run_reference(parts, step, replicas=REPLICAS, compute_dtype=None, sequence=()):
    """Adds to each weight of `parts` its gradient of the step: a sum over microbatches, a mean over replicas.

    With `compute_dtype`, forward and backward are in it, and the sum of the microbatches' gradients is not.
    """
    for replica in range(replicas):
        dtype = next(parts[0].parameters()).dtype
        x, target = batch(step, replica, dtype, sequence)
        for value, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            add_gradients(parts, value, goal, replicas, compute_dtype)


def add_gradients(parts, value, goal, replicas, compute_dtype):
    weights = [(part, dict(part.named_parameters())) for part in parts]
    leaves = []
    for part, named in weights:
        used = {
            name: weight.detach().to(compute_dtype or weight.dtype).requires_grad_() for name, weight in named.items()
        }
        leaves += [(weight, used[name]) for name, weight in named.items()]
        value = torch.func.functional_call(part, used, (value.to(compute_dtype or value.dtype),))
    loss_function(value, goal).backward()
    for weight, leaf in leaves:
        if leaf.grad is not None:
            grad = leaf.grad.to(weight.dtype) / replicas
            weight.grad = grad if weight.grad is None else weight.grad + grad
