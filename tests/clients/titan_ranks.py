"""What each process of test_torchtitan.py runs: torchtitan's trainer on its debug model, on the CPU and over gloo.

    python titan_ranks.py RANK WORLD FOLDER alone|pipelined CASE...

torchtitan is imported once; every case trains in a process forked from that one. Losses, gradient norms and the weights
at the end, or the error, go to FOLDER. Whether torch is patched is for ZBPIPE_PATCH in the environment to say, alone.
What is not torchtitan's own is what examples/torchtitan_cpu.py gives it for the CPU, and the weights to begin with:
torchtitan seeds each rank of a pipeline differently, and the same weights are wanted without one.
"""

import hashlib
import logging
import os
import runpy
import sys
import time
import traceback
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from clients.titan_cases import CASES
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

MICROBATCHES, LENGTH, STEPS = 8, 64, 3
SAMPLE = 4096  # of each weight's elements, kept beside its digest

# Before torchtitan, which asks for the device.
debug_model = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "torchtitan_cpu.py"))["debug_model"]

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402


def configuration(case, alone):
    """The case's, of the debug model's own; `alone` without a pipeline, microbatch by microbatch."""
    config = debug_model()
    config.training.seq_len, config.training.steps = LENGTH, STEPS
    config.training.mixed_precision_param = case.dtype
    config.training.max_norm = (
        1e6  # else the norm's last bits, which differ with the number of ranks, were in all weights
    )
    config.parallelism.data_parallel_shard_degree = case.data_parallel
    if case.reshard is not None:
        config.parallelism.fsdp_reshard_after_forward = case.reshard
    if case.loss == "plain":
        config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    if case.checkpointing != "selective":
        config.activation_checkpoint = FullAC.Config() if case.checkpointing == "full" else None
    if case.backend is not None:
        config.compile = CompileConfig(enable=True, components=["model"], backend=case.backend)
    if alone:
        config.training.local_batch_size = 1
        config.training.global_batch_size = MICROBATCHES * case.data_parallel
    else:
        config.training.local_batch_size = MICROBATCHES
        config.parallelism.pipeline_parallel_degree = 2
        config.parallelism.pipeline_parallel_schedule = case.schedule
    return config


def weights_of(trainer):
    """By the names that they have in the whole model."""
    for part in trainer.model_parts:
        for name, weight in part.named_parameters():
            yield name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""), weight


@torch.no_grad()
def begin_with_the_same_weights(trainer):
    for name, weight in weights_of(trainer):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(weight.shape, generator=generator) * 0.02 + ("norm" in name)
        if isinstance(weight, DTensor):
            value = distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
        weight.copy_(value)


def train(case, alone):
    """{"loss": per step, "norm": per step, "weights": {name: (digest, a sample of the elements)}, "patched": ...}"""
    trainer = configuration(case, alone).build()
    begin_with_the_same_weights(trainer)
    for part in trainer.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):  # gloo has no product by a factor before a sum
                module.set_force_sum_reduction_for_comms(True)
    losses, norms = [], []

    def log(step, mean_loss, max_loss, grad_norm, extra_metrics=None):
        losses.append(mean_loss)
        norms.append(grad_norm)

    trainer.metrics_processor.log = log
    trainer.train()
    weights = {}
    for name, weight in weights_of(trainer):
        whole = (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().float().contiguous()
        digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()
        weights[name] = digest, whole.flatten()[:: max(1, whole.numel() // SAMPLE)].clone()
    sees_loss = alone or trainer.pp_has_last_stage
    trainer.close()
    zbpipe = sys.modules.get("zbpipe")
    return {
        "loss": losses if sees_loss else None,
        "norm": norms,
        "weights": weights,
        "patched": zbpipe is not None and zbpipe.is_patched(),
    }


def meet(name, rank, world, folder):
    """All ranks begin a case together: those that the last one was not for would else wait for it in this one's name,
    for longer than their patience."""
    (folder / f"{name}.{rank}.here").touch()
    while not all((folder / f"{name}.{other}.here").exists() for other in range(world)):
        time.sleep(0.1)


def main(rank, world, folder, how, names):
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.WARNING)
    alone = how == "alone"
    for name in names:
        case = CASES[name]
        meet(name, rank, world, folder)
        ranks = case.data_parallel * (1 if alone else 2)
        if rank >= ranks:
            continue
        child = os.fork()
        if child == 0:
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(ranks))
                store = dist.FileStore(str(folder / f"store {name}"), ranks)
                patience = timedelta(seconds=100)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
                torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it starts the group
                os.chdir(folder)
                torch.save(train(case, alone), folder / f"{name}.{rank}")
            except BaseException:
                (folder / f"{name}.{rank}.failed").write_text(traceback.format_exc())
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
