"""Runs a random autograd program (`support.programs`) split, and whole on a copy, and holds one against the other."""

import collections
import contextlib
import copy
import gc
import re

import torch
from torch.utils._python_dispatch import _disable_current_modes

import zbpipe
from support import oracle
from support.functions import FailsAt
from support.leaks import Watch
from support.oracle import (
    Stage,
    assert_grads_own_memory,
    close,
    compare_inputs,
    random_grads,
    same,
    seed,
    snapshot,
    twin,
)
from support.program_names import NAMES
from support.programs import EXPERTS, FILTERS, LIMITS, MATRICES, ROWS, VECTORS, WIDTH, reenters

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16")}
EXACT = {"rtol": 0, "atol": 0}
LOOSE = {torch.float64: {"rtol": 1e-6, "atol": 1e-8}, torch.float32: {"rtol": 1e-2, "atol": 1e-3}}
# Under autocast an ordinary backward rounds each microbatch's product to bfloat16, and a fused W does not.
AUTOCAST = {"rtol": 1e-2, "atol": 5e-2}


# What an ordinary backward raises where it cannot run.
NO_PROGRAM = (RuntimeError, NotImplementedError, TypeError)


class Planted(RuntimeError):
    """The failure that a program asks for."""


class Refused(Exception):
    """A W that failed where it cannot go on, and says so."""


def in_a_hook(outer):
    """Runs W in a hook of the backward that `outer(output, input)` runs."""

    def within(call):
        z = torch.ones(2, requires_grad=True)
        t = z * 2
        t.register_hook(lambda grad: (call(), None)[1])
        outer(t.sum(), z)

    return within


WITHIN = {
    "W": lambda call: call(),
    "V": in_a_hook(lambda out, z: torch.autograd.grad(out, [z])),
    "U": in_a_hook(lambda out, z: out.backward(inputs=[z])),
}


class Passes:
    """zbpipe's passes. `fails`: None, or which operator of the next call fails; that call alone."""

    def __init__(self):
        self.fails = None

    def stage_backward_input(self, *args):
        with self.failing():
            return zbpipe.stage_backward_input(*args)

    def stage_backward_weight(self, *args):
        with self.failing():
            return zbpipe.stage_backward_weight(*args)

    def failing(self):
        fails, self.fails = self.fails, None
        return contextlib.nullcontext() if fails is None else FailsAt(fails, error=Planted)


class ProgramStage(Stage):
    """A program's stage. `together`: a call of W may be for several microbatches, so that no hook's call belongs to one."""

    def __init__(self, program):
        dtype = DTYPES[program.dtype]
        shapes = {
            **dict.fromkeys(MATRICES, (WIDTH, WIDTH)),
            **dict.fromkeys(VECTORS, (WIDTH,)),
            **dict.fromkeys(EXPERTS, (2, 2 * WIDTH, 2 * WIDTH)),
            **dict.fromkeys(FILTERS, (WIDTH, WIDTH, 3)),
        }
        parts = {name: torch.nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}
        inputs = [f"x{i}" for i in range(len(program.inputs))]
        source = [f"def forward(m, {', '.join(inputs)}):"]
        source += [f"    {name} = m.{name}" for name in parts]
        source += [f"    {line}" for line in program.forward.split("\n")]
        space = dict(NAMES)
        exec(compile("\n".join(source), "a random program", "exec"), space)
        super().__init__(space["forward"], **parts)
        self.together = "+" in program.passes
        self.whole_grads = "/" not in program.passes and not program.policy.get("main_grad")
        self.born, self.hooks = {}, 0
        self.buffered = {}  # by name: what Functions and hooks keep
        self.keeps = True
        self.on_weights = []  # handles of hooks
        for name in program.frozen:
            getattr(self, name).requires_grad_(False)
        for w in self.parameters():
            w.main_grad = torch.zeros_like(w)

    def __deepcopy__(self, memo):
        copied = super().__reduce_ex__(2)[0](type(self))
        memo[id(self)] = copied
        copied.__dict__ = {key: copy.deepcopy(value, memo) for key, value in self.__dict__.items()}
        for w, twin_of in zip(copied.parameters(), self.parameters(), strict=True):
            w.main_grad = twin_of.main_grad.clone()
        return copied

    def forward(self, *inputs):
        self.hooks = 0
        with Watch() as born:
            result = super().forward(*inputs)
        self.born[self.microbatch] = born.storages
        return result

    def log(self, name, what=lambda *args: args):
        def hook(*args):
            with _disable_current_modes():
                self.records.setdefault((name, self.microbatch), []).append(snapshot(what(*args)))

        return hook

    def buffer(self, name, value, unseen=False):
        """The buffer of this name, with this value in it.

        unseen: written past the version counter, as kernels write.
        """
        if torch.is_grad_enabled():  # of a gradient that is differentiated nobody can keep a buffer
            return value
        kept = self.buffered.get(name)
        if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
            kept = self.buffered[name] = torch.empty_like(value)
        (kept.data if unseen else kept).copy_(value)
        return kept if self.keeps else kept.clone()

    def buffers(self, name, grads):
        return tuple(None if grad is None else self.buffer(f"{name}, {i}", grad * 0.5) for i, grad in enumerate(grads))

    def hook(self, tensor, kind):
        """What a line of a program registers on the value that it has computed, or on an input."""
        self.hooks += 1
        name = f"{kind} {self.hooks}"
        has_it = name in getattr(tensor, "hooks", ())  # an input in the forward behind an I that failed
        if not tensor.requires_grad or (tensor.is_leaf and kind != "buffer") or has_it:
            return
        tensor.hooks = [*getattr(tensor, "hooks", ()), name]
        if kind == "register_hook":
            tensor.register_hook(self.log(name))
        elif kind == "changes":
            tensor.register_hook(lambda grad: grad * 0.5)
        elif kind == "pre":
            tensor.grad_fn.register_prehook(self.log(name))
        elif kind == "post":
            tensor.grad_fn.register_hook(self.log(name))
        elif kind in ("buffer", "buffer between"):
            tensor.register_hook(lambda grad: self.buffers(name, [grad])[0])
        elif kind == "buffer pre":
            tensor.grad_fn.register_prehook(lambda grads: self.buffers(name, grads))
        elif kind == "buffer post":
            tensor.grad_fn.register_hook(lambda grads, _: self.buffers(name, grads))
        elif kind == "removed":
            tensor.register_hook(self.log(name)).remove()
        else:
            self.keep(name, tensor)

    def watch(self, names):
        whole = self.whole_grads and not self.together
        for name in names:
            w = getattr(self, name)
            if w.requires_grad:
                post = self.log(f"post {name}", lambda w: w.grad if whole else ())
                self.on_weights += [
                    w.register_hook(self.log(f"hook {name}")),
                    w.register_post_accumulate_grad_hook(post),
                ]


class Judged:
    """One program, both ways.

    split, whole: the two runs. dropped: microbatches. failed_weights: whether a W failed as planted.
    """

    def __init__(self, program, passes):
        self.program = program
        seed(0)
        stage = ProgramStage(program)
        microbatches = 1 + max(int(number) for number in re.findall(r"F(\d+)", program.passes))
        dtype = DTYPES[program.dtype]
        batches = [
            [torch.randn(ROWS, WIDTH).to(dtype).requires_grad_(needs) for needs in program.inputs]
            for _ in range(microbatches)
        ]
        self.split = self.copied(stage, batches, program.existing, passes)
        existing = program.existing and not program.policy.get("main_grad")
        self.whole = self.copied(stage, batches, existing, passes)
        # An accumulator without a gradient takes a new tensor over a buffer, and .grad is the buffer then.
        self.whole.stage.keeps = False
        self.dropped, self.failed_weights = set(), False
        self.spent = []  # groups, which hold nothing any more

    def copied(self, stage, batches, existing, passes):
        stage = copy.deepcopy(stage)
        for w in stage.parameters():
            if existing and w.requires_grad:
                w.grad = torch.ones_like(w)
        stage.watch(self.program.watched)
        args = [[twin(value) for value in batch] for batch in batches]
        run = oracle.Run(stage, args, passes, random_grads, lambda stage: stage.parameters(), contextlib.nullcontext)
        run.untouched = not reenters(self.program.forward)
        run.inexact_inputs = False
        return run

    # The passes.

    def run_split(self):
        with zbpipe.policy(**self.program.policy):
            for word in self.program.passes.split():
                word, _, fails = word.partition("!")
                self.step(word, int(fails) if fails else None)

    def step(self, word, fails):
        kind, rest = word[0], word[1:]
        rest, _, pieces = rest.partition("/")
        microbatches = [int(k) for k in rest.split("+")]
        k = microbatches[0]
        if kind == "F":
            self.split.forward(k)
        elif kind == "I":
            self.input(k, fails)
        elif kind == "D":
            self.dropped.add(k)
            self.split.order.append(k)
            self.split.groups[k] = None
        else:
            self.weight(microbatches, int(pieces or 1), fails, WITHIN[kind])

    def input(self, k, fails):
        stage = self.split.stage
        mains = [w.main_grad.clone() for w in stage.parameters()]
        grads = [None if w.grad is None else w.grad.clone() for w in stage.parameters()]
        self.split.impl.fails = fails
        try:
            self.split.input(k)
        except RuntimeError as error:
            self.planted(error)
            for w, grad in zip(stage.parameters(), grads, strict=True):
                same(w.grad, grad, "a weight's .grad after an I that failed")
            stage.records = {key: calls for key, calls in stage.records.items() if key[1] != k}  # F runs again too
            for w, main in zip(stage.parameters(), mains, strict=True):
                w.main_grad.copy_(main)  # what a Function's own backward has added there is nobody's to undo
            for x in self.split.inputs[k]:
                assert x.grad is None, "an input has a gradient after an I that failed"
            self.split.forward(k)
            self.split.input(k)

    def weight(self, microbatches, pieces, fails, within):
        groups = []
        for k in microbatches:
            left = self.split.groups[k]
            first = -(-len(left) // abs(pieces))
            parts = left[:first], left[first:]
            if pieces < 0:
                parts = left[-first:], left[:-first]
            groups += parts[0]
            self.split.groups[k] = parts[1]
            if k not in self.split.order:
                self.split.order.append(k)
        self.split.impl.fails = fails
        try:
            within(lambda: self.split.weight(microbatches[0], groups))
        except RuntimeError as error:
            self.limit(error)
            self.planted(error)
            self.failed_weights = True
            try:
                within(lambda: self.split.weight(microbatches[0], groups))
            except RuntimeError as refusal:
                self.limit(refusal)
                if "backward through the graph a second time" in str(refusal):  # of a node outside of I's
                    raise Refused from refusal
                raise
        self.spent += groups

    def limit(self, error):
        """An activation's gradient that somebody keeps and a product saves may be refused, once it was written."""
        written = "modified by an inplace operation" in str(error)
        if written and any(kept in self.program.forward for kept in LIMITS):
            raise Refused from error

    def planted(self, error):
        if not isinstance(error.__cause__ or error, Planted):
            raise error

    def run_whole(self):
        """Raises what an ordinary backward raises: then it is no program."""
        run = self.whole
        for k in run.microbatches:
            run.forward(k)
        if not any(out.requires_grad for outs in run.outputs for out in outs):
            raise RuntimeError("nothing requires a gradient")

    def back_whole(self):
        run = self.whole
        for k in self.split.order:
            before = [w.grad if w.grad is None else w.grad.clone() for w in run.stage.parameters()]
            run.full_backward(k)
            if k in self.dropped:
                for w, grad in zip(run.stage.parameters(), before, strict=True):
                    w.grad = grad

    # The verdict.

    def bits(self):
        """Whether each weight's sums are in the order of an ordinary backward's."""
        is_in_order = not self.program.policy.get("fused") and not set("/+") & set(self.program.passes)
        return is_in_order and not reenters(self.program.forward)

    def compare(self):
        split, whole = self.split, self.whole
        tolerance = EXACT
        if not self.bits():
            is_rounded = self.program.dtype == "float32" and "autocast" in self.program.forward
            tolerance = AUTOCAST if is_rounded else LOOSE.get(DTYPES[self.program.dtype])
        for (name, w), twin_of in zip(split.stage.named_parameters(), whole.stage.parameters(), strict=True):
            grad, main, expected, expected_main = w.grad, w.main_grad, twin_of.grad, twin_of.main_grad
            if self.program.policy.get("main_grad"):
                expected, expected_main = self.with_main_grad(w, twin_of)
            self.close(grad, expected, f"gradient of weight {name}", tolerance)
            if not self.has_other_effects():
                # What a Function adds itself it adds in I, and the oracle in the order of W.
                mains = LOOSE.get(w.dtype) if "AddsItself" in self.program.forward else tolerance
                self.close(main, expected_main, f"main_grad of weight {name}", mains)
            assert w._version == twin_of._version, f"version of {name}"
        for k in split.microbatches:
            compare_inputs(split, whole, k, {})
            for x, twin_of in zip(split.inputs[k], whole.inputs[k], strict=True):
                assert x._version == twin_of._version, f"version of an input of microbatch {k}"
        self.compare_records(tolerance)
        if not reenters(self.program.forward):  # its own backward is torch's
            assert_grads_own_memory(split)
        self.compare_alive()

    def has_other_effects(self):
        """A Function whose backward was dropped with its groups, or failed half-way and ran again, has done what it
        does beside its gradients never, or twice."""
        return bool(self.dropped or self.failed_weights) and ".apply(" in self.program.forward

    def with_main_grad(self, w, twin_of):
        before = torch.ones_like(w) if self.program.existing and w.requires_grad else None
        added = twin_of.main_grad if twin_of.grad is None else twin_of.main_grad + twin_of.grad
        return before, added

    def close(self, got, expected, what, tolerance):
        if tolerance is None:  # bfloat16, other orders of sums
            assert (got is None) == (expected is None), f"{what}: got {got}, expected {expected}"
        else:
            close(got, expected, what, **tolerance)

    def compare_records(self, tolerance):
        split, whole = (
            {key: value for key, value in run.stage.records.items() if key[1] not in self.dropped}
            for run in (self.split, self.whole)
        )
        if self.dropped and self.split.stage.together:
            return
        if self.has_other_effects():
            split, whole = (
                {key: value for key, value in records.items() if not key[0].startswith("backward")}
                for records in (split, whole)
            )
        calls, expected = (self.calls(records) for records in (split, whole))
        if self.failed_weights:  # the node that failed runs again, with its hooks
            assert all(calls[key] >= expected[key] for key in expected), f"calls of (hook, microbatch): {calls}"
        else:
            assert calls == expected, f"calls of (hook, microbatch): got {calls}, expected {expected}"
        # By another call, in another order, or again.
        if not (self.split.stage.together or reenters(self.program.forward) or self.failed_weights):
            for key, values in whole.items():
                self.close(split[key], values, f"what hook {key} received", tolerance)
        kept = self.split.stage.kept
        assert kept.keys() == self.whole.stage.kept.keys()
        for key, tensor in self.whole.stage.kept.items():
            if key[1] not in self.dropped and not self.failed_weights:  # what is retained twice is added
                self.close(kept[key].grad, tensor.grad, f"retained gradient {key}", tolerance)

    def keeps_itself(self):
        """Some of torch's own contexts keep what they saved for a backward that never comes."""
        return any(name in self.program.forward for name in ("keep_products", "save_on_cpu"))

    def calls(self, records):
        counts = collections.Counter()
        for (name, k), values in records.items():
            counts[name, "any" if self.split.stage.together else k] += len(values)
        return counts

    def forget(self):
        """Hooks refer to the stage, and what they hang on refers through autograd's graph to the stage's weights: cycles
        that Python's collector cannot see."""
        for run in (self.split, self.whole):
            run.outputs = run.output_grads = None
            run.stage.kept.clear()
            run.stage.born.clear()
            for handle in run.stage.on_weights:
                handle.remove()

    def compare_alive(self):
        """Nothing of a forward lives longer than under an ordinary backward, outputs kept or not. Of a microbatch that
        was dropped what the program keeps itself has a history that no backward has freed, as its outputs have."""
        if self.dropped:
            gc.collect()  # a checkpointed region that nobody computes again is a cycle
        for told in ("with its outputs", "without its outputs"):
            for k in self.split.microbatches:
                ours, theirs = (run.stage.born[k] for run in (self.split, self.whole))
                assert len(ours) == len(theirs)
                for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                    if k in self.dropped and (told == "with its outputs" or self.keeps_itself()):
                        continue  # what W would have read keeps its history
                    assert one.expired() or not other.expired(), f"result {i} of microbatch {k}'s forward lives, {told}"
            for run in (self.split, self.whole):
                run.outputs = run.output_grads = None
                run.stage.kept.clear()


def judge(program, passes=None):
    """Raises AssertionError where zbpipe differs; False where an ordinary backward itself fails, so that it is no program.

    passes: in the place of zbpipe's own.
    """
    judged = Judged(program, passes or Passes())
    try:
        return _is_right(judged)
    finally:
        judged.forget()


def _is_right(judged):
    program = judged.program
    try:
        judged.run_whole()
    except NO_PROGRAM:
        return False
    try:
        judged.run_split()
    except Refused:
        return True
    except NO_PROGRAM as error:
        said = str(error.__cause__)
        if reenters(program.forward) and ("asks for main_grad" in said or "leads to no input and to none" in said):
            return True
        if fails_whole(program):
            return False
        raise
    try:
        judged.back_whole()
    except NO_PROGRAM:
        return False
    judged.compare()
    return True


def fails_whole(program):
    trial = Judged(program, None)
    trial.split.order = list(trial.split.microbatches)
    try:
        trial.run_whole()
        trial.back_whole()
    except NO_PROGRAM:
        return True
    return False
