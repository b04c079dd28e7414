"""What each process of test_models.py runs: models that others wrote, and odd stages, trained under ZBV and others.

    python model_ranks.py RANK WORLD FOLDER LANE

Every model of the lane is trained on zbpipe and on torch's own module, each in a process forked for it, so that one's failure is
its own. What was recorded, or the error, goes to FOLDER.
"""

import contextlib
import functools
import importlib
import sys
from pathlib import Path

import torch
from support.blocks import stages_of
from support.ranks import MODULES, run_apart
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

STAGES, MICROBATCHES, BATCH, STEPS = 4, 4, 8, 3
LENGTH, WIDTH, VOCABULARY = 6, 16, 32
ZBV = "ScheduleZBVZeroBubble"
SHAPES = {"ScheduleInterleavedZeroBubble": "loop", ZBV: "v", "ScheduleDualPipeV": "v"}


def tokens():
    return torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH))


def vectors():
    return torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)


def images():
    return torch.randn(BATCH, 3, 8, 8), torch.randint(10, (BATCH,))


def cross_entropy(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")


def squared(out, target):
    return (out - target).square().sum()


# Hugging Face's: the reference is the model's own forward.


class Cut(nn.Module):
    """Some layers of a causal language model whose body takes `inputs_embeds`, by that body's own forward."""

    def __init__(self, whole, index):
        super().__init__()
        body = whole.model
        self.first, self.last = index == 0, index == STAGES - 1
        self.body = type(body)(body.config)
        self.body.layers = body.layers[index : index + 1]
        self.body.embed_tokens = body.embed_tokens if self.first else None
        self.body.norm = body.norm if self.last else nn.Identity()
        self.head = whole.lm_head if self.last else nn.Identity()

    def forward(self, x):
        given = {"input_ids": x} if self.first else {"inputs_embeds": x}
        return self.head(self.body(**given, use_cache=False).last_hidden_state)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x, use_cache=False).logits


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=STAGES,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    whole = LlamaForCausalLM(config)
    return Logits(whole), [Cut(whole, i) for i in range(STAGES)]


def lora(*layers):
    """Llama with PEFT's adapters on these layers; all else is frozen."""

    def build():
        from peft import LoraConfig, get_peft_model

        model, parts = llama()
        given = {"target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": list(layers)}
        get_peft_model(
            model.model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **given)
        )  # changes its layers
        return model, parts

    return build


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=STAGES,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="eager",
    )
    whole = MixtralForCausalLM(config)
    return Logits(whole), [Cut(whole, i) for i in range(STAGES)]


class CutGPT2(nn.Module):
    def __init__(self, whole, index):
        super().__init__()
        body = whole.transformer
        self.wte, self.wpe = (body.wte, body.wpe) if index == 0 else (None, None)
        self.blocks = body.h[index : index + 1]
        self.norm, self.head = (body.ln_f, whole.lm_head) if index == STAGES - 1 else (None, None)

    def forward(self, x):
        if self.wte is not None:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def gpt2():
    """Its head is its embedding: under ZBV the first and the last stage, on one rank, share a weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=STAGES,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    whole = GPT2LMHeadModel(config)
    assert whole.lm_head.weight is whole.transformer.wte.weight
    return Logits(whole), [CutGPT2(whole, i) for i in range(STAGES)]


# torch's own


class ContiguousGradient(torch.autograd.Function):
    """The gradient of attention's input is a transposed view, which torch's stages send as it is and gloo refuses."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()  # torch's own I cannot have a view as an output

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous()


class Encoder(nn.Module):
    def __init__(self, layer, first):
        super().__init__()
        self.layer = layer
        self.target = nn.Linear(WIDTH, WIDTH) if first else None

    def forward(self, source, target=None):
        target = target if self.target is None else self.target(source)
        return self.layer(ContiguousGradient.apply(source)), target


class Decoder(nn.Module):
    def __init__(self, layer, last):
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        source, target = map(ContiguousGradient.apply, (source, target))
        target = self.layer(target, source, tgt_mask=mask, tgt_is_causal=True)
        return target if self.last else (source, target)


class OneAfterAnother(nn.Sequential):
    def forward(self, x):
        for module in self:
            x = module(*x) if isinstance(x, tuple) else module(x)
        return x


def transformer():
    """Two encoder and two decoder layers; memory and target cross every boundary between them."""
    given = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 2 * WIDTH, "dropout": 0.0, "batch_first": True}
    parts = [Encoder(nn.TransformerEncoderLayer(**given), i == 0) for i in range(2)]
    parts += [Decoder(nn.TransformerDecoderLayer(**given), i == 1) for i in range(2)]
    return OneAfterAnother(*parts), parts


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(self.lstm(x)[0])


def lstm():
    parts = [Recurrent() for _ in range(STAGES)]
    return OneAfterAnother(*parts), parts


class Residual(nn.Module):
    """A ResNet's basic block."""

    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + self.shortcut(x))


class Head(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def resnet():
    parts = [
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        nn.Sequential(Residual(16, 16, 1), Head(16)),
    ]
    return OneAfterAnother(*parts), parts


# Odd stages.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Rotation(nn.Module):
    """No parameters, and a gradient that depends on its input."""

    def forward(self, x):
        return x.roll(1, -1) + x.sin()


def without_parameters(*bare):
    def build():
        parts = [Rotation() if i in bare else Block() for i in range(STAGES)]
        return OneAfterAnother(*parts), parts

    return build


class Reading(nn.Module):
    """Takes integers from stage to stage beside the activations, and embeds them in each; `step` is added to them."""

    def __init__(self, index, step):
        super().__init__()
        self.first, self.last, self.step = index == 0, index == STAGES - 1, step
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY) if self.last else None

    def forward(self, *given):
        x, ids = (0, given[0]) if self.first else given
        x = self.block(x + self.embedding(ids))
        if self.last:
            return self.head(x)
        return x, (ids + self.step) % VOCABULARY if self.step else ids


def integers(step):
    def build():
        parts = [Reading(i, step) for i in range(STAGES)]
        return OneAfterAnother(*parts), parts

    return build


MODELS = {
    "llama": (llama, tokens, cross_entropy),
    "gpt2": (gpt2, tokens, cross_entropy),
    "mixtral": (mixtral, tokens, cross_entropy),
    "transformer": (transformer, vectors, squared),
    "lstm": (lstm, vectors, squared),
    "resnet": (resnet, images, cross_entropy),
    "PEFT's LoRA on all layers": (lora(*range(STAGES)), tokens, cross_entropy),
    "PEFT's LoRA on the last two layers": (lora(2, 3), tokens, cross_entropy),
    "PEFT's LoRA on the last layer": (lora(3), tokens, cross_entropy),
    "a stage without parameters": (without_parameters(1), vectors, squared),
    "the first and the third stage without parameters": (without_parameters(0, 2), vectors, squared),
    "the last stage without parameters": (without_parameters(3), vectors, squared),
    "integers between stages": (integers(3), tokens, cross_entropy),
    "the input's integers handed on": (integers(0), tokens, cross_entropy),
}
OTHERS = {"llama", "gpt2", "mixtral", "transformer", "lstm", "resnet"}  # under ZBV alone
RUNS = [(name, schedule) for name in MODELS for schedule in SHAPES if schedule == ZBV or name not in OTHERS]


def lane_of(name, schedule):
    """Those that run under all schedules are fast on one, these in turn, and long on the others."""
    others = name in OTHERS or [*MODELS].index(name) % len(SHAPES) == [*SHAPES].index(schedule)
    return "fast" if others else "long"


# torch infers a stage's shapes by a forward on memory as it finds it, which spoils the running statistics of batch norms,
# and is no index into an embedding.
SHAPES_ARE_GIVEN = {"resnet", "integers between stages", "the input's integers handed on"}
NEEDS = dict.fromkeys(("llama", "gpt2", "mixtral"), "transformers")
NEEDS.update({name: "peft" for name in MODELS if name.startswith("PEFT")})


def batch(draw, step):
    torch.manual_seed(100 + step)
    return draw()


def build(name):
    torch.manual_seed(1)
    return MODELS[name][0]()


def state(step, whole, wanted, seen):
    """Adds the gradients, weights and buffers that `wanted` has, under the names they have in the whole model."""
    kept = {id(tensor) for tensor in wanted}
    for name, tensor in whole.state_dict(keep_vars=True).items():
        if id(tensor) in kept:
            seen[step, "value", name] = tensor.detach().clone()
            if tensor.grad is not None:
                seen[step, "grad", name] = tensor.grad.clone()


def train(name, whole, mine, step_once):
    """What `STEPS` steps left: losses of the microbatches, and gradients, weights and buffers of the modules `mine`."""
    wanted = [tensor for module in mine for tensor in (*module.parameters(), *module.buffers())]
    weights = [*{id(w): w for w in wanted if w.requires_grad}.values()]
    optimizer = torch.optim.SGD(weights, 1e-2, momentum=0.9) if weights else None
    _, draw, _ = MODELS[name]
    seen = {}
    for step in range(STEPS):
        losses = step_once(*batch(draw, step))
        seen.update({(step, "loss", k): loss.detach() for k, loss in enumerate(losses)})
        state(step, whole, wanted, seen)
        if optimizer is not None:
            for w in weights:
                if w.grad is not None:
                    w.grad.clamp_(-1.0, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    state(STEPS, whole, wanted, seen)
    return seen


def reference(name):
    """`train` of the whole model, unpipelined."""
    whole, _ = build(name)
    _, _, loss_function = MODELS[name]

    def step_once(x, target):
        losses = []
        for part, goal in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            losses.append(loss_function(whole(part), goal))
            losses[-1].backward()
        return losses

    return train(name, whole, [whole], step_once)


def shapes(name):
    """The arguments that tell a PipelineStage the shapes of its inputs and outputs, per stage."""
    _, parts = build(name)
    x, _ = batch(MODELS[name][1], 0)
    x = (x.chunk(MICROBATCHES)[0],)
    given = []
    for part in parts:
        out = part(*x)
        given.append({"input_args": x, "output_args": out})
        x = [y.detach().requires_grad_(y.requires_grad) for y in (out if isinstance(out, tuple) else (out,))]
    return given


def pipelined(name, schedule, rank, world):
    whole, parts = build(name)
    _, _, loss_function = MODELS[name]
    given = shapes(name) if name in SHAPES_ARE_GIVEN else [{}] * STAGES
    mine = stages_of(rank, world, STAGES // world, SHAPES[schedule])
    stages = [PipelineStage(parts[i], i, STAGES, torch.device("cpu"), **given[i]) for i in mine]
    runtime = getattr(schedules, schedule)(stages, MICROBATCHES, loss_fn=loss_function, scale_grads=False)

    def step_once(x, target):
        losses = []
        given = {"target": target, "losses": losses} if STAGES - 1 in mine else {}
        runtime.step(*([x] if 0 in mine else []), **given)
        return losses

    return train(name, whole, [parts[i] for i in mine], step_once)


def main(rank, world, folder, lane):
    for package in {*NEEDS.values()}:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)  # before the forks
    for name, schedule in RUNS:
        if lane_of(name, schedule) != lane:
            continue
        for module in MODULES:
            run = functools.partial(pipelined, name, schedule, rank, world)
            run_apart(f"{name} {schedule} {module}", module, run, rank, world, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
