"""Kinds of training that keep what training keeps, and of which nothing grows."""

import collections
import contextlib
import copy
import io
import queue
import random
import threading

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.functional import cross_entropy, dropout, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

CPU = torch.profiler.ProfilerActivity.CPU


class Run:
    """A small model with its optimizer, and what its code may keep from step to step."""

    def __init__(self):
        torch.manual_seed(0)
        self.random = random.Random(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.number = 0
        self.recent, self.listed, self.by_length, self.last = collections.deque(maxlen=10), [], {}, None

    def use(self, net, kind=torch.optim.AdamW, lr=1e-3, **options):
        self.net, self.optimizer = net, kind(net.parameters(), lr=lr, **options)

    def batch(self, length=4):
        return torch.randn(length, 8)

    def loss(self, x=None):
        return self.net(self.batch() if x is None else x).square().mean()

    def train(self, loss=None):
        self.number += 1
        loss = self.loss() if loss is None else loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def keep(self, batch):
        self.last = batch
        return batch


def masked(run):
    length = 1 + run.number % 7
    mask = run.by_length.setdefault(length, torch.ones(length, length).tril())
    return run.loss(mask @ run.batch(length))


def replayed(run):
    run.recent.append(run.batch())
    return run.loss(run.random.choice(run.recent))


def truncated(run):
    """Windows of one text, truncated between one and the next; hidden states go from each to the next."""
    losses = []
    hidden = torch.zeros(4, 4) if run.last is None else run.last.detach()
    for _ in range(5):
        hidden = run.net(torch.cat([hidden, run.batch()[:, :4]], 1))
        losses.append(hidden.square().mean())
    run.last = hidden
    return torch.stack(losses).mean()


def penalty(run):
    """A backward through a backward."""
    x = run.batch().requires_grad_()
    (grad,) = torch.autograd.grad(run.net(x).sum(), x, create_graph=True)
    return grad.square().mean() + run.loss()


def with_a_hook(run):
    out = run.net(run.batch())
    out.register_hook(lambda grad: grad.clamp(-1, 1))
    return out.square().mean()


def inner_steps(run):
    """A loss of weights that gradient descent has moved: as in learning to learn."""
    weights = dict(run.net.named_parameters())
    for _ in range(2):
        inner = torch.func.functional_call(run.net, weights, run.batch()).square().mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
    return torch.func.functional_call(run.net, weights, run.batch()).square().mean()


def tangents(run):
    with forward_ad.dual_level():
        out = run.net(forward_ad.make_dual(run.batch(), run.batch()))
        return forward_ad.unpack_dual(out).tangent.square().mean()


def packed(run):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.to(torch.bfloat16), lambda t: t.float()):
        return run.loss()


def autocast(run):
    with torch.autocast("cpu", torch.bfloat16):
        return run.loss()


# Losses, of each of which a step is trained.
LOSSES = {
    "ordinary": Run.loss,
    # The last batch and its outputs live on after the step, of a length that nothing before may have had.
    "random lengths": lambda run: run.loss(run.keep(run.batch(run.random.randrange(1, 400)))),
    # Each epoch begins with its shortest batches.
    "lengths in order": lambda run: run.loss(run.keep(run.batch(1 + run.number % 10))),
    # From short to long, and no longer.
    "curriculum of lengths": lambda run: run.loss(run.keep(run.batch(min(1 + run.number // 4, 12)))),
    "replay": replayed,
    "cached masks": masked,
    "tokens": truncated,
    "checkpointed": lambda run: checkpoint(run.net, run.batch(), use_reentrant=False).square().mean(),
    "checkpointed, reentrant": lambda run: (
        checkpoint(run.net, run.batch().requires_grad_(), use_reentrant=True).square().mean()
    ),
    "autocast": autocast,
    "penalty": penalty,
    "hooks of one step": with_a_hook,
    "inner steps": inner_steps,
    "tangents": tangents,
    "packed": packed,
}

# What is done in a step with what a step of ordinary training gives.
STEPS = {
    "accumulation": lambda run: [run.loss().backward() for _ in range(3)] and run.train(),
    "window of losses": lambda run: run.recent.append(run.train()),
    "losses of epochs": lambda run: run.listed.append(run.train()) or (run.number % 15 == 0 and run.listed.clear()),
    # As numbers, which no allocator of torch's sees.
    "means of epochs": lambda run: run.listed.append(float(run.train())),
}


def best_model(run):
    while True:
        run.train()
        if run.number in (5, 11, 30, 47):
            run.last = copy.deepcopy(run.net.state_dict())
        yield


def unfrozen(run):
    """A layer more every 25 steps."""
    run.use(nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).requires_grad_(False))
    while True:
        if run.number % 25 == 0:
            run.net[-1 - run.number // 25 % 8].requires_grad_(True)
        yield run.train()


def layers_with_rates(run):
    """Each gets a group of the optimizer's when its time comes."""
    run.optimizer = torch.optim.Adam(run.net[2].parameters(), lr=1e-3)
    while True:
        if run.number == 50:
            run.optimizer.add_param_group({"params": list(run.net[0].parameters()), "lr": 1e-4})
        yield run.train()


def target_network(run):
    """As in Q-learning: made anew from the other one now and then."""
    while True:
        if run.number % 20 == 0:
            target = copy.deepcopy(run.net)
        yield run.train(replayed(run) + (run.net(run.batch()) - target(run.batch()).detach()).square().mean())


def queue_of_keys(run):
    """A buffer of fixed size that the newest keys are written to."""
    kept = torch.zeros(32, 4)
    while True:
        keys, at = run.net(run.batch()), 4 * run.number % 32
        loss = (keys @ kept.clone().T).square().mean()
        kept[at : at + 4] = keys.detach()
        yield run.train(loss)


def generation(run):
    """A text for every fifth step, with a cache that grows by a token a time."""
    while True:
        if run.number % 5 == 0:
            run.last = torch.empty(0, 4)
            with torch.no_grad():
                for _ in range(12):
                    run.last = torch.cat([run.last, run.net(run.batch()[:1])])
        yield run.train()


def evaluation(run):
    """What it gathers over its batches is let go of after them; the mean of each is kept."""
    while True:
        if run.number % 10 == 0:
            run.net.eval()
            with torch.inference_mode():
                run.listed.append(torch.cat([run.net(run.batch()) for _ in range(5)]).mean().item())
            run.net.train()
        yield run.train()


def worst(run):
    """The ten batches of the largest loss."""
    while True:
        batch = run.batch()
        run.listed.append((float(run.train(run.loss(batch))), batch))
        run.listed = sorted(run.listed, key=lambda entry: entry[0])[-10:]
        yield


def last_checkpoints(run):
    """The last three, in files; those of memory here, whose bytes are Python's."""
    while True:
        run.train()
        if run.number % 8 == 0:
            file = io.BytesIO()
            torch.save({"net": run.net.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
            run.listed = [*run.listed[-2:], file]
            file.seek(0)
            run.optimizer.load_state_dict(torch.load(file)["optimizer"])
        yield


def skipped_batches(run):
    """Some raise, and the loop goes on; the last error is kept."""

    def loss():
        loss = run.loss()
        if run.number % 6 == 3:
            run.number += 1
            raise ValueError(f"a bad batch: {loss.shape}")
        return loss

    while True:
        try:
            run.train(loss())
        except ValueError as error:
            run.last = error
            run.optimizer.zero_grad()
        yield


def prefetching_thread(run):
    """Makes the batches, and never more than two ahead."""
    waiting, ends = queue.Queue(maxsize=2), threading.Event()

    def fetch():
        while not ends.is_set():
            waiting.put(torch.ones(4, 8))

    thread = threading.Thread(target=fetch)
    thread.start()
    try:
        while True:
            yield run.train(run.loss(waiting.get()))
    finally:
        ends.set()
        waiting.get()
        thread.join()


# ---- what uses something of torch's, which keeps what it keeps


def lbfgs(run):
    run.use(run.net, torch.optim.LBFGS, lr=1, history_size=5, max_iter=2)
    while True:
        data = run.batch()

        def closure(data=data):
            run.optimizer.zero_grad()
            loss = run.loss(data)
            loss.backward()
            return loss

        yield run.optimizer.step(closure).detach()


def schedule(run):
    warmup = torch.optim.lr_scheduler.LinearLR(run.optimizer, total_iters=10)
    while True:
        run.train()
        yield warmup.step()


def optimizer_in_hooks(run):
    of = {p: torch.optim.SGD([p], lr=0.01, momentum=0.9) for p in run.net.parameters()}

    def update(p):
        of[p].step()
        p.grad = None

    for p in run.net.parameters():
        p.register_post_accumulate_grad_hook(update)
    while True:
        yield run.train()


def averaged(run):
    """Of the weights of many steps, by torch's own."""
    swa = torch.optim.swa_utils.AveragedModel(run.net)
    while True:
        run.train()
        if run.number > 20:
            swa.update_parameters(run.net)
        yield


class Layer(nn.Module):
    """Of a GPT."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.attention = nn.Linear(16, 48)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = self.attention(self.norms[0](x)).unflatten(-1, (6, 8)).transpose(1, 2).chunk(3, 1)
        x = x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(gelu(self.up(self.norms[1](x))))


def gpt(run):
    """With dropout, tied weights, a warm-up and clipped gradients."""
    run.use(nn.ModuleDict({"tokens": nn.Embedding(20, 16), "layers": nn.ModuleList(Layer() for _ in range(2))}))
    warmup = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: min(1, step / 10))

    def loss():
        tokens = torch.randint(20, (2, 7))
        x = dropout(run.net["tokens"](tokens), 0.1)
        for layer in run.net["layers"]:
            x = layer(x)
        logits = x @ run.net["tokens"].weight.T
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    while True:
        loss().backward()
        nn.utils.clip_grad_norm_(run.net.parameters(), 1.0)
        run.optimizer.step()
        warmup.step()
        run.optimizer.zero_grad()
        yield


def autocast_around_all(run):
    """Its cache of weights lasts until the region ends."""
    with torch.autocast("cpu", torch.bfloat16):
        while True:
            yield run.train()


def scaled(run):
    """Some steps are skipped, for their gradients are infinite."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=10)
    while True:
        run.number += 1
        loss = autocast(run) * (float("inf") if run.number % 9 == 0 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(run.optimizer)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad(set_to_none=run.number % 2 == 0)
        yield


def compiled(run, length=lambda run: 4, call=lambda net, x: net(x), **options):
    net = torch.compile(run.net, backend="aot_eager", **options)
    while True:
        yield run.train(call(net, run.batch(length(run))).square().mean())


def compiled_for_all_lengths(run):
    return compiled(run, lambda run: 2 + run.number % 9, dynamic=True)


def compiled_and_checkpointed(run):
    return compiled(run, call=lambda net, x: checkpoint(net, x, use_reentrant=False))


def sparse(run):
    """The gradient of an embedding, and the optimizer for it."""
    run.use(nn.Embedding(50, 8, sparse=True), torch.optim.SparseAdam, lr=0.01)
    while True:
        yield run.train(run.loss(torch.randint(50, (1 + run.number % 12,))))


def profiled(run):
    """By a schedule, with a handler that reads what was recorded."""
    when = torch.profiler.schedule(wait=10, warmup=2, active=2)

    def handler(profiler):
        run.recent.append(len(profiler.events()))

    with torch.profiler.profile(
        activities=[CPU], schedule=when, on_trace_ready=handler, profile_memory=True
    ) as profiler:
        while True:
            run.train()
            yield profiler.step()


def workers(run, num_workers=2, **options):
    """Of a DataLoader, two for each epoch."""
    data = list(torch.randn(160, 8))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers, **options)
    while True:
        for batch in loader:
            yield run.train(run.loss(batch))


def persistent_workers(run):
    return workers(run, 1, persistent_workers=True, prefetch_factor=3)


def no_workers(run):
    return workers(run, 0)


def per_sample(run):
    """Gradients of each, by torch.func."""

    def loss(weights, x):
        return torch.func.functional_call(run.net, weights, x.unsqueeze(0)).square().mean()

    while True:
        weights = {name: weight.detach() for name, weight in run.net.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, run.batch())
        for name, weight in run.net.named_parameters():
            weight.grad = grads[name].clamp(-1, 1).mean(0)
        yield run.optimizer.step()


def packed_sequences(run):
    run.use(nn.GRU(8, 4, num_layers=2, bidirectional=True, dropout=0.1), torch.optim.NAdam)
    while True:
        sequences = [run.batch(1 + run.random.randrange(6)) for _ in range(3)]
        given = nn.utils.rnn.pack_sequence(sequences, enforce_sorted=False)
        yield run.train(run.net(given)[0].data.square().mean())


def images(run):
    """Buffers that each forward replaces, activations in place, channels last, a step without gradients for the weights."""
    conv, norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None)
    net = nn.Sequential(conv, norm, nn.ReLU(inplace=True), nn.Dropout2d(0.1)).to(memory_format=torch.channels_last)
    run.use(net, torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    while True:
        yield run.train(run.loss(torch.randn(4, 3, 6, 6)))


def weight_normalized(run):
    for layer in (run.net[0], run.net[2]):
        nn.utils.parametrizations.weight_norm(layer)
    run.use(run.net, torch.optim.Adam)
    while True:
        yield run.train()


def watched(run):
    """Features that hooks of modules take, and anomalies that are looked for."""
    features = {}
    for name, layer in run.net.named_children():
        layer.register_forward_hook(lambda _, given, out, name=name: features.update({name: out}))
        layer.register_full_backward_hook(lambda _, into, out: None)
    while True:
        anomalies = torch.autograd.detect_anomaly(check_nan=run.number % 2 == 0)
        with anomalies if run.number % 5 == 0 else contextlib.nullcontext():
            run.train(run.loss(run.batch().requires_grad_()))
        yield


def each_step(act):
    def steps(run):
        while True:
            yield act(run)

    return steps


LOOPS = [
    best_model, unfrozen, layers_with_rates, target_network, queue_of_keys, generation,
    evaluation, worst, last_checkpoints, skipped_batches, prefetching_thread, lbfgs, schedule,
    optimizer_in_hooks, averaged, gpt, autocast_around_all,
    scaled, compiled, compiled_for_all_lengths, compiled_and_checkpointed, sparse, profiled, workers,
    persistent_workers, no_workers, per_sample, packed_sequences, images, weight_normalized, watched,
]  # fmt: skip

# name: from a Run to the steps of a training, each of which is over when it yields
TRAININGS = {
    **{name: each_step(lambda run, loss=loss: run.train(loss(run))) for name, loss in LOSSES.items()},
    **{name: each_step(act) for name, act in STEPS.items()},
    **{loop.__name__.replace("_", " "): loop for loop in LOOPS},
}
