"""This rank's parts of DTensors, and the products that it can add from its parts alone. The shim calls this module."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

__all__ = ["local_part", "local_product"]

_REPLICATED = "replicated"
_PARTIAL = "partial"  # a sum over the ranks

# How a matrix lies along a mesh dimension: the sharded dimension of the matrix, or one of the above.
_Lie = int | str

# How the product of two matrices lies, if the ranks compute it from their parts.
_PRODUCTS: dict[tuple[_Lie | None, _Lie | None], _Lie] = {
    (1, 0): _PARTIAL,
    (0, _REPLICATED): 0,
    (_REPLICATED, 1): 1,
    (_REPLICATED, _REPLICATED): _REPLICATED,
}


def local_part(tensor: DTensor) -> Tensor:
    """This rank's part. Waits for a part that a collective still computes."""
    local = tensor._local_tensor
    return local.trigger_wait() if hasattr(local, "trigger_wait") else local


def local_product(total: Tensor, left: Tensor, right: Tensor, is_transposed: tuple[bool, bool, bool]) -> list[Tensor]:
    """This rank's parts of three matrices, if each rank can add the product of its parts of ``left`` and ``right`` to
    its part of ``total``. Then the product needs no communication, and lies on the mesh as ``total`` does. Else none.
    ``is_transposed``: which of the three the product takes transposed; the parts are returned as they are given."""
    matrices = [m for m in (total, left, right) if isinstance(m, DTensor) and m.dim() == 2]
    if len(matrices) < 3:
        return []
    meshes = [matrix.device_mesh for matrix in matrices]
    if not all(mesh is meshes[0] or mesh == meshes[0] for mesh in meshes):
        return []
    along = [[_lie(p, flip) for p in matrix.placements] for matrix, flip in zip(matrices, is_transposed)]
    for wanted, of_left, of_right in zip(*along):
        if wanted is None or _PRODUCTS.get((of_left, of_right)) != wanted:
            return []
    return list(map(local_part, matrices))


def _lie(placement: object, is_transposed: bool) -> _Lie | None:
    """How a placement lies; None for another kind of placement."""
    if type(placement) is Replicate:
        return _REPLICATED
    if type(placement) is Shard and placement.dim in (0, 1):
        return 1 - placement.dim if is_transposed else placement.dim
    if type(placement) is Partial and placement.reduce_op == "sum":
        return _PARTIAL
    return None
