"""A custom kernel in a split backward: a linear layer with products of 8-bit integers.

By zbpipe.defer the layer leaves its weight's gradient to the weight pass.

    python examples/custom_linear.py

Trains a few such layers as a pipeline stage would: first the input passes of all microbatches, then the weight passes.
Compares every step with an ordinary backward of a copy.
"""

import copy

import torch
from torch import nn

import zbpipe

STEPS, MICROBATCHES, TOKENS, WIDTH = 3, 4, 64, 128


def quantize(x):
    """8-bit integers and a scale per row: (int8 [rows, columns], float32 [rows, 1])."""
    scale = x.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (x / scale).round().to(torch.int8), scale


def int8_matmul(a, b):
    """a @ b.mT for two matrices from quantize(). A kernel would be called here."""
    (a, a_scale), (b, b_scale) = a, b
    return (a.float() @ b.float().mT) * a_scale * b_scale.mT


class Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        x_q, w_q = quantize(x), quantize(weight)
        ctx.save_for_backward(*x_q, *quantize(weight.mT.contiguous()))
        return int8_matmul(x_q, w_q) + bias

    @staticmethod
    def backward(ctx, grad):
        x, x_scale, w_t, w_t_scale = ctx.saved_tensors
        dx = int8_matmul(quantize(grad), (w_t, w_t_scale)) if ctx.needs_input_grad[0] else None
        # weight and bias are arguments 1 and 2 of forward. What weight_grads needs comes through `saved`: a quarter
        # of the bytes of a float32 input waits for the weight pass.
        dweight, dbias = zbpipe.defer(weight_grads, weights=(1, 2), saved=(x, x_scale, grad))
        return dx, dweight, dbias


def weight_grads(x, x_scale, grad):
    grad_t, rest = quantize((grad * x_scale).mT.contiguous())  # the scales of x's rows go into the sum's factor
    return int8_matmul((grad_t, rest), (x.mT, torch.ones(x.shape[1], 1))), grad.sum(0)


class Layer(nn.Linear):
    def forward(self, x):
        return Int8Linear.apply(x, self.weight, self.bias)


def split_step(stage, inputs):
    groups = []
    for x in inputs:
        out = stage(x)
        _, of_this_microbatch = zbpipe.stage_backward_input([out], [out.detach().sign()], [x], stage.parameters())
        groups += of_this_microbatch
    held = sum(group.bytes_held for group in groups)
    for group in groups:
        zbpipe.stage_backward_weight(stage.parameters(), [group])
    return held


def ordinary_step(stage, inputs):
    for x in inputs:
        out = stage(x)
        out.backward(out.detach().sign())


def main():
    torch.manual_seed(0)
    split = nn.Sequential(Layer(WIDTH, WIDTH), nn.GELU(), Layer(WIDTH, WIDTH), nn.GELU(), Layer(WIDTH, WIDTH))
    whole = copy.deepcopy(split)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in (split, whole)]
    for step in range(STEPS):
        batch = [torch.randn(TOKENS, WIDTH, requires_grad=True) for _ in range(MICROBATCHES)]
        held = split_step(split, batch)
        ordinary_step(whole, batch)
        for (name, weight), expected in zip(split.named_parameters(), whole.parameters(), strict=True):
            if not torch.equal(weight.grad, expected.grad):
                raise SystemExit(f"step {step}: the gradient of {name} differs from an ordinary backward's")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    print(f"held between the passes: {held / MICROBATCHES / 1024:.1f} KiB per microbatch")
    print(f"gradients of {STEPS} steps equal those of ordinary backwards, bit for bit")


if __name__ == "__main__":
    main()
