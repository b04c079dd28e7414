"""What each process of test_release.py runs: schedules whose stages are watched for what they hold.

    python release_ranks.py RANK WORLD FOLDER

For each run it writes the losses and the weights' gradients of the steps, and what was held for too long, to FOLDER.
The garbage collector is off.
"""

import gc
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support.blocks import MICROBATCHES, SCHEDULES, WIDTH, ZERO_BUBBLE, batch, f64, loss_function, stages_of
from support.ranks import join
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.multiprocessing.reductions import StorageWeakRef

import zbpipe
from zbpipe._stage.before_2_15 import sends

STEPS = {"plain": 3, "odd": 2}
PATIENCE = 10.0  # seconds for a send to be done; the receive has been posted or will be without our doing


RELEASES = torch.__version__ >= (2, 15)  # then torch sees to sends and sent outputs, and we to what is left from I to W


def forward_entry(stage, microbatch):
    """What a stage keeps of a forward: its first output, or what stands for it, and its inputs."""
    if RELEASES:
        state = stage._forward_chunk_states[microbatch]
        return state.live_outputs[0], state.input_values
    (output, *_), inputs = stage.fwd_cache[microbatch]
    return output, inputs


class Block(nn.Module):
    """W needs neither the block's input, output nor their gradients: the products' matrices are tensors of its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=f64)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=f64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=f64)

    def forward(self, x):
        return x + 2 * self.down(self.up(self.norm(x)).tanh())


class Odd(nn.Module):
    """A stage of four outputs: saved by its own node, an input handed on, without gradient, an unused one."""

    def __init__(self, first, last):
        super().__init__()
        self.first, self.last = first, last
        self.block = Block()
        self.skip = nn.Linear(WIDTH, WIDTH, dtype=f64)

    def forward(self, x, handed_on=None, mask=None, unused=None):
        if self.first:
            handed_on, mask = self.skip(x), x.detach().sign()
        y = (self.block(x) * mask).tanh()
        if self.last:
            return self.skip(y) + handed_on
        return y, handed_on, mask, self.block.down(self.block.up(y))


def parts(kind, count):
    torch.manual_seed(1)
    if kind == "odd":
        return [Odd(i == 0, i == count - 1) for i in range(count)]
    return [Block() for _ in range(count)]


def reference(kind, count):
    """Losses per microbatch and the weights' gradients after each step, of the same model unpipelined."""
    modules = parts(kind, count)
    results = []
    for step in range(STEPS[kind]):
        x, target = batch(step)
        losses = []
        for value, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            for module in modules:
                value = module(*value) if isinstance(value, tuple) else module(value)
            loss = loss_function(value, goal)
            loss.backward()
            losses.append(loss.detach())
        grads = {
            f"{i}.{n}": w.grad.clone()
            for i, m in enumerate(modules)
            for n, w in m.named_parameters()
            if w.grad is not None
        }
        results.append((losses, grads))
    return results


class Watch:
    """Watches one stage by attributes that hide its methods, and notes what should be gone and is not."""

    def __init__(self, stage, release_outputs, found):
        self.stage, self.release_outputs, self.found = stage, release_outputs, found
        self.held = {}  # (what, microbatch): its storage
        self.sent = []
        ranks = stage.stage_index_to_group_rank
        # Then its input is the previous stage's output, its input's gradient that one's output gradient.
        self.is_beside_previous = not stage.is_first and ranks[stage.stage_index - 1] == ranks[stage.stage_index]
        self.seen = 0
        self.microbatch = None
        self.hook = stage.submod.register_forward_hook(self.on_forward)
        self.hidden = []
        self.hide("forward_one_chunk", self.forward)
        self.hide("backward_one_chunk", self.backward)
        self.hide("backward_weight_one_chunk", self.weight)
        self.hide("get_fwd_send_ops", self.send)

    def hide(self, name, method):
        original = getattr(self.stage, name)
        self.hidden.append(name)
        vars(self.stage)[name] = lambda *args, **kwargs: method(original, *args, **kwargs)

    def stop(self):
        self.hook.remove()
        for name in self.hidden:
            del vars(self.stage)[name]
        return self.seen

    def note(self, what, microbatch, tensor):
        if isinstance(tensor, torch.Tensor):
            self.held[what, microbatch] = StorageWeakRef(tensor.untyped_storage())

    def gone(self, when, microbatch, *kinds, patience=0.0):
        for what in kinds:
            storage = self.held.get((what, microbatch))
            end = time.monotonic() + (0.0 if self.found else patience)  # patient no longer with what fails anyhow
            while storage is not None and not storage.expired() and time.monotonic() < end:
                time.sleep(0.002)
                sends.poll()
            if storage is not None:
                self.seen += 1
                if not storage.expired():
                    self.found.append(f"stage {self.stage.stage_index}, microbatch {microbatch}: {what} lives {when}")

    def on_forward(self, module, args, output):
        self.note("input", self.microbatch, args[0])
        self.note("output", self.microbatch, output[0] if isinstance(output, tuple) else output)

    def sends_are_gone(self):
        while self.sent and self.release_outputs and not RELEASES:
            self.gone("after its send", self.sent.pop(), "output", patience=PATIENCE)

    def forward(self, original, microbatch, *args, **kwargs):
        self.sends_are_gone()
        self.microbatch = microbatch
        return original(microbatch, *args, **kwargs)

    def send(self, original, microbatch):
        if not self.stage.is_last:
            self.sent.append(microbatch)
        return original(microbatch)

    def backward(self, original, microbatch, *args, **kwargs):
        stage = self.stage
        self.sends_are_gone()
        output, inputs = forward_entry(stage, microbatch)
        if not RELEASES and not stage.is_last and isinstance(output, torch.Tensor) == self.release_outputs:
            self.found.append(f"stage {stage.stage_index} keeps {type(output).__name__} from F to I")
        if not stage.is_last:
            self.note("output gradient", microbatch, stage.grad_recv_info[microbatch][0].buffer)
        received = None if stage.is_first else inputs[0]
        del output, inputs
        result = original(microbatch, *args, **kwargs)
        if received is not None:
            if received.grad is not None:
                self.found.append(f"stage {stage.stage_index}: the input's .grad lives after its backward")
            self.note("input gradient", microbatch, stage.bwd_cache[microbatch][0])
        return result

    def weight(self, original, microbatch, *args, **kwargs):
        self.sends_are_gone()
        if self.stage.is_first:
            result = original(microbatch, *args, **kwargs)
            self.gone("after W", microbatch, "output", "output gradient")
            return result
        if not self.stage.is_last:  # the last stage's output is the user's
            self.gone("between I and W", microbatch, "output")
        self.gone("between I and W", microbatch, "output gradient")
        if (self.release_outputs and not RELEASES) or not self.is_beside_previous:
            self.gone("between I and W", microbatch, "input")
        if not self.is_beside_previous and not RELEASES:
            self.gone("between I and W", microbatch, "input gradient", patience=PATIENCE)
        return original(microbatch, *args, **kwargs)

    def end_of_step(self):
        for microbatch in range(MICROBATCHES):
            self.gone("after the step", microbatch, "output gradient", "input gradient")
            if not self.stage.is_first and not self.stage.is_last:  # the losses, which are the user's, hold the last's
                self.gone("after the step", microbatch, "input")
        if self.stage.backward_state or getattr(self.stage, "_forward_chunk_states" if RELEASES else "fwd_cache"):
            self.found.append("the stage's state outlives the step")
        self.held.clear()


def run(name, kind, release_outputs, rank, world):
    """Steps 0 and 1 patched, with an evaluation between them, step 2 on torch's own (which fails on odd outputs).

    Step 1 is watched.
    """
    per_rank, shape = SCHEDULES[name]
    count = world * per_rank
    mine = stages_of(rank, world, per_rank, shape)
    modules = parts(kind, count)
    stages = [PipelineStage(modules[i], i, count, torch.device("cpu")) for i in mine]
    schedule = getattr(schedules, name)(
        stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False
    )
    found, watches, seen = [], [], 0
    steps = []
    zbpipe.patch(release_outputs)
    for step in range(STEPS[kind]):
        x, target = batch(step)
        losses = []
        given = {"target": target, "losses": losses} if count - 1 in mine else {}
        if step == 2:
            seen = sum(watch.stop() for watch in watches)
            watches.clear()
            zbpipe.unpatch()
        if step == 1 and shape != "v":  # torch's eval fails on these: it asks for gradients
            schedule.eval(*([x] if 0 in mine else []), **({"target": target} if count - 1 in mine else {}))
        if step == 1 and kind == "plain":
            watches = [Watch(stage, release_outputs, found) for stage in stages]
        schedule.step(*([x] if 0 in mine else []), **given)
        for watch in watches:
            watch.end_of_step()
        grads = {
            f"{i}.{n}": w.grad.clone() for i in mine for n, w in modules[i].named_parameters() if w.grad is not None
        }
        steps.append(([loss.detach() for loss in losses], grads))
    return {"steps": steps, "found": found, "seen": seen}


RUNS = [(name, "plain", release) for name in SCHEDULES for release in (False, True)]
# Odd stages have gradients that are None: 2.11's stage sends none, 2.12's raises where it would.
SENDS_NONE = torch.__version__ >= (2, 13)
RUNS += [(name, "odd", True) for name in ("ScheduleGPipe", "Schedule1F1B", *ZERO_BUBBLE)]


def main(rank, world, folder):
    gc.disable()
    join(rank, world, folder)
    for name, kind, release in RUNS:
        if kind == "odd" and not SENDS_NONE:
            continue
        torch.save(run(name, kind, release, rank, world), folder / f"{name}.{kind}.{release}.{rank}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
