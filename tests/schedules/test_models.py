"""Models that others wrote, odd stages, and a fine-tuner's cases under zero-bubble schedules: as without a pipeline.

torch's own module trains some of them wrong, silently.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.blocks import ZERO_BUBBLE, Linears, f64
from support.functions import handing_through
from support.oracle import ON_TORCH, wrong_on_torch
from support.pipelines import Case, Model, assert_close, in_turn, pipelined, ranks_of, unpipelined
from torch import nn

STAGES, MICROBATCHES, BATCH, STEPS = 4, 4, 8, 3
LENGTH, WIDTH, VOCABULARY = 6, 16, 32
ZBV = "ScheduleZBVZeroBubble"
IMPORTS = ("transformers", "peft")
MASKED = -100.0


def tokens():
    return torch.randint(VOCABULARY, (BATCH, LENGTH)), torch.randint(VOCABULARY, (BATCH, LENGTH))


def vectors():
    return torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)


def doubles():
    return torch.randn(BATCH, 8, dtype=f64), torch.randn(BATCH, 8, dtype=f64)


def images():
    return torch.randn(BATCH, 3, 8, 8), torch.randint(10, (BATCH,))


# Losses of one microbatch.


def cross_entropy(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")


def squared(out, target):
    return nn.functional.mse_loss(out, target, reduction="sum")


def masked(out, target):
    """As a cross entropy with an ignored label: constant where every label is masked."""
    keep = target != MASKED
    return (out[keep] - target[keep]).square().sum() if keep.any() else torch.zeros((), dtype=f64)


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


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x, use_cache=False).logits


LIKE_LLAMA = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": STAGES}
LIKE_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
# Its head is its embedding: under ZBV the first and the last stage, on one rank, share a weight.
LIKE_GPT2 = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": STAGES, "n_head": 4}
LIKE_GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def hugging_face(config, kind, cut=Cut, **given):
    def make(count):
        import transformers

        whole = getattr(transformers, kind)(getattr(transformers, config)(vocab_size=VOCABULARY, **given))
        return Logits(whole), [cut(whole, i) for i in range(count)]

    return make


llama = hugging_face("LlamaConfig", "LlamaForCausalLM", **LIKE_LLAMA)


def peft(*layers):
    """Llama with PEFT's adapters on these layers; all else is frozen."""

    def make(count):
        from peft import LoraConfig, get_peft_model

        model, parts = llama(count)
        given = {"target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": list(layers)}
        get_peft_model(
            model.model, LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **given)
        )  # changes its layers
        return model, parts

    return make


# torch's own.


# The gradient of attention's input is a transposed view, which torch's stages send as it is and gloo refuses. torch's own I
# cannot have a view as an output.
contiguous_gradient = handing_through(lambda x: x.clone(), lambda grad: grad.contiguous())


class Encoder(nn.Module):
    def __init__(self, layer, first):
        super().__init__()
        self.layer = layer
        self.target = nn.Linear(WIDTH, WIDTH) if first else None

    def forward(self, source, target=None):
        target = target if self.target is None else self.target(source)
        return self.layer(contiguous_gradient(source)), target


class Decoder(nn.Module):
    def __init__(self, layer, last):
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        source, target = map(contiguous_gradient, (source, target))
        target = self.layer(target, source, tgt_mask=mask, tgt_is_causal=True)
        return target if self.last else (source, target)


def transformer(count):
    """Two encoder and two decoder layers; memory and target cross every boundary between them."""
    given = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 2 * WIDTH, "dropout": 0.0, "batch_first": True}
    encoders = [Encoder(nn.TransformerEncoderLayer(**given), i == 0) for i in range(2)]
    return encoders + [Decoder(nn.TransformerDecoderLayer(**given), i == 1) for i in range(2)]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(self.lstm(x)[0])


class Residual(nn.Module):
    """A ResNet's basic block."""

    def __init__(self, before, after, stride):
        super().__init__()
        conv = functools.partial(nn.Conv2d, padding=1, bias=False)
        first = conv(before, after, 3, stride), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
        self.body = nn.Sequential(*first, conv(after, after, 3), nn.BatchNorm2d(after))
        self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.body(x) + self.shortcut(x))


def resnet(count):
    return [
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
        Residual(8, 8, 1),
        Residual(8, 16, 2),
        nn.Sequential(Residual(16, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    ]


# Odd stages.


class Rotation(nn.Module):
    """No parameters, and a gradient that depends on its input."""

    def forward(self, x):
        return x.roll(1, -1) + x.sin()


def without_parameters(*bare):
    return lambda count: [Rotation() if i in bare else Linears(WIDTH, torch.float32) for i in range(count)]


class Reading(nn.Module):
    """Takes integers from stage to stage beside the activations, and embeds them in each; `step` is added to them."""

    def __init__(self, index, step):
        super().__init__()
        self.first, self.last, self.step = index == 0, index == STAGES - 1, step
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Linears(WIDTH, torch.float32)
        self.head = nn.Linear(WIDTH, VOCABULARY) if self.last else None

    def forward(self, *given):
        x, ids = (0, given[0]) if self.first else given
        x = self.block(x + self.embedding(ids))
        if self.last:
            return self.head(x)
        return x, (ids + self.step) % VOCABULARY if self.step else ids


def integers(step):
    return lambda count: [Reading(i, step) for i in range(count)]


# What a fine-tuner trains of linear blocks.


def only(*trained):
    return lambda count: [Linears().requires_grad_(i in trained) for i in range(count)]


class Adapted(nn.Module):
    """A frozen linear layer and the product of two small matrices beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features, dtype=f64))
        self.b = nn.Parameter(torch.randn(base.out_features, 2, dtype=f64) / 4)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def lora_on(*adapted):
    def make(count):
        parts = only()(count)
        for i in adapted:
            parts[i].up, parts[i].down = Adapted(parts[i].up), Adapted(parts[i].down)
        return parts

    return make


def vectors_alone(count):
    parts = only(*range(count))(count)
    for weight in nn.ModuleList(parts).parameters():
        weight.requires_grad_(weight.dim() == 1)
    return parts


everything = only(*range(STAGES))


@dataclass(frozen=True)
class Trained:
    """
    constant: microbatches without any label, from step `since` on. From the first one on torch's own module refuses a constant
        first loss: by a backward through it a stage learns its gradients' shapes.
    wrong: what torch's own module does.
    given: whether the stages are told their shapes. torch infers them by a forward on memory as it finds it, which spoils the
        running statistics of batch norms, and is no index into an embedding.
    """

    make: Callable
    draw: Callable = doubles
    loss: Callable = squared
    constant: tuple = ()
    since: int = 1
    wrong: str = ""
    needs: str = ""
    given: bool = False
    under: tuple = ZERO_BUBBLE


# Where no input of a stage requires a gradient, and its weights do, torch's own I and W give them none, or under
# ScheduleDualPipeV, which does not split every backward, some microbatches' alone. Measured on torch 2.13 and 2.15.
NO_GRADIENTS = "weights get no gradients, silently"
hub = functools.partial(Trained, draw=tokens, loss=cross_entropy, needs="transformers", under=(ZBV,))
adapters = functools.partial(Trained, draw=tokens, loss=cross_entropy, needs="peft")
odd = functools.partial(Trained, draw=vectors)
words = functools.partial(Trained, draw=tokens, loss=cross_entropy, given=True)
wrong = functools.partial(Trained, wrong=NO_GRADIENTS)
gpt2 = hugging_face("GPT2Config", "GPT2LMHeadModel", CutGPT2, **LIKE_GPT2)
mixtral = hugging_face("MixtralConfig", "MixtralForCausalLM", **LIKE_LLAMA, **EXPERTS)
TRAINED = {
    "llama": hub(llama),
    "gpt2": hub(gpt2),
    "mixtral": hub(mixtral),
    "transformer": odd(transformer, under=(ZBV,)),
    "lstm": odd(lambda count: [Recurrent() for _ in range(count)], under=(ZBV,)),
    "resnet": Trained(resnet, images, cross_entropy, given=True, under=(ZBV,)),
    "PEFT's LoRA on all layers": adapters(peft(*range(STAGES))),
    "PEFT's LoRA on the last two layers": adapters(peft(2, 3), wrong=NO_GRADIENTS),
    "PEFT's LoRA on the last layer": adapters(peft(3), wrong=NO_GRADIENTS),
    "a stage without parameters": odd(without_parameters(1)),
    "the first and the third stage without parameters": odd(without_parameters(0, 2), wrong=NO_GRADIENTS),
    "the last stage without parameters": odd(without_parameters(3)),
    "integers between stages": words(integers(3)),
    "the input's integers handed on": words(integers(0)),
    "everything is trained": Trained(everything),
    "the last stage alone": wrong(only(3)),
    "the last two stages": wrong(only(2, 3)),
    "all but the first stage": wrong(only(1, 2, 3)),
    "the first stage alone": Trained(only(0)),
    "the second stage alone": wrong(only(1)),
    "first and last stage": Trained(only(0, 3)),
    "norms and biases": Trained(vectors_alone),
    "LoRA on all stages": Trained(lora_on(0, 1, 2, 3)),
    "LoRA on the last stage": wrong(lora_on(3)),
    "LoRA on the last two stages": wrong(lora_on(2, 3)),
    "LoRA on the first two stages": Trained(lora_on(0, 1)),
    "a constant loss": Trained(everything, loss=masked, constant=(1,)),
    "the first and the last loss constant": Trained(everything, loss=masked, constant=(0, MICROBATCHES - 1)),
    "all losses constant but one": Trained(everything, loss=masked, constant=(0, 1, 3)),
    "all losses constant": Trained(everything, loss=masked, constant=(0, 1, 2, 3)),
    "the first loss constant from the first step on": Trained(
        *(everything, doubles, masked, (0,), 0), wrong="element 0 of tensors does not require grad"
    ),
    "the last two stages, a constant loss": wrong(only(2, 3), loss=masked, constant=(2,)),
    "LoRA on the last two stages, a constant loss": wrong(lora_on(2, 3), loss=masked, constant=(2,)),
}
# A stage of torch up to 2.12 asks for a gradient of every input, so that it takes no integers, and sends none that is None.
# Where it gets none 2.11 is right and 2.12 raises.
OLDER = torch.__version__ < (2, 13)
PLAIN_2_11 = OLDER and torch.__version__ < (2, 12)


def wrong_of(name):
    one = TRAINED[name]
    if OLDER and name == "transformer":
        return "element 1 of tensors does not require grad"  # in the decoder
    return "" if PLAIN_2_11 and one.wrong == NO_GRADIENTS and one.needs == "" else one.wrong


def is_refused(name):
    one = TRAINED[name]
    learns_nothing = wrong_of(name) == NO_GRADIENTS and one.needs == "" and not PLAIN_2_11
    return OLDER and (one.constant != () or (one.draw is tokens and one.given) or learns_nothing)


def clamped(weights):
    def clamp(*_):
        for w in weights:
            if w.grad is not None:
                w.grad.clamp_(-1.0, 1.0)

    optimizer = torch.optim.SGD(weights, 1e-2)
    optimizer.register_step_pre_hook(clamp)
    return optimizer


@functools.cache
def model_of(name):
    one = TRAINED[name]

    def make(count):
        torch.manual_seed(1)
        return one.make(count)

    def batch(step):
        torch.manual_seed(100 + step)
        x, target = one.draw()
        for microbatch in one.constant if step >= one.since else ():
            target.chunk(MICROBATCHES)[microbatch].fill_(MASKED)
        return x, target

    return Model(make, one.loss, batch, clamped, STEPS, MICROBATCHES)


def shapes(model):
    """The arguments that tell a PipelineStage the shapes of its inputs and outputs, per stage."""
    _, parts = model.build(STAGES)
    x, found = (model.batch(0)[0].chunk(MICROBATCHES)[0],), []
    for part in parts:
        out = part(*x)
        found.append({"input_args": x, "output_args": out})
        x = [y.detach().requires_grad_(y.requires_grad) for y in (out if isinstance(out, tuple) else (out,))]
    return found


def run(name, schedule):
    model = model_of(name)
    given = shapes(model) if TRAINED[name].given else [{}] * STAGES
    return pipelined(model, schedule, given=given.__getitem__)


def is_there(name):
    return not TRAINED[name].needs or importlib.util.find_spec(TRAINED[name].needs) is not None


RUNS = [
    ((name, schedule), "fast" if len(one.under) == 1 else in_turn(number, schedule))
    for number, (name, one) in enumerate(TRAINED.items())
    for schedule in one.under
    if is_there(name) and not is_refused(name)
]
CASES = {
    f"{name} {schedule}": Case(functools.partial(run, name, schedule), lane, apart=ON_TORCH)
    for (name, schedule), lane in RUNS
}
ranks = ranks_of(__file__, CASES)
pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft reads it
]


def expected(name):
    return unpipelined(model_of(name), STAGES)


def learned(seen):
    """Without what is None or zero: where every loss is constant an ordinary backward leaves None, and stages get zeros."""
    return {what: value for what, value in seen.items() if value is not None and value.any()}


def marks(name, lane):
    known = [wrong_on_torch(why)] if (why := wrong_of(name)) else []
    return [*known, *([pytest.mark.long] if lane == "long" else [])]


@pytest.mark.parametrize(("name", "schedule"), [pytest.param(*run, marks=marks(run[0], lane)) for run, lane in RUNS])
def test_it_trains_as_it_does_unpipelined(name, schedule, ranks):
    got, wanted = ranks.together(f"{name} {schedule}"), expected(name)
    if len(TRAINED[name].constant) == MICROBATCHES:
        got, wanted = learned(got), learned(wanted)
    assert_close(got, wanted)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.skipif(not is_there(n), reason=f"needs {TRAINED[n].needs}")) for n in TRAINED],
)
def test_training_moves_what_is_trained(name):
    """Else equal weights would say nothing."""
    _, parts = model_of(name).build(STAGES)
    for i, part in enumerate(parts):
        for weight, before in part.named_parameters():
            moved = not torch.equal(expected(name)[STEPS, "value", f"{i}.{weight}"], before)
            assert moved == before.requires_grad, weight
