"""``zbpipe.compile``: torch.compile with a backward in two halves, one for I and one for W.

An import of this package imports no compiler: the first graph loads the rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zbpipe._formatting import argument

INNER = ("inductor", "aot_eager")


@dataclass(frozen=True)
class Backend:
    """A backend for ``torch.compile``. Equal backends share compiled code."""

    inner: str = "inductor"
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.inner not in INNER:
            raise ValueError(f"backend is {argument(self.inner)}; expected one of {', '.join(map(repr, INNER))}")
        if not isinstance(self.recompute, bool):
            raise TypeError(f"recompute is {argument(self.recompute)}; expected True or False")

    @property
    def __name__(self) -> str:
        return "zbpipe"

    def __call__(
        self,
        graph: torch.fx.GraphModule,
        inputs: list[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        from zbpipe._compile.backend import compile_graph

        return compile_graph(graph, inputs, self.inner, self.recompute, mode, _checked(options))


def _checked(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options is {argument(options)}; expected a dictionary, as torch.compile takes it")
    return dict(options or {})


def compile_backend(
    graph: torch.fx.GraphModule,
    inputs: list[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The entry point of ``torch.compile(backend="zbpipe")``. ``options`` may have ``backend`` and ``recompute``."""
    rest = _checked(options)
    backend = Backend(rest.pop("backend", "inductor"), rest.pop("recompute", False))
    return backend(graph, inputs, mode=mode, options=rest)


def compile(
    model: Callable[..., Any] | None = None,
    *,
    backend: str = "inductor",
    recompute: bool = False,
    **options: Any,
) -> Any:
    """``torch.compile``, with a backward that zbpipe's passes can split.

    In an input pass (I) the compiled backward computes the stage inputs' gradients, and leaves the products of weights'
    gradients to the weight pass (W). Elsewhere it is the backward that ``torch.compile`` makes. A graph that cannot be
    split runs whole in I, and a warning on the logger ``zbpipe`` says why. The policy (:func:`zbpipe.policy`) decides
    as in eager code. With ``defer="matrices"`` a vector's gradient waits for W only where that holds no more memory.
    With ``defer="all"`` W computes all gradients that I does not compute on its way. Inductor's views of a stage input
    count no changes of it: W does not notice one, nor does ``torch.compile``'s backward. Leave inputs as they are.

    Args:
        model: a module or a function; None returns a decorator.
        backend: the compiler of the halves: "inductor", or "aot_eager", which runs the graphs as they are.
        recompute: True lets W compute cheap operations (elementwise, reductions, casts) once more where that holds
            fewer bytes between I and W.
        options: as for ``torch.compile``: ``fullgraph``, ``dynamic``, ``mode``, ``options``, ``disable``.

    Returns:
        As ``torch.compile``: a module for a module, a function for a function.

    Raises:
        ValueError, TypeError: ``backend`` or ``recompute`` has none of these values.

    Example::

        stage = zbpipe.compile(stage)

    Source:
        ``torch.compile``. The cut is a minimum cut as in AOTAutograd's ``min_cut_rematerialization_partition``.
        Zero-bubble schedules and compiled stages: pytorch/pytorch 161904, 143599, PR 162511; pytorch/torchtitan 2727.
    """
    return torch.compile(model, backend=Backend(backend, recompute), **options)
