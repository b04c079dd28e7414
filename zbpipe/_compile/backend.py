"""One compiled graph of dynamo: a forward as torch compiles it, and a backward that can run in halves."""

import contextlib
import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from zbpipe import _C
from zbpipe._compile.cut import CannotSplitError
from zbpipe._compile.split import Halves, split
from zbpipe._torch import compiler
from zbpipe._torch.autograd import by_memory, memory_of, without_autocast
from zbpipe._torch.compiler import CompileContext, TracingContext, compile_context, tracing
from zbpipe._torch.dispatch import is_traceable_wrapper_subclass

logger = logging.getLogger("zbpipe")

Values = list[Any]
Compiled = Callable[[Values], Sequence[Any]]  # takes its arguments out of the list
CompilePiece = Callable[[fx.GraphModule, Sequence[Any], Sequence[int]], Compiled]
MakeBackward = Callable[[fx.GraphModule, Sequence[Any], CompilePiece], Compiled]


def compile_graph(
    graph: fx.GraphModule,
    inputs: list[Any],
    inner: str,
    recompute: bool,
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """Compiles a graph of dynamo with `inner`, and raises its errors."""
    subclasses = sorted({type(value).__name__ for value in inputs if is_traceable_wrapper_subclass(value)})
    make_backward = functools.partial(_Backward, recompute=recompute, subclasses=subclasses)
    if inner == "aot_eager":
        if mode not in (None, "default") or options:
            raise ValueError(f"mode is {mode!r} and options are {options!r}; aot_eager takes neither, leave them out")
        return _with_aot_eager(graph, inputs, make_backward)
    return _with_inductor(graph, inputs, make_backward, compiler.options_of(mode, options))


def _with_aot_eager(graph: fx.GraphModule, inputs: list[Any], make_backward: MakeBackward) -> Callable[..., Any]:
    def compile_piece(piece: fx.GraphModule, values: Sequence[Any], _: Sequence[int]) -> Compiled:
        return cast(Compiled, compiler.run_as_traced(piece, values))

    def compile_backward(backward: fx.GraphModule, values: Sequence[Any]) -> Compiled:
        return make_backward(backward, values, compile_piece)

    return cast(Callable[..., Any], compiler.compile_with_aot_eager(graph, inputs, compile_backward))


def _with_inductor(
    graph: fx.GraphModule, inputs: list[Any], make_backward: MakeBackward, patches: dict[str, Any]
) -> Callable[..., Any]:
    from zbpipe._torch import inductor

    def compile_any(graph: fx.GraphModule, values: Sequence[Any], **given: Any) -> Any:
        if not given.get("is_backward"):
            return inductor.compile_fx_inner(graph, values, **given)
        if given.get("cudagraphs") and any(isinstance(v, torch.Tensor) and v.is_cuda for v in values):
            _log_not_split(
                "CUDA graphs would overwrite what is kept for W; compile without them, as with "
                "mode='max-autotune-no-cudagraphs'"
            )
            return inductor.compile_fx_inner(graph, values, **given)
        fixed = set(given.get("static_input_idxs", ()))

        def compile_piece(piece: fx.GraphModule, values: Sequence[Any], origins: Sequence[int]) -> Compiled:
            now = {
                **given,
                "static_input_idxs": [i for i, origin in enumerate(origins) if origin in fixed],
                "cudagraphs": inductor.BoxedBool(False),
            }
            with inductor.config.patch(patches):
                return cast(Compiled, inductor.compile_fx_inner(piece, values, **now))

        return make_backward(graph, values, compile_piece)

    return cast(Callable[..., Any], inductor.compile_graph(graph, inputs, compile_any, patches))


def _log_not_split(reason: str) -> None:
    words = "the compiled graph [%s] is not split: %s; its weights' gradients are computed in I"
    logger.warning(words, CompileContext.current_compile_id(), reason)


@dataclass(frozen=True)
class _Pieces:
    halves: Halves
    input_half: Compiled
    weight_half: Compiled


def _waits(positions: tuple[int, ...] | None) -> bool:
    """Whether the gradients at these positions would be left to W here. None stands for all of them."""
    return _C.defer(None, positions, ())


def _run_weight_half(compiled: Compiled, *values: Any) -> Sequence[Any]:
    """What W calls, with the values that I kept."""
    with without_autocast():
        return compiled(list(values))


class _Backward:
    """A traced backward, which several threads may run: compiled whole, or in halves, when it is needed so."""

    def __init__(
        self,
        graph: fx.GraphModule,
        values: Sequence[Any],
        compile_piece: CompilePiece,
        recompute: bool,
        subclasses: list[str],
    ) -> None:
        self._graph = graph
        self._values = list(values)
        self._compile_piece = compile_piece
        self._recompute = recompute
        self._subclasses = subclasses  # of tensor, among the inputs of the compiled code
        self._tracing = TracingContext.get()
        self._compiling = CompileContext.try_get()
        self._metadata: Any = self._tracing.fw_metadata
        self._parameters = _parameters(graph, self._metadata)
        self._lock = threading.RLock()
        self._whole: Compiled | None = None
        self._pieces: dict[tuple[frozenset[int], bool], _Pieces | None] = {}
        self._is_logged = False
        self._fits_all = True  # no half needed a new guard
        self._matrices, self._vectors = _by_dimension(graph)
        compiler.mark_boxed(self)
        if any(isinstance(value, torch.SymInt) for value in values):
            self._compile_whole()  # as torch does: the forward must not be used before the guards on sizes are known

    def __call__(self, values: Values) -> Sequence[Any]:
        pieces = self._halves() if _waits(None) else None
        if pieces is None:
            return (self._whole or self._compile_whole())(values)
        halves = pieces.halves
        taken = [values[i] for i in halves.input_inputs]
        for_w = [_for_w(values[i], i in self._parameters) for i in halves.weight_inputs]
        values.clear()
        results = list(pieces.input_half(taken))
        count = len(halves.input_outputs)
        for_w += results[count:]
        kept = by_memory(one for one in for_w if isinstance(one, torch.Tensor))
        work = functools.partial(_run_weight_half, pieces.weight_half)  # which holds no tensor
        at_once = _C.defer(work, tuple(halves.weight_outputs), tuple(for_w))
        gradients: list[Any] = [None] * halves.output_count
        # The cut may have left vectors alone to W, and by default these do not wait.
        for i, gradient in zip(halves.weight_outputs, at_once, strict=True):
            gradients[i] = gradient
        for i, gradient in zip(halves.input_outputs, results[:count], strict=True):
            gradients[i] = _tied(gradient, kept)
        return gradients

    def _deferrable(self) -> tuple[frozenset[int], bool]:
        """Positions of the gradients that may wait for W, and whether vectors may wait by themselves. Called in I."""
        heavy = [i for i in self._matrices if _waits((i,))]
        light = [i for i in self._vectors if _waits((i, *heavy[:1]))]
        return frozenset(heavy + light), any(_waits((i,)) for i in light[:1])

    def _halves(self) -> _Pieces | None:
        """The halves for the gradients that may wait in the running I; None if the graph cannot be split so."""
        key = None
        with self._lock:
            try:
                self._check_results()
                key = self._deferrable()
                if key not in self._pieces:
                    self._pieces[key] = self._compile_halves(*key)
                return self._pieces[key]
            except CannotSplitError as error:
                self._log(str(error))
            except Exception as error:  # a compiler may fail on a half, and not on the whole
                self._log(f"its halves do not compile ({type(error).__name__}: {error})")
            if key is not None:  # not after Ctrl-C, which says nothing of the graph
                self._pieces[key] = None
            return None

    def _check_results(self) -> None:
        """Raises CannotSplitError unless the graph's results are the gradients of the node's inputs, one each."""
        if self._subclasses:
            raise CannotSplitError(f"it takes tensors of the subclass {', '.join(self._subclasses)}")
        if self._metadata.is_rng_op_functionalized:
            raise CannotSplitError("its random numbers are functionalised")
        results = _results(self._graph).args[0]
        if not isinstance(results, (list, tuple)) or len(results) != len(self._metadata.input_info):
            raise CannotSplitError("its backward does not return one gradient per input")

    def _log(self, reason: str) -> None:
        if not self._is_logged:
            self._is_logged = True
            with compile_context(self._compiling):
                _log_not_split(reason)

    def _compile_whole(self) -> Compiled:
        with self._lock:
            if self._whole is None:
                with self._as_when_traced():
                    self._whole = self._compile_piece(_copy(self._graph), self._values, range(len(self._values)))
            return self._whole

    def _compile_halves(self, deferred: frozenset[int], everything: bool) -> _Pieces:
        halves = split(self._graph, deferred, everything=everything, recompute=self._recompute)
        _set_visible(self._graph, halves)
        with self._as_when_traced(donations=False), self._no_guards():
            with TracingContext.report_output_strides() as strides:
                input_half = self._compile_piece(
                    halves.input_half, [self._values[i] for i in halves.input_inputs], halves.input_inputs
                )
            kept = _kept_values(halves, strides)
            weight_half = self._compile_piece(
                halves.weight_half, [*(self._values[i] for i in halves.weight_inputs), *kept], halves.weight_inputs
            )
        return _Pieces(halves, input_half, weight_half)

    @contextlib.contextmanager
    def _as_when_traced(self, donations: bool = True) -> Iterator[None]:
        """The context in which AOTAutograd compiles a backward.

        donations: inductor may overwrite the inputs that AOTAutograd has listed. Not for the halves: the list numbers
        the whole's inputs, and W needs some of these after I.
        """
        with tracing(self._tracing), compile_context(self._compiling), without_autocast(), torch.no_grad():
            metadata = self._metadata
            # DDP's optimizer lets several graphs share one tracing context.
            metadata_before, self._tracing.fw_metadata = self._tracing.fw_metadata, metadata
            donated = metadata.bw_donated_idxs
            metadata.bw_donated_idxs = donated if donations else []
            try:
                yield
            finally:
                metadata.bw_donated_idxs = donated
                self._tracing.fw_metadata = metadata_before

    @contextlib.contextmanager
    def _no_guards(self) -> Iterator[None]:
        """Refuses halves that need new guards on sizes: the forward is compiled, and runs for all its sizes."""
        mode: Any = self._tracing.fake_mode
        shapes = mode.shape_env
        before = len(shapes.guards), len(shapes.replacements)
        if self._fits_all:  # else what was learnt is known to all halves
            yield
            self._fits_all = (len(shapes.guards), len(shapes.replacements)) == before
        if not self._fits_all:
            raise CannotSplitError("its halves would fit these sizes alone, and the forward fits others, too")


def _parameters(graph: fx.GraphModule, metadata: Any) -> frozenset[int]:
    """Which inputs of the backward are parameters or buffers, by position."""
    static = {f"primals_{i + 1}" for i in metadata.static_input_indices}
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    return frozenset(i for i, name in enumerate(names) if name in static)


def _for_w(value: Any, is_parameter: bool) -> Any:
    """A tensor without gradient and history, for W; a copy of a parameter, which may be freed before W."""
    if not isinstance(value, torch.Tensor):
        return value
    if is_parameter:
        return value.detach().clone()
    return value.detach() if value.requires_grad else value


def _tied(gradient: Any, kept: dict[int, list[torch.Tensor]]) -> Any:
    """A gradient as a view of what is kept for W, if it has memory of that: a compiler's views have version counters of
    their own, and W must learn of what an in-place hook does to it."""
    if not isinstance(gradient, torch.Tensor):
        return gradient
    behind = kept.get(memory_of(gradient) or 0, [])
    if not behind or any(one is gradient for one in behind):
        return gradient
    same = next((one for one in behind if _reading(one) == _reading(gradient)), None)
    if same is None:
        return gradient.clone()
    return same.as_strided(gradient.size(), gradient.stride(), gradient.storage_offset())


def _reading(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """How the bytes of its memory are read."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _by_dimension(graph: fx.GraphModule) -> tuple[list[int], list[int]]:
    """Positions of the backward's gradients: of matrices (and more dimensions); of vectors and scalars."""
    results = _results(graph).args[0]
    dimensions = {
        i: result.meta["val"].dim() if isinstance(result.meta.get("val"), torch.Tensor) else 0
        for i, result in enumerate(results if isinstance(results, (list, tuple)) else ())
        if isinstance(result, fx.Node)
    }
    return [i for i, d in dimensions.items() if d > 1], [i for i, d in dimensions.items() if d <= 1]


def _results(graph: fx.GraphModule) -> Any:
    return graph.graph.output_node()


def _kept_values(halves: Halves, strides: Sequence[tuple[int, ...] | None] | None) -> list[Any]:
    """Examples of the values that the input half keeps. `strides`: of its results, if its compiler reports them."""
    values = [node.meta["val"] for node in _results(halves.input_half).args[0][len(halves.input_outputs) :]]
    for i, stride in enumerate((strides or ())[len(halves.input_outputs) :]):
        if stride is not None and all(isinstance(size, int) for size in (*values[i].size(), *values[i].stride())):
            values[i] = values[i].as_strided(values[i].size(), stride)
    return values


def _set_visible(graph: fx.GraphModule, halves: Halves) -> None:
    """Marks all results as visible whose layout matters: inductor may choose that of others, and need not report it."""
    visible = set(_results(graph).meta.get("user_visible_output_idxs", ()))
    count = len(halves.input_outputs)
    _results(halves.input_half).meta["user_visible_output_idxs"] = [
        *(k for k, i in enumerate(halves.input_outputs) if i in visible),
        *range(count, count + halves.kept_count),
    ]
    _results(halves.weight_half).meta["user_visible_output_idxs"] = [
        k for k, i in enumerate(halves.weight_outputs) if i in visible
    ]


def _copy(module: fx.GraphModule) -> fx.GraphModule:
    """A copy for a compiler, which changes its graph; the constants are shared."""
    copied = fx.GraphModule(module, copy.deepcopy(module.graph))
    copied.meta = dict(module.meta)
    return copied
