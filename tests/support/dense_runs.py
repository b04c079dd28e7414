"""Runs a small dense program (`support.dense`) split, and whole, microbatch by microbatch, and compares to the bit."""

import random
from itertools import chain

import torch

import zbpipe
from support.dense import INPUTS, MATRICES, VECTORS


class Run:
    """The program's leaves, for one of its two runs, and what the hooks see there."""

    def __init__(self, program, code, weights, starts, inputs, grads):
        self.program, self.code, self.dinputs = program, code, []
        self.weights = {name: w.clone().requires_grad_(name not in program.frozen) for name, w in weights.items()}
        self.inputs = [[x.clone().requires_grad_(n not in program.frozen) for n, x in zip(INPUTS, xs)] for xs in inputs]
        self.given = [[g.clone() for g in gs] for gs in grads]
        self.grads = [code["gradients"](*gs) for gs in self.given]
        self.seen = {name: [] for name in program.hooks}
        for name in [name for name in program.existing if name not in program.frozen]:
            self.weights[name].grad = starts[name].clone()
        self.starts = {name: w.grad for name, w in self.weights.items()}
        # An accumulator would go with its hooks.
        self.nodes = [self.hook(name, kind) for name, kind in program.hooks.items() if name not in program.frozen]

    def hook(self, name, kind):
        w, seen = self.weights[name], self.seen[name]
        node = torch.autograd.graph.get_gradient_edge(w).node

        def see(grad):
            seen.append(grad.clone() if grad is not None else None)

        if kind in ("tensor", "changes"):
            w.register_hook(lambda grad: see(grad) or (grad * 0.75 if kind == "changes" else None))
        elif kind in ("added", "takes"):
            w.register_post_accumulate_grad_hook(
                lambda w: see(w.grad) or (setattr(w, "grad", None) if kind == "takes" else None)
            )
        elif kind == "before":
            node.register_prehook(lambda grads: see(grads[0]))
        else:
            node.register_hook(lambda _, grads: see(grads[0]))
        return node

    def forward(self, k):
        return self.code["forward"](k, *self.inputs[k], *self.weights.values())

    def take_dinputs(self, k):
        self.dinputs += [x.grad for x in self.inputs[k]]
        for x in self.inputs[k]:
            x.grad = None

    def whole(self):
        """False if there is nothing to run backward from."""
        outs = [self.forward(k) for k in range(self.program.microbatches)]
        for retain in [True, False] if self.program.retain else [False]:
            for k, out in enumerate(outs):
                roots = [(o, g) for o, g in zip(out, self.grads[k]) if o.requires_grad and g is not None]
                if not roots:
                    return False
                torch.autograd.backward(*zip(*roots), retain_graph=retain)
                if len(self.dinputs) < 2 * len(outs):
                    self.take_dinputs(k)
                self.unshare()
        return True

    def unshare(self):
        """Torch lets weights' gradients share memory with others' by views, and adds the next microbatch to all."""
        taken = {*memory_of(chain(self.dinputs, *self.given))}
        for w in self.weights.values():
            if w.grad is not None:
                if w.grad.untyped_storage().data_ptr() in taken:
                    w.grad = w.grad.clone()
                taken.update(memory_of([w.grad]))

    def split(self):
        program, weights, groups = self.program, list(self.weights.values()), []
        listed = weights if program.listed else None
        outs = {k: self.forward(k) for k in range(program.microbatches) if program.late}
        with zbpipe.policy(defer=program.defer, exclude=[self.weights[name] for name in program.exclude]):
            for k in range(program.microbatches):
                out = outs.pop(k) if program.late else self.forward(k)
                groups.append(zbpipe.stage_backward_input(out, self.grads[k], self.inputs[k], listed)[1])
                self.take_dinputs(k)
                if program.calls == "at once":
                    zbpipe.stage_backward_weight(listed, groups.pop())
            calls = calls_of(program, groups) if groups else []
            for retain in [True, False] if program.retain else [False]:
                for call in calls:
                    zbpipe.stage_backward_weight(listed, call, retain_graph=retain)


def calls_of(program, groups):
    """The groups in calls of W, in which those of one weight keep the order of the microbatches."""
    choose = random.Random(program.seed)
    order = [choose.sample(mine, len(mine)) for mine in groups]
    if program.calls == "each":
        return order
    order, pieces = list(chain(*order)), program.calls == "pieces"
    if program.calls == "mixed":  # the n-th groups of all microbatches have the same weights
        turns = [n for n in range(len(groups[0])) for _ in groups]
        choose.shuffle(turns)
        left = [iter(column) for column in zip(*groups, strict=True)]
        order, pieces = [next(left[n]) for n in turns], choose.random() < 0.5
    cuts = [n for n in range(1, len(order)) if pieces and choose.random() < 0.4]
    return [order[i:j] for i, j in zip([0, *cuts], [*cuts, len(order)])]


def same(one, other):
    if one is None or other is None:
        return one is other
    word = torch.int32 if one.dtype == torch.float32 else torch.int64
    return torch.equal(one.view(word), other.view(word))  # an equal of floats takes -0.0 for 0.0


def memory_of(tensors):
    return [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None]


def differences(whole, split, grads):
    for name, w in split.weights.items():
        expected, place = whole.weights[name].grad, whole.starts[name]
        if not same(w.grad, expected):
            yield f"{name}.grad is {w.grad}, not {expected}"
        elif w.grad is not None and w.grad.stride() != expected.stride():
            yield f"{name}.grad has strides {w.grad.stride()}, not {expected.stride()}"
        if (w.grad is split.starts[name]) != (expected is place):
            yield f"{name}.grad is {'another' if expected is place else 'the same'} tensor"
    for name, seen in split.seen.items():
        if len(seen) != len(whole.seen[name]) or not all(map(same, seen, whole.seen[name])):
            yield f"the hook of {name} saw {seen}, not {whole.seen[name]}"
    if not all(map(same, split.dinputs, whole.dinputs)):
        yield f"the inputs' gradients are {split.dinputs}, not {whole.dinputs}"
    if not all(map(same, chain(*split.given), chain(*grads))):
        yield f"the outputs' gradients are {split.given}, and were {grads}"
    memory = memory_of(w.grad for w in split.weights.values())
    if len({*memory}) < len(memory) or not {*memory}.isdisjoint(memory_of(chain(split.dinputs, *split.given))):
        yield "a weight's gradient shares its memory"


def judge(program):
    """Raises AssertionError where they differ. False if the program has no backward."""
    dtype = getattr(torch, program.dtype)
    other = torch.float32 if dtype == torch.float64 else torch.float64
    code = {"torch": torch, "F": torch.nn.functional, "N": program.side, "DTYPE": dtype, "OTHER": other}
    exec(program.source, code)
    generator = torch.Generator().manual_seed(program.seed)

    def drawn(name):
        shape = [program.side] * (1 if name[:2] in VECTORS else 2)
        value = torch.randn(shape, generator=generator, dtype=dtype)
        return value.t() if name in program.strided else value

    weights, starts = ({name: drawn(name + end) for name in MATRICES + VECTORS} for end in ("", ".grad"))
    inputs, grads = ([[drawn(name) for name in names] for _ in range(program.microbatches)] for names in (INPUTS, "gh"))
    whole, split = (Run(program, code, weights, starts, inputs, grads) for _ in range(2))
    if not whole.whole():
        return False
    try:
        split.split()
    except Exception as error:
        raise AssertionError(repr(program)) from error
    if wrong := list(differences(whole, split, grads)):
        raise AssertionError("\n".join([repr(program), *wrong]))
    return True
