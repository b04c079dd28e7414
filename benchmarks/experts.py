"""Grouped products of the size of real experts: I and W beside an unsplit backward, with and without a wait between.

    python benchmarks/experts.py --device cuda --json experts.json

On a GPU: 4 layers of 8 experts of 2048 x 4096, 4 x 4096 tokens, bfloat16. On the CPU tiny ones, to show that it runs.
Where a schedule calls I, the device still has work of before. So I and W are called back to back, and the device is
waited for at their ends alone; a wait between them adds the host's time of I, where that is the longer one.
"""

import argparse
import itertools

import torch
from bench.host_time import Experts
from bench.results import add_argument, now, spread, write
from torch import nn

import zbpipe
from zbpipe._formatting import table

SIZES = {"cuda": (4, 8, 2048, 2048), "cpu": (2, 2, 16, 32)}  # layers, experts, width, rows of each expert


class Stage:
    def __init__(self, device: str) -> None:
        layers, experts, width, rows = SIZES[torch.device(device).type]
        torch.manual_seed(0)
        self.device = device
        stack = [Experts(torch.bfloat16, experts, width, rows) for _ in range(layers)]
        self.module = nn.Sequential(*stack).to(device)
        self.x = torch.randn(experts * rows, width, dtype=torch.bfloat16, device=device)
        self.grad = torch.randn_like(self.x)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.x.clone().requires_grad_()
        return x, self.module(x)

    def unsplit(self) -> list[float]:
        _, out = self.forward()
        begin = now(self.device)
        torch.autograd.backward([out], [self.grad])
        del out
        return [now(self.device) - begin]

    def split(self, waits: bool) -> list[float]:
        """Seconds, of I and of W apart where it waits between them."""
        x, out = self.forward()
        times = [now(self.device)]
        _, groups = zbpipe.stage_backward_input([out], [self.grad], [x], None)
        del out
        if waits:
            times.append(now(self.device))
        zbpipe.stage_backward_weight(None, groups)
        times.append(now(self.device))
        return [end - begin for begin, end in itertools.pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default), or cuda")
    parser.add_argument("--repeat", type=int, default=20, help="runs of each (20)")
    add_argument(parser)
    given = parser.parse_args()
    stage = Stage(given.device)
    runs: dict[str, list[list[float]]] = {"unsplit": [], "back to back": [], "with a wait": []}
    for i in range(3 + given.repeat):
        made = (stage.unsplit(), stage.split(waits=False), stage.split(waits=True))
        for times, of_kind in zip(made, runs.values(), strict=True):
            if i >= 3:
                of_kind.append(times)
    figures = {
        name: {
            "ms": [spread(1e3 * half for half in halves) for halves in zip(*of, strict=True)],
            "ratio": spread(sum(times) / unsplit[0] for times, unsplit in zip(of, runs["unsplit"], strict=True)),
        }
        for name, of in runs.items()
    }
    rows = [
        [name, " + ".join(f"{half.median:.2f}" for half in of["ms"]), f"{of['ratio'].median:.2f}x"]
        for name, of in figures.items()
    ]
    print(f"torch {torch.__version__}, experts {SIZES[torch.device(given.device).type]}")
    print(table(["I and W", "ms", "to unsplit"], rows))
    write(given.json, "experts", figures, given.device)


if __name__ == "__main__":
    main()
