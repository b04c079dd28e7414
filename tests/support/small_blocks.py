"""Tiny blocks of well-known models, written by hand: each maps x to a tensor of x's shape."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, TOKENS = 16, 2, 4


def heads(x):
    return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)


def rotated(x):
    """By its position, as rotary embeddings do."""
    angles = torch.outer(torch.arange(TOKENS), torch.ones(WIDTH // HEADS)).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


class Attention(nn.Module):
    """Of Llama: keys and values for every second head, rotated."""

    def __init__(self):
        super().__init__()
        self.q, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = rotated(heads(self.q(x))), rotated(heads(self.k(x))), heads(self.v(x))
        k, v = (t.repeat_interleave(HEADS, dim=1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(x.shape))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    def __init__(self, feed_forward=Gated):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), feed_forward()

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Experts(nn.Module):
    """Of Mixtral: a loop over the experts, two of which serve a token."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, x):
        rows = x.view(-1, WIDTH)
        scores, chosen = self.router(rows).softmax(-1).topk(2, dim=-1)
        scores = scores / scores.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(rows[token]) * scores[token, place, None])
        return out.view_as(x)


class GPT2(nn.Module):
    """Its linear layers keep their weights transposed, and call addmm."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
        self.weight = nn.ParameterDict({name: torch.randn(*size) / 4 for name, size in sizes.items()})
        self.bias = nn.ParameterDict({name: torch.randn(size) / 4 for name, (_, size) in sizes.items()})

    def linear(self, name, x):
        rows = torch.addmm(self.bias[name], x.view(-1, x.shape[-1]), self.weight[name])
        return rows.view(*x.shape[:-1], -1)

    def forward(self, x):
        q, k, v = map(heads, self.linear("qkv", self.norm1(x)).split(WIDTH, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.linear("out", mixed.transpose(1, 2).reshape(x.shape))
        return x + self.linear("down", F.gelu(self.linear("up", self.norm2(x)), approximate="tanh"))


class T5(nn.Module):
    """Attention unscaled, with a learned bias by distance."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.distance = nn.Embedding(2 * TOKENS, HEADS)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = heads(self.q(h)), heads(self.k(h)), heads(self.v(h))
        places = torch.arange(TOKENS)
        bias = self.distance(places[:, None] - places + TOKENS).permute(2, 0, 1).unsqueeze(0)
        mixed = (torch.matmul(q, k.transpose(3, 2)) + bias).softmax(-1) @ v
        x = x + self.o(mixed.transpose(1, 2).contiguous().view(x.shape))
        return x + self.down(self.up(self.norm2(x)).relu())


class ResNet(nn.Module):
    """A bottleneck, whose input takes a short cut."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Conv2d(WIDTH, 2 * WIDTH, 1, bias=False)
        self.middle = nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, padding=1, bias=False)
        self.narrow, self.cut = (nn.Conv2d(n * WIDTH, WIDTH, 1, bias=False) for n in (2, 1))
        self.norm1, self.norm2 = nn.BatchNorm2d(2 * WIDTH), nn.BatchNorm2d(2 * WIDTH)
        self.norm3, self.norm4 = nn.BatchNorm2d(WIDTH), nn.BatchNorm2d(WIDTH)

    def forward(self, x):
        h = self.norm1(self.wide(x)).relu_()
        h = self.norm2(self.middle(h)).relu_()
        return (self.norm3(self.narrow(h)) + self.norm4(self.cut(x))).relu_()
