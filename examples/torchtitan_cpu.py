"""torchtitan's own trainer and debug model, with its defaults (chunked loss, selective checkpointing), on zbpipe.

torchrun --nproc-per-node 2 examples/torchtitan_cpu.py           on the CPU; needs pip install torchtitan==0.3.0
torchrun --nproc-per-node 2 examples/torchtitan_cpu.py torch     on torch's own module, which fails on them

On GPUs none of this is needed: set ZBPIPE_PATCH=1, and run torchtitan as it is. Here torchtitan takes the CPU for an
accelerator, and trains on arithmetic sequences, which need no files.
"""

import sys
import tempfile
import types
from dataclasses import dataclass

import torch
import torch._utils
import torch.distributed as dist

import zbpipe

LENGTH, MICROBATCHES, STEPS = 64, 8, 5


class _Accelerator(types.ModuleType):
    """torch.cpu, and a GPU module's memory statistics, for which torchtitan asks."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)


accelerator = _Accelerator("cpu")
accelerator.set_device = accelerator.empty_cache = accelerator.reset_peak_memory_stats = lambda *_: None
accelerator.synchronize = lambda *_: None
accelerator.current_device = lambda: 0
accelerator.device_count = lambda: 1
accelerator.get_device_name = lambda *_: "cpu"
accelerator.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)
accelerator.memory_stats = lambda *_: {}
torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _: accelerator

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402  after the device is known
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        raise NotImplementedError

    decode = get_vocab_size = encode


class Sequences(BaseDataLoader):
    """Arithmetic sequences modulo 97, each data parallel rank its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, dp_rank, seq_len, local_batch_size, **_):
        self.rank, self.shape = dp_rank, (local_batch_size, seq_len + 1)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.rank)
        rows, length = self.shape
        while True:
            start, by = torch.randint(1, 97, (2, rows, 1), generator=generator)
            tokens = (start + by * torch.arange(length)) % 97
            given = {"input": tokens[:, :-1].contiguous(), "positions": torch.arange(length - 1).expand(rows, -1)}
            yield given, tokens[:, 1:].contiguous()

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def debug_model():
    """torchtitan's configuration of its debug model, with changes for the CPU."""
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:  # flex attention has no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = NoTokenizer.Config(), Sequences.Config()
    config.training.seq_len, config.training.steps = LENGTH, STEPS
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.debug.enable_structured_logging = False
    config.debug.seed = 0
    return config


def main():
    if sys.argv[1:] != ["torch"]:
        zbpipe.patch()
    config = debug_model()
    config.dump_folder = tempfile.gettempdir()
    config.training.local_batch_size = MICROBATCHES
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "ZBVZeroBubble"
    trainer = config.build()
    losses = []

    def log(step, mean_loss, max_loss, grad_norm, extra_metrics=None):
        losses.append(mean_loss)
        if trainer.pp_has_last_stage:
            print(f"step {step}: loss {mean_loss:.4f}, gradients' norm {grad_norm:.4f}", flush=True)

    trainer.metrics_processor.log = log
    trainer.train()
    if trainer.pp_has_last_stage:
        assert losses[-1] < losses[0]
        print(f"torchtitan trained {STEPS} steps; zbpipe is on: {zbpipe.is_patched()}")
    trainer.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
