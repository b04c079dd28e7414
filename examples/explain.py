"""What a split backward of a stage would do, seen before training, and then in torch's profiler.

    python examples/explain.py

Prints zbpipe.explain's table for a transformer block with a custom Function in it, and checks it against a real step.
Lists the ranges that the profiler shows.
"""

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import zbpipe

TOKENS, WIDTH, HEADS = 64, 128, 4


class Squared(torch.autograd.Function):
    """relu(x @ w)^2, by a kernel that leaves no gradient to the weight pass."""

    @staticmethod
    def forward(ctx, x, w):
        h = (x @ w).relu()
        ctx.save_for_backward(x, w, h)
        return h * h

    @staticmethod
    def backward(ctx, grad):
        x, w, h = ctx.saved_tensors
        grad = 2 * h * grad
        return grad @ w.mT, x.mT @ grad


class Block(nn.Module):
    """(TOKENS, WIDTH) to the same, float32."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).view(TOKENS, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(0, 1).reshape(TOKENS, WIDTH))
        return x + self.down(Squared.apply(self.norm2(x), self.up))


def main():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(TOKENS, WIDTH, requires_grad=True)
    explained = zbpipe.explain(block, x)
    print(explained)

    out = block(x)
    _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], block.parameters())
    held = zbpipe.memory.held(groups).bytes
    with FlopCounterMode(display=False) as counter:
        zbpipe.stage_backward_weight(block.parameters(), groups)
    if (counter.get_total_flops(), held) != (explained.flops_in_w, explained.bytes_held):
        raise SystemExit(f"a real step has {counter.get_total_flops()} FLOPs in W and holds {held} bytes")
    print("\nthe FLOPs and bytes are those of a real step\n")

    out = block(x)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        _, groups = zbpipe.stage_backward_input([out], [torch.ones_like(out)], [x], block.parameters())
        zbpipe.stage_backward_weight(block.parameters(), groups)
    for event in prof.events():
        if event.name.startswith("zbpipe::"):
            print(event.name)


if __name__ == "__main__":
    main()
