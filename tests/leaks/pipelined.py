"""Training over one of torch's schedules, on the ranks that there are."""

import itertools

import torch
import torch.distributed as dist
from support.blocks import Block, batch, blocks
from support.pipelines import Pipeline, count_of


class Training:
    """`step` is one of a pipeline and of its optimizer; `keep` is given what the schedule's returned."""

    def __init__(self, schedule, block=Block):
        self.line = Pipeline(schedule, blocks(count_of(schedule), block)).start()
        self.modules = [*self.line.parts.values()]
        self.optimizer = torch.optim.Adam([w for module in self.modules for w in module.parameters()], lr=1e-3)
        self.x, self.target = batch(0)

    def step(self):
        args, given = self.line.given(self.x, self.target, [])
        outputs = self.line.schedule.step(*args, **given)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.keep(outputs)
        return given.get("losses") or [self.target.clone()]

    def keep(self, outputs):
        pass

    def let_go(self):
        """Of what torch's stages keep until their next step, for their user, and for themselves where nothing is sent."""
        for stage in self.line.stages:
            stage.clear_runtime_states()
            infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
            for info in itertools.chain(*infos) if dist.get_world_size() == 1 else ():
                if getattr(info, "buffer", None) is not None:  # torch 2.15's stage has let go of it
                    info.buffer = torch.empty(0)  # torch 2.11's stage lets go of its gradient
