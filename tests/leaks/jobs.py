"""Training on the ranks of a job, as its users write it: what test_jobs.py runs under `torchrun -m zbpipe leaks`.

    torchrun ... jobs.py ddp|fsdp|SCHEDULE STEPS [leak]

With "leak" the last rank keeps something of each step.
"""

import sys

import torch
import torch.distributed as dist
from leaks.pipelined import Training
from support.blocks import SCHEDULES, batch, blocks, loss_function
from torch import nn

import zbpipe

torch.set_num_threads(1)


class DataParallel:
    def __init__(self, kind):
        self.net = nn.Sequential(*blocks(3))
        if kind == "ddp":
            self.net = nn.parallel.DistributedDataParallel(self.net)
        else:
            from torch.distributed.fsdp import fully_shard

            for block in self.net:
                fully_shard(block)
            fully_shard(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def step(self):
        x, target = batch(0)
        output = self.net(x)
        loss_function(output, target).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return output


class Trainer:
    def __init__(self, training):
        self.training = training
        self.history = []

    def train(self, steps, leaks):
        for _ in range(steps):
            result = self.training.step()
            if leaks:
                self.history.append(result)


def main(kind, steps, *leak):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if kind in SCHEDULES:
        zbpipe.patch()
    training = Training(kind) if kind in SCHEDULES else DataParallel(kind)
    Trainer(training).train(int(steps), bool(leak) and dist.get_rank() == dist.get_world_size() - 1)
    # The last that lets go of a group waits for gloo's threads, which may be waiting for the GIL: a DistributedDataParallel
    # has it then, destroy_process_group() has not.
    del training
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
