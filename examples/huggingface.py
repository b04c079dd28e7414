"""A Llama from Hugging Face's transformers, cut into four stages on two ranks, trained under ZBV. Needs transformers.

    python examples/huggingface.py          starts its two processes itself
    torchrun --nproc-per-node 2 examples/huggingface.py

The model is tiny and random. Its losses are compared with those of the whole model, trained on the same microbatches.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble
from transformers import LlamaConfig, LlamaForCausalLM

import zbpipe

STAGES, MICROBATCHES, BATCH, LENGTH, STEPS = 4, 8, 16, 12, 5
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2 * STAGES,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def make_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG)


class Cut(nn.Module):
    """Some of a causal language model's layers, run by the forward of the model's own body."""

    def __init__(self, whole, index):
        super().__init__()
        first, last = index == 0, index == STAGES - 1
        each = len(whole.model.layers) // STAGES
        self.body = whole.model
        self.body.layers = self.body.layers[index * each : (index + 1) * each]
        self.body.embed_tokens = self.body.embed_tokens if first else None
        self.body.norm = self.body.norm if last else nn.Identity()
        self.head = whole.lm_head if last else nn.Identity()
        self.takes = "input_ids" if first else "inputs_embeds"

    def forward(self, x):
        return self.head(self.body(**{self.takes: x}, use_cache=False).last_hidden_state)


def loss_function(logits, tokens):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def data(step):
    torch.manual_seed(1 + step)
    return torch.randint(CONFIG.vocab_size, (BATCH, 1)).expand(-1, LENGTH).contiguous()  # a token, repeated


def train():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [rank, 2 * world - 1 - rank]  # a V
    cuts = {i: Cut(make_model(), i) for i in mine}
    stages = [PipelineStage(cut, i, STAGES, torch.device("cpu")) for i, cut in cuts.items()]
    schedule = ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss_function)
    optimizer = torch.optim.AdamW([w for cut in cuts.values() for w in cut.parameters()], lr=1e-2)

    whole = make_model()
    whole_optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)

    zbpipe.patch()
    for step in range(STEPS):
        tokens = data(step)
        losses = []
        given = {"target": tokens, "losses": losses} if STAGES - 1 in mine else {}
        schedule.step(*([tokens] if 0 in mine else []), **given)
        optimizer.step()
        optimizer.zero_grad()

        if STAGES - 1 in mine:
            loss = torch.stack(losses).mean().detach()
            wanted = loss_function(whole(tokens, use_cache=False).logits, tokens)
            wanted.backward()
            whole_optimizer.step()
            whole_optimizer.zero_grad()
            torch.testing.assert_close(loss, wanted.detach(), rtol=1e-3, atol=1e-3)
            print(f"step {step}: loss {loss:.4f}, of the whole model {wanted:.4f}")

    dist.barrier()
    if STAGES - 1 in mine:
        print(f"Llama under ZBV: losses of {STEPS} steps equal those of the model in one piece")
    dist.destroy_process_group()


def start(rank):
    os.environ["RANK"] = str(rank)
    train()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port), WORLD_SIZE="2")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the ranks use the store above
        torch.multiprocessing.spawn(start, nprocs=2)
