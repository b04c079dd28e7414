from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, final, overload

import torch
from torch.autograd.graph import GradientEdge, Node

class RunError(RuntimeError): ...

@final
class ParamGroup:
    @property
    def bytes_held(self) -> int: ...
    @property
    def spent(self) -> bool: ...
    def keys(self) -> list[str]: ...
    def get(self, key: str, default: Any = None, /) -> Any: ...
    @overload
    def __getitem__(self, key: Literal["params"]) -> set[Node]: ...
    @overload
    def __getitem__(self, key: Literal["intermediates"]) -> list[Node | None]: ...
    @overload
    def __getitem__(self, key: Literal["grads"]) -> list[tuple[torch.Tensor | None, ...]]: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    def __setitem__(self, key: Literal["grads"], value: Iterable[Iterable[torch.Tensor | None]]) -> None: ...
    def __contains__(self, key: object) -> bool: ...

def input_pass(
    outputs: Iterable[torch.Tensor | GradientEdge | None],
    output_grads: Iterable[torch.Tensor | None] | None,
    inputs: Iterable[Any],
    weights: Iterable[torch.Tensor] | None,
    defer: int | Callable[[torch.Tensor], int],
    checkpoint: int | Callable[[torch.Tensor], int],
    /,
) -> tuple[tuple[torch.Tensor | None, ...], list[ParamGroup]]: ...
def weight_pass(
    weights: Iterable[torch.Tensor] | None,
    param_groups: Iterable[ParamGroup],
    retain_graph: bool,
    fuse: bool,
    main_grad: bool,
    /,
) -> Sequence[torch.Tensor]: ...
