"""patch() puts zbpipe's functions in the place of torch.distributed.pipelining's own; unpatch() restores torch's.

Each patch logs a line on the logger `zbpipe`, at INFO, and one that names every place, at DEBUG. `TORCH_LOGS=zbpipe`
in the environment shows the first, `TORCH_LOGS=+zbpipe` both.

A function that other code holds outside of a module's namespace stays torch's, and goes on working. Such places are a
default argument, a `functools.partial`, the graph of a traced `Pipe`.

table.py lists all changes. Patch and unpatch between steps, not within one.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import threading
import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from zbpipe._formatting import argument
from zbpipe._patch import env, places, table
from zbpipe._policy import get_policy
from zbpipe._stage import state
from zbpipe._stage.before_2_15 import methods
from zbpipe._torch import needs, pipelining, probe

logger = logging.getLogger("zbpipe")

_lock = threading.RLock()
_places: list[places.Place] = []
_calls: list[_Call] = []
_said: set[str] = set()  # warnings, each given once


@dataclass(eq=False)
class _Call:
    """A call of patch() or unpatch() that is still in effect. The last one decides."""

    release_outputs: bool | None  # None: unpatched
    handle: weakref.ref[_Handle] | None = None
    is_block: bool = False

    def cannot_be_taken_back(self) -> bool:
        return not self.is_block and (self.handle is None or self.handle() is None)


def patch(release_outputs: bool | None = None) -> AbstractContextManager[None]:
    """Puts zbpipe's functions in the place of torch's, in torch and in modules that imported them by name.

    The patch lasts until :func:`unpatch`, or as ``with zbpipe.patch():`` until the end of the block. While torch is
    patched, another call changes only ``release_outputs``.

    Args:
        release_outputs: True frees a stage's outputs as soon as the next stage has them; the stage keeps a GradientEdge
            of each. Then nothing may read an output after the stage's forward. For all stages but the last,
            ``forward_one_chunk`` returns a list that is emptied when the outputs are sent. True and False take effect
            with the next forward. None changes nothing while torch is patched. Otherwise it means what
            ZBPIPE_RELEASE_OUTPUTS in the environment says, or False.

    Returns:
        A context manager. The end of its block restores the state before this call, and takes back calls of patch() and
        unpatch() within the block. Blocks may nest, and may overlap in several threads: the patch is the process's, and
        the last block to end restores. Without a block, drop the return value.

    Raises:
        TypeError: ``release_outputs`` is not True, False or None.
        RuntimeError: zbpipe does not know this torch: it is older than 2.11, built without torch.distributed, or its
            functions differ. Or ZBPIPE_RELEASE_OUTPUTS is neither on nor off. Nothing has been changed.

    Example::

        with zbpipe.patch():
            schedule.step(x)

    Source:
        Replaces ``torch.distributed.pipelining._backward``. ``release_outputs`` is Megatron-LM's
        ``deallocate_pipeline_outputs``; pytorch/pytorch 128910.
    """
    if release_outputs is not None and not isinstance(release_outputs, bool):
        raise TypeError(
            f"release_outputs is {argument(release_outputs)}; expected True, False, or None to leave it as it is"
        )
    _import()
    return _Handle(release_outputs)


def unpatch() -> None:
    """Restores torch's functions; changes nothing when torch is not patched.

    The next patch() does not take over ``release_outputs``. A schedule can still wait for works that it got under the
    patch. A tensor in flight stays until its send is done.

    A name that other code rebound meanwhile stays as it is, and a warning names it. A module of torch that imported
    zbpipe's functions meanwhile gets torch's; other modules keep zbpipe's.
    """
    with _lock:
        if state.in_force:
            _add(_Call(None))
            _restore()


def is_patched() -> bool:
    """Whether the patch is in effect.

    Returns:
        True or False, for the process.
    """
    return state.in_force


class _Handle(AbstractContextManager[None]):
    def __init__(self, release_outputs: bool | None) -> None:
        self._release_outputs = release_outputs
        with _lock:
            self._call = self._patch()

    def _patch(self) -> _Call:
        _rebind(self._release_outputs)
        return _add(_Call(state.release_outputs, weakref.ref(self)))

    def __enter__(self) -> None:
        with _lock:
            if self._call.is_block:
                raise RuntimeError("the block of this patch() has begun already: call patch() again for another.")
            # Since the call another thread's block may have ended, or unpatch() may have been called.
            if self._call not in _calls or not state.in_force:
                self._call = self._patch()
            self._call.is_block = True

    def __exit__(self, *error: object) -> None:
        with _lock:
            self._call.is_block = False
            begin = _calls.index(self._call)
            _calls[begin:] = [call for call in _calls[begin:] if call.is_block]
            release_outputs = _calls[-1].release_outputs if _calls else None
            if release_outputs is None:
                _restore()
            else:
                _rebind(release_outputs)


def _add(call: _Call) -> _Call:
    if len(_calls) > 1 and all(before.cannot_be_taken_back() for before in _calls[-2:]):
        del _calls[-2]  # no block returns to it
    _calls.append(call)
    return call


def _import() -> None:
    """Imports the modules of torch that patching needs. Raises RuntimeError if torch is too old, or has no pipelining.

    Called without the lock: a thread that waits for the lock may be in the middle of importing one of these modules.
    """
    release = probe.release_of(torch.__version__)
    if release is None or release < needs.OLDEST:
        raise RuntimeError(f"zbpipe cannot patch torch {torch.__version__}; install torch 2.11 or newer")
    if not torch.distributed.is_available():
        raise RuntimeError(f"torch {torch.__version__} was built without torch.distributed; install one that has it")
    try:
        for name in (pipelining.BACKWARD, *pipelining.IMPORTERS, pipelining.SCHEDULES):
            importlib.import_module(name)
    except ImportError as error:
        raise RuntimeError(f"torch {torch.__version__} has no module {error.name}; {probe.ADVICE}.") from error


def _rebind(release_outputs: bool | None) -> None:
    """patch()'s work, with the lock held."""
    if state.in_force:
        if release_outputs is not None and release_outputs != state.release_outputs:
            state.release_outputs = release_outputs
            logger.info("release_outputs is %s from now on", release_outputs)
        return
    if release_outputs is None:
        release_outputs = env.release_outputs()
    originals, schedules = _originals(), pipelining.schedules_module()
    _refuse_unknown()
    _places[:] = [*table.functions(originals, schedules), *table.wraps(schedules)]
    state.release_outputs = release_outputs
    for place in _places:
        place.replace()
    state.in_force = True
    _warn_of_strangers()
    _warn_of_unknown()
    effect = ", which changes nothing: this torch does so itself" if pipelining.releases_by_itself() else ""
    logger.info("patched torch at %d places; release_outputs is %s%s", len(_places), release_outputs, effect)
    logger.debug("patched %s", ", ".join(map(str, _places)))


def _restore() -> None:
    """unpatch()'s work, with the lock held."""
    if not state.in_force:
        return
    restored, rebound = places.restore(_places)
    if places.is_in_step():
        logger.warning(
            "unpatched within a step, which goes on with torch's functions and may fail; unpatch between steps"
        )
    _places.clear()
    state.in_force = False
    methods.restore()
    logger.info("unpatched torch at %d places", len(restored))
    logger.debug("unpatched %s", ", ".join(map(str, restored)))
    if rebound:
        logger.warning(
            "not restored: %s; other code has rebound them since patch(), and must put torch's functions back itself",
            ", ".join(map(str, rebound)),
        )


def _originals() -> dict[str, places.Function]:
    """torch's functions by name. Raises RuntimeError with all differences from the functions that zbpipe knows."""
    differences = probe.differences("passes")
    for value in vars(pipelining.stage_module()).values():
        is_theirs = inspect.isfunction(value) and value.__module__ == pipelining.BACKWARD
        if is_theirs and value.__name__ not in pipelining.REPLACED:
            differences.append(f"{pipelining.STAGE} uses {value.__name__}, which zbpipe does not know")
    if differences:
        raise RuntimeError(
            f"zbpipe cannot patch this torch, whose {pipelining.BACKWARD} it does not know: {'; '.join(differences)}; "
            f"{probe.ADVICE}."
        )
    theirs = vars(importlib.import_module(pipelining.BACKWARD))
    return {name: theirs[name] for name in pipelining.REPLACED if name in theirs}


def _refuse_unknown() -> None:
    """Refuses a torch with which gradients would be wrong. Raises RuntimeError."""
    for need in ("stages", "the scale of main_grad") if get_policy().main_grad else ("stages",):
        if refusal := probe.refusal(need):
            raise RuntimeError(f"zbpipe cannot patch torch {torch.__version__}, with which {refusal}; {probe.ADVICE}.")


def _warn_of_unknown() -> None:
    """Warns, once, of all that is not patched in this torch, and of a torch newer than those that were tested."""
    said = []
    release = probe.release_of(torch.__version__)
    if release is not None and release > needs.NEWEST:
        newest = ".".join(map(str, needs.NEWEST))
        said.append(f"torch {torch.__version__} is newer than {newest}, the newest that zbpipe has been tested with")
    for need in needs.NEEDS:
        if need.weight in (needs.Weight.SOME_NUMBERS, needs.Weight.MEMORY) and (refusal := probe.refusal(need.name)):
            said.append(f"not all of torch {torch.__version__} is patched: {refusal} ({need.weight.value})")
    for sentence in said:
        if sentence not in _said:
            _said.add(sentence)
            logger.warning("%s", sentence)


def _warn_of_strangers() -> None:
    """Warns of names in torch's pipelining modules that other code rebound before: the patch leaves them alone."""
    ours = {id(place.replacement) for place in _places}
    strangers = [
        f"{module.__name__}.{name}"
        for module in map(importlib.import_module, pipelining.IMPORTERS)
        for name in pipelining.REPLACED
        if name in vars(module) and id(vars(module)[name]) not in ours
    ]
    if strangers:
        logger.warning(
            "not patched: %s; other code has rebound them, and its functions run there; patch before that code does",
            ", ".join(strangers),
        )
