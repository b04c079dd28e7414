"""Whether what zbpipe takes on trust of this torch's graphs holds: looked at once in a process, before its first I.

Note [What is checked]

What a release of torch could change without a word: how it computes a gradient, the getters by which a node's saved
tensors are seen, and what torch's checkpoint has closed over. (A renamed class or member does not compile.) Split nodes
of a type that disagrees run whole in I. Layouts that disagree are no plain steps, and the engine runs them in W. If
saved tensors are not seen, I refuses. If regions are not found, I refuses checkpoint="recompute".

A check computes on a thread of its own, where no mode, autocast, hook or profiler of the caller's is in force. What it
finds depends on torch alone, so all ranks find the same. If it fails, nothing is decided, and the next I tries again:
three times in all.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable

import torch

from zbpipe import _C
from zbpipe._policy import Policy
from zbpipe._stage import formulas
from zbpipe._tasks import tasks_of
from zbpipe._torch import autograd, checkpoint, probe

_ATTEMPTS = 3

_found: dict[Callable[[], str], str] = {}  # what the checks that were made say: "" where all is as expected
_failures = 0
_unsaid: list[str] = []
_said: dict[str, None] = {}


def require(policy: Policy) -> None:
    """Before an I. Raises RuntimeError for a torch whose graphs zbpipe cannot read."""
    if unseen := look():
        raise RuntimeError(f"zbpipe cannot split a backward with torch {torch.__version__}: {unseen}; {probe.ADVICE}")
    if policy.checkpoint == "recompute" and (lost := look_at_regions()):
        raise RuntimeError(
            f'policy(checkpoint="recompute") cannot be used with torch {torch.__version__}: {lost}; use '
            'checkpoint="keep" or checkpoint="input_pass"'
        )


def look() -> str:
    """Tries formulas and getters, once in a process. A clause that says which saved tensors are not seen, or ""."""
    return _once(_formulas_and_getters)


def look_at_regions() -> str:
    """Likewise, what of a checkpointed region is not seen. "" in a process that has checkpointed nothing."""
    return _once(_unseen_region) if "torch._dynamo" in sys.modules else ""  # torch's checkpoint imports that module


def report() -> list[str]:
    """All that the checks say of this torch, as sentences."""
    refused = [_once(check) for check in (_formulas_and_getters, _unseen_region)]
    return [*_said, *filter(None, refused)]


def _once(check: Callable[[], str]) -> str:
    if check not in _found and _failures < _ATTEMPTS:
        # No daemon, also of one: the interpreter waits for it before it ends.
        thread = threading.Thread(target=_run, args=(check,), name="zbpipe self-check", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:  # there can be no further thread
            if "shutdown" not in str(error):
                _fail(error)
        else:
            thread.join()
    if _unsaid:
        _say()
    return _found.get(check, "")


def _say() -> None:
    """On the caller's thread, since a handler may want a lock that the caller has."""
    with contextlib.suppress(IndexError):  # another thread says it
        while _unsaid:
            sentence = _unsaid.pop(0)
            if sentence not in _said:
                _said[sentence] = None
                with contextlib.suppress(Exception):  # of a logger's filters
                    logging.getLogger("zbpipe").warning("%s", sentence)


def _fail(error: BaseException) -> None:
    global _failures
    _failures += 1
    _unsaid.append(f"what zbpipe takes on trust of this torch could not be checked, attempt {_failures}: {error!r}")


def _run(check: Callable[[], str]) -> None:
    try:
        autograd.be_unseen()
        _found[check] = check()
    except BaseException as error:  # nobody else sees it
        _fail(error)


def _formulas_and_getters() -> str:
    for node_type, how in formulas.disagreeing().items():
        _C.distrust(node_type)
        instead = "its nodes run whole in I" if node_type in formulas.SAVED else "autograd's engine runs its nodes in W"
        _unsaid.append(f"{node_type} of torch {torch.__version__} {how}; {instead}; {probe.ADVICE}")
    x, v, w = (torch.ones(2, 2, dtype=torch.float64, device="cpu", requires_grad=True) for _ in range(3))
    groups = formulas.split([x.mm(v * w)], [torch.ones_like(x)], [x], [v, w])
    # The node between W's product and its weights has saved both of these.
    seen = sum(len(task[5]) for group in groups for task in tasks_of(group) if task[1] == "outside")
    _C.weight_pass(groups, False, Policy())
    return "" if seen == 2 else f"{seen} of the 2 tensors that a MulBackward0 has saved are seen"


def _unseen_region() -> str:
    """By what is packed under torch's checkpoint."""
    x = torch.ones(2, dtype=torch.float64, device="cpu", requires_grad=True)
    held = x.detach() + 1
    y = torch.utils.checkpoint.checkpoint(lambda t: t * held, x, use_reentrant=False, preserve_rng_state=False)
    hooks = [saved.unpack_hook for _, saved in autograd.saved_by(y.grad_fn)]
    hook = next(filter(checkpoint.is_unpack_hook, hooks), None)
    if hook is None:
        return "what torch.utils.checkpoint has packed shows no region"
    read = checkpoint.read_again(hook)
    if read is None:
        return ""  # I unpacks it
    wanted = {"its arguments": x, "what its function has closed over": held}
    there = autograd.by_memory(read)
    lost = [what for what, tensor in wanted.items() if autograd.memory_of(tensor) not in there]
    return f"of a checkpointed region {' and '.join(lost)} cannot be seen" if lost else ""
