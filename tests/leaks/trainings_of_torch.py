"""Kinds of training that use something of torch's, which keeps what it keeps, and of which nothing grows."""

import contextlib

import torch
from leaks.trainings import Run
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader


class Checkpointed(Run):
    def loss(self):
        return checkpoint(self.net, self.batch(), use_reentrant=False).square().mean()


class Autocast(Run):
    def loss(self):
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss()


class Penalty(Run):
    """A backward through a backward."""

    def loss(self):
        x = self.batch().requires_grad_()
        (grad,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        return grad.square().mean() + super().loss()


class Lbfgs(Run):
    def __init__(self):
        super().__init__()
        self.optimizer = torch.optim.LBFGS(self.net.parameters(), history_size=5, max_iter=2)

    def step(self):
        self.number += 1
        data = self.batch()

        def closure():
            self.optimizer.zero_grad()
            loss = self.net(data).square().mean()
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Schedule(Run):
    def __init__(self):
        super().__init__()
        self.warmup = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)

    def step(self):
        super().step()
        self.warmup.step()


class OptimizerInHooks(Run):
    def __init__(self):
        super().__init__()
        self.of = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in self.net.parameters()}
        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, p):
        self.of[p].step()
        p.grad = None


class Averaged(Run):
    """Of the weights of many steps, by torch's own."""

    def __init__(self):
        super().__init__()
        self.swa = torch.optim.swa_utils.AveragedModel(self.net)

    def step(self):
        super().step()
        if self.number > 20:
            self.swa.update_parameters(self.net)


class Stateful(Run):
    state = None

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def loss(self):
        out, state = self.lstm(self.batch().unsqueeze(0), self.state)
        self.state = tuple(part.detach() for part in state)
        return out.square().mean()


class HooksOfOneStep(Run):
    def loss(self):
        out = self.net(self.batch())
        out.register_hook(lambda grad: grad.clamp(-1, 1))
        return out.square().mean()


class CheckpointedReentrant(Run):
    def loss(self):
        return checkpoint(self.net, self.batch().requires_grad_(), use_reentrant=True).square().mean()


class Layer(nn.Module):
    """Of a GPT."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.attention = nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = self.attention(self.norms[0](x)).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Gpt(Run):
    """With dropout, tied weights, a warm-up and clipped gradients."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"tokens": nn.Embedding(20, 16), "layers": nn.ModuleList(Layer() for _ in range(2))})
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1, step / 10))

    def layer(self, layer, x):
        return layer(x)

    def loss(self):
        tokens = torch.randint(20, (2, 7))
        x = nn.functional.dropout(self.net["tokens"](tokens), 0.1)
        for layer in self.net["layers"]:
            x = self.layer(layer, x)
        logits = x @ self.net["tokens"].weight.T
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def step(self):
        loss = self.loss()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


class GptCheckpointed(Gpt):
    def layer(self, layer, x):
        return checkpoint(layer, x, use_reentrant=False)


class GptCheckpointedReentrant(Gpt):
    def layer(self, layer, x):
        return checkpoint(layer, x, use_reentrant=True)


class AutocastAroundAll(Run):
    """Its cache of weights lasts until the region ends."""

    def __init__(self):
        super().__init__()
        self.region = torch.autocast("cpu", torch.bfloat16)
        self.region.__enter__()

    def close(self):
        self.region.__exit__(None, None, None)


class Scaled(Run):
    """Some steps are skipped, for their gradients are infinite."""

    def __init__(self):
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=10)

    def step(self):
        self.number += 1
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss() * (float("inf") if self.number % 9 == 0 else 1)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=self.number % 2 == 0)


class Compiled(Run):
    def __init__(self):
        super().__init__()
        self.compiled = torch.compile(self.net, backend="aot_eager")

    def loss(self):
        return self.compiled(self.batch()).square().mean()


class CompiledForAllLengths(Compiled):
    def __init__(self):
        super().__init__()
        self.compiled = torch.compile(self.net, backend="aot_eager", dynamic=True)

    def batch(self):
        return torch.randn(2 + self.number % 9, 8)


class CompiledAndCheckpointed(Compiled):
    def loss(self):
        return checkpoint(self.compiled, self.batch(), use_reentrant=False).square().mean()


class Sparse(Run):
    """The gradient of an embedding, and the optimizer for it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Embedding(50, 8, sparse=True)
        self.optimizer = torch.optim.SparseAdam(self.net.parameters(), lr=0.01)

    def batch(self):
        return torch.randint(50, (1 + self.number % 12,))


class Profiled(Run):
    """By a schedule, with a handler that reads what was recorded."""

    def __init__(self):
        super().__init__()
        self.profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=10, warmup=2, active=2),
            on_trace_ready=lambda profiler: self.recent.append(len(profiler.events())),
            profile_memory=True,
        )
        self.profiler.start()

    def close(self):
        self.profiler.stop()

    def step(self):
        super().step()
        self.profiler.step()


class FreshWorkers(Run):
    """Of a DataLoader, two for each epoch."""

    def workers(self):
        return {"num_workers": 2}

    def __init__(self):
        super().__init__()
        self.loader = DataLoader(list(torch.randn(160, 8)), batch_size=4, shuffle=True, **self.workers())
        self.batches = iter(self.loader)

    def batch(self):
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)


class PersistentWorkers(FreshWorkers):
    def workers(self):
        return {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 3}


class NoWorkers(FreshWorkers):
    def workers(self):
        return {"num_workers": 0}


class PerSample(Run):
    """Gradients of each, by torch.func."""

    def step(self):
        weights = {name: weight.detach() for name, weight in self.net.named_parameters()}

        def loss(weights, x):
            return torch.func.functional_call(self.net, weights, x.unsqueeze(0)).square().mean()

        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, self.batch())
        for name, weight in self.net.named_parameters():
            weight.grad = grads[name].clamp(-1, 1).mean(0)
        self.optimizer.step()


class InnerSteps(Run):
    """A loss of weights that gradient descent has moved: as in learning to learn."""

    def loss(self):
        weights = dict(self.net.named_parameters())
        for _ in range(2):
            inner = torch.func.functional_call(self.net, weights, self.batch()).square().mean()
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        return torch.func.functional_call(self.net, weights, self.batch()).square().mean()


class Tangents(Run):
    """Forward mode."""

    def loss(self):
        with torch.autograd.forward_ad.dual_level():
            out = self.net(torch.autograd.forward_ad.make_dual(self.batch(), self.batch()))
            return torch.autograd.forward_ad.unpack_dual(out).tangent.square().mean()


class Packed(Run):
    """What a hook packs, a hook unpacks."""

    def loss(self):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float()):
            return super().loss()


class PackedSequences(Run):
    def __init__(self):
        super().__init__()
        self.net = nn.GRU(8, 4, num_layers=2, bidirectional=True, dropout=0.1)
        self.optimizer = torch.optim.NAdam(self.net.parameters(), lr=1e-3)

    def loss(self):
        sequences = [torch.randn(1 + self.random.randrange(6), 8) for _ in range(3)]
        packed = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
        return self.net(packed)[0].data.square().mean()


class Images(Run):
    """Buffers that each forward replaces, activations in place, channels last, a step without gradients for the weights."""

    def __init__(self):
        super().__init__()
        conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None)
        self.net = nn.Sequential(conv, norm, nn.ReLU(inplace=True), nn.Dropout2d(0.1)).to(
            memory_format=torch.channels_last
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, nesterov=True)

    def batch(self):
        return torch.randn(4, 3, 6, 6)


class WeightNormalized(Run):
    def __init__(self):
        super().__init__()
        for layer in (self.net[0], self.net[2]):
            nn.utils.parametrizations.weight_norm(layer)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)


class Watched(Run):
    """Features that hooks of modules take, and anomalies that are looked for."""

    def __init__(self):
        super().__init__()
        self.features = {}
        for name, layer in self.net.named_children():
            layer.register_forward_hook(lambda _, given, out, name=name: self.features.update({name: out}))
            layer.register_full_backward_hook(lambda _, into, out: None)

    def batch(self):
        return super().batch().requires_grad_()

    def step(self):
        with torch.autograd.detect_anomaly(check_nan=self.number % 2 == 0) if self.number % 5 == 0 else _NOTHING:
            super().step()


_NOTHING = contextlib.nullcontext()
