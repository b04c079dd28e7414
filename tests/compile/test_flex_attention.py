"""FlexAttention in a compiled block: torch has no backward of it on a CPU."""

import copy

import pytest
import torch
from support.oracle import close, needs_zbpipe
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import zbpipe
from zbpipe._tasks import tasks_of  # which pass computes a weight's gradient

pytestmark = [needs_zbpipe, pytest.mark.cuda]
WIDTH, HEADS, TOKENS = 128, 4, 256


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(-2))


def test_gradients_and_who_computes_them():
    torch.manual_seed(0)
    stage = Attention().cuda()
    whole = copy.deepcopy(stage)
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, TOKENS, TOKENS, device="cuda")
    run = zbpipe.compile(stage)
    for _ in range(2):
        x = torch.randn(2, TOKENS, WIDTH, device="cuda", requires_grad=True)
        ref = x.detach().clone().requires_grad_()
        output = run(x, mask)
        grad = torch.randn_like(output)
        _, groups = zbpipe.stage_backward_input([output], [grad], [x], stage.parameters())
        assert {task[1] for group in groups for task in tasks_of(group)} == {"handed over"}
        zbpipe.stage_backward_weight(stage.parameters(), groups)
        torch.compile(whole)(ref, mask).backward(grad)
        close(x.grad, ref.grad, "input")
        close([w.grad for w in stage.parameters()], [w.grad for w in whole.parameters()], "weights")
