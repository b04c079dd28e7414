"""Puts zbpipe's functions in the place of torch.distributed.pipelining's own, and takes them out again.

Each patching logs one line, at INFO on the logger `zbpipe`, that names every place; `TORCH_LOGS=+zbpipe` in the
environment shows it, as does `logging.getLogger("zbpipe").setLevel(logging.INFO)` beside a handler.

What was captured elsewhere than in a module's namespace before patching (a default argument, a `functools.partial`,
the graph of a traced `Pipe`) keeps torch's function, which goes on working.

Patching also makes pipeline stages and schedules let go of what nothing needs, see zbpipe/_stage/backward.py and
before_2_15/, makes data parallel stages reduce when all gradients are there, see zbpipe/_stage/data_parallel.py, and
makes zero-bubble schedules take compiled stages, which they refuse because torch's functions cannot split them. All
that is changed is one table, table.py. Patch and unpatch between steps, not within one.

For scripts that nobody wants to edit there is `ZBPIPE_PATCH=1` in the environment: a hook that is installed beside
zbpipe patches as soon as the script, or a process that it starts, imports torch.distributed.pipelining.
`ZBPIPE_RELEASE_OUTPUTS=1` beside it is patch(release_outputs=True).
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch

from zbpipe._formatting import argument
from zbpipe._patch import env, places, table
from zbpipe._policy import get_policy
from zbpipe._stage import data_parallel, scale, state
from zbpipe._stage.before_2_15 import methods
from zbpipe._torch import needs, pipelining, probe

logger = logging.getLogger("zbpipe")


class _State:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.places: list[places.Place] = []
        self.calls: list[_Call] = []
        self.said: set[str] = set()  # warnings, which are not repeated


_state = _State()


@dataclass(eq=False)
class _Call:
    """A call of patch() or unpatch() that nothing has taken back. The last one holds."""

    release_outputs: bool | None  # None: unpatched
    handle: weakref.ref[_Handle] | None = None
    is_block: bool = False

    def cannot_be_taken_back(self) -> bool:
        return not self.is_block and (self.handle is None or self.handle() is None)


def patch(release_outputs: bool | None = None) -> AbstractContextManager[None]:
    """Rebind every place in torch, and in modules that imported from it by name, to zbpipe's functions.

    It holds until :func:`unpatch`, or as ``with zbpipe.patch():`` for the length of the block. When torch is patched
    already, only `release_outputs` is looked at.

    Args:
        release_outputs: whether the memory of a stage's outputs goes as soon as the next stage has them; the stage
            keeps their place in the graph, a GradientEdge. Then nothing may look at an output after the stage's
            forward, and `forward_one_chunk` returns, for stages that are not the last, a list that is emptied when
            the outputs are sent. True and False hold from the next forward on, whatever was said before. None
            leaves it as it is while torch is patched; when it is not, None is what ZBPIPE_RELEASE_OUTPUTS in the
            environment says at that moment, or False. unpatch() forgets what was said.

    Returns:
        A context manager, whose block ends with how things were before this call. What was patched or unpatched within
        the block is taken back, too. Blocks may nest, and may overlap in several threads: patching is for the process,
        and the last block to end restores. Without a block the return value can be dropped.

    Raises:
        TypeError: `release_outputs` is something else.
        RuntimeError: this torch is not one that zbpipe knows (older than 2.11, built without torch.distributed, or with
            functions that are missing, new, or take other parameters), or ZBPIPE_RELEASE_OUTPUTS has a value that it
            cannot have; nothing has been changed.

    Source:
        What takes the place of ``torch.distributed.pipelining._backward``. ``release_outputs`` is Megatron-LM's
        ``deallocate_pipeline_outputs``; pytorch/pytorch 128910.
    """
    if release_outputs is not None and not isinstance(release_outputs, bool):
        raise TypeError(
            f"release_outputs is {argument(release_outputs)}: give True, False, or None to leave it as it is."
        )
    return _Handle(_import(), release_outputs)


def unpatch() -> None:
    """Restore what patch() replaced; do nothing when torch is not patched.

    It forgets what was said of `release_outputs`: the next patch() begins anew. Works that schedules were given while
    torch was patched can still be waited for; a tensor whose send is not done yet stays until it is.

    A place that somebody else rebound meanwhile is left as it is and named in a warning. A module of torch that took
    zbpipe's functions over while they were in place gets torch's; other modules keep what they imported. Raises
    nothing: what is not in order is logged.
    """
    with _state.lock:
        if state.in_force:
            _add(_Call(None))
            _restore()


def is_patched() -> bool:
    """Tell whether patch() is in force.

    Returns:
        True or False, for the process.
    """
    return state.in_force


class _Handle(AbstractContextManager[None]):
    def __init__(self, modules: _Modules, release_outputs: bool | None) -> None:
        self._modules = modules
        self._release_outputs = release_outputs
        with _state.lock:
            self._call = self._patch()

    def _patch(self) -> _Call:
        _rebind(self._modules, self._release_outputs)
        return _add(_Call(state.release_outputs, weakref.ref(self)))

    def __enter__(self) -> None:
        with _state.lock:
            if self._call.is_block:
                raise RuntimeError("the block of this patch() has begun already: call patch() again for another.")
            # Between the call and its block another thread's block may have ended, or somebody unpatched.
            if self._call not in _state.calls or not state.in_force:
                self._call = self._patch()
            self._call.is_block = True

    def __exit__(self, *error: object) -> None:
        with _state.lock:
            self._call.is_block = False
            begin = _state.calls.index(self._call)
            _state.calls[begin:] = [call for call in _state.calls[begin:] if call.is_block]
            release_outputs = _state.calls[-1].release_outputs if _state.calls else None
            if release_outputs is None:
                _restore()
            else:
                _rebind(self._modules, release_outputs)


def _add(call: _Call) -> _Call:
    calls = _state.calls
    if len(calls) > 1 and calls[-1].cannot_be_taken_back() and calls[-2].cannot_be_taken_back():
        del calls[-2]  # nobody goes back to it
    calls.append(call)
    return call


class _Modules(NamedTuple):
    backward: ModuleType
    importers: list[ModuleType]
    schedules: ModuleType


def _import() -> _Modules:
    """Return the modules of torch that patching needs.

    Nobody may hold the lock here: who waits for it may be in the middle of importing one of these modules.
    Raises RuntimeError if this torch is too old, or has no pipelining.
    """
    release = probe.release_of(torch.__version__)
    if release is None or release < needs.OLDEST:
        raise RuntimeError(f"zbpipe cannot patch torch {torch.__version__}: it needs torch 2.11 or newer.")
    if not torch.distributed.is_available():
        raise RuntimeError(f"zbpipe cannot patch torch {torch.__version__}: it was built without torch.distributed.")
    try:
        backward = importlib.import_module(pipelining.BACKWARD)
        importers = [importlib.import_module(name) for name in pipelining.IMPORTERS]
        schedules = pipelining.schedules_module()
    except ImportError as error:
        raise RuntimeError(f"zbpipe cannot patch torch {torch.__version__}: it has no module {error.name}.") from error
    return _Modules(backward, importers, schedules)


def _rebind(modules: _Modules, release_outputs: bool | None) -> None:
    """Do patch()'s work, with the lock held."""
    if state.in_force:
        if release_outputs is not None and release_outputs != state.release_outputs:
            state.release_outputs = release_outputs
            logger.info("release_outputs is %s from now on", release_outputs)
        return
    if release_outputs is None:
        release_outputs = env.release_outputs()
    originals = _originals(modules)
    _refuse_unknown()
    _state.places = [*table.functions(originals, modules.schedules), *table.wraps(modules.schedules)]
    data_parallel.look()
    if refusal := probe.refusal("the scale of main_grad"):
        scale.refusal = (
            f"policy(main_grad=True) cannot be used while torch {torch.__version__} is patched: with it {refusal}; "
            f"{_ADVICE}"
        )
    state.release_outputs = release_outputs
    for place in _state.places:
        place.replace()
    state.in_force = True
    _warn_of_strangers(modules)
    _warn_of_unknown()
    names = ", ".join(map(str, _state.places))
    effect = ", which changes nothing: this torch does so itself" if pipelining.releases_by_itself() else ""
    logger.info("patched %s; release_outputs is %s%s", names, release_outputs, effect)


def _restore() -> None:
    """Do unpatch()'s work, with the lock held."""
    if not state.in_force:
        return
    restored, rebound = places.restore(_state.places)
    if places.is_in_step():
        logger.warning(
            "unpatched within a step, which goes on with torch's functions and may fail; unpatch between steps"
        )
    _state.places = []
    state.in_force = False
    scale.refusal = None
    data_parallel.forget()
    methods.restore()
    logger.info("unpatched %s", ", ".join(map(str, restored)))
    if rebound:
        logger.warning("not restored, because rebound since patching: %s", ", ".join(map(str, rebound)))


def _originals(modules: _Modules) -> dict[str, places.Function]:
    """Return torch's functions by name.

    Raises RuntimeError that lists every difference between this torch's functions and those that zbpipe knows.
    """
    differences = probe.differences("passes")
    for value in vars(pipelining.stage_module()).values():
        is_theirs = inspect.isfunction(value) and value.__module__ == pipelining.BACKWARD
        if is_theirs and value.__name__ not in pipelining.REPLACED:
            differences.append(f"{pipelining.STAGE} uses {value.__name__}, which zbpipe does not know")
    if differences:
        raise RuntimeError(
            f"zbpipe cannot patch this torch, whose {pipelining.BACKWARD} it does not know: {'; '.join(differences)}; "
            f"{_ADVICE}"
        )
    return {name: vars(modules.backward)[name] for name in pipelining.REPLACED if name in vars(modules.backward)}


_ADVICE = "use a torch that zbpipe knows, or a newer zbpipe."


def _refuse_unknown() -> None:
    """Raises RuntimeError where numbers would depend on what this torch has not, or has otherwise."""
    wanted = ["stages"]
    if get_policy().main_grad:
        wanted.append("the scale of main_grad")
    for need in wanted:
        if refusal := probe.refusal(need):
            raise RuntimeError(f"zbpipe cannot patch torch {torch.__version__}, with which {refusal}; {_ADVICE}")


def _warn_of_unknown() -> None:
    """Say once of what is not done with this torch, and of one that is newer than those that zbpipe was tested with."""
    said = []
    release = probe.release_of(torch.__version__)
    if release is not None and release > needs.NEWEST:
        newest = ".".join(map(str, needs.NEWEST))
        said.append(f"torch {torch.__version__} is newer than {newest}, the newest that zbpipe has been tested with")
    for need in needs.NEEDS:
        if need.weight in (needs.Weight.SOME_NUMBERS, needs.Weight.MEMORY) and (refusal := probe.refusal(need.name)):
            said.append(f"not all is patched, with torch {torch.__version__} {refusal} ({need.weight.value})")
    for sentence in said:
        if sentence not in _state.said:
            _state.said.add(sentence)
            logger.warning("%s", sentence)


def _warn_of_strangers(modules: _Modules) -> None:
    """Warn of names in torch's pipelining modules that somebody else rebound before us, and that we leave alone."""
    ours = {id(place.replacement) for place in _state.places}
    strangers = [
        f"{module.__name__}.{name}"
        for module in modules.importers
        for name in pipelining.REPLACED
        if name in vars(module) and id(vars(module)[name]) not in ours
    ]
    if strangers:
        logger.warning("not patched, because rebound by somebody else: %s", ", ".join(strangers))
