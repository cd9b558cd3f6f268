"""Kernels of a library that do one operation on every element: of its rows or matrices, as it stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

from iosim.index import cdiv
from iosim.program import Builder, Tensor, Tile, rows

# Elements of a block, as in PyTorch's kernels (iosim/data/h200_counters.csv): 128 threads of 8, or of 4 where operands
# are laid out differently.
BLOCK, STRIDED = 1024, 512


def elementwise(
    p: Builder, name: str, out: Tensor, inputs: tuple[Tensor, ...], operation: Callable[..., Tile], block: int = BLOCK
) -> None:
    """The kernel: out = operation(*inputs) on tiles of `block` elements; all (batch, heads, rows, columns), alike."""
    grid, r, cols = tiling(out.shape, block)
    with p.kernel(name, operands_once=True, **grid) as (b, h, i, c):
        view = b, h, rows(i, r), rows(c, cols)
        loaded = [p.load(tensor.name.lower(), tensor[view]) for tensor in inputs]
        p.store(out[view], operation(*loaded))


def tiling(shape: Sequence[int], block: int = BLOCK) -> tuple[dict[str, int], int, int]:
    """The grid of a kernel on tiles of `block` elements of a (batch, heads, rows, columns) tensor; their sides.

    A library's block takes elements as they lie, whatever the rows; so that there are as many blocks here, a tile is as
    wide as a power of two that divides a row.
    """
    batch, heads, n, width = shape
    cols = gcd(width, block)
    r = block // cols
    return {"b": batch, "h": heads, "i": cdiv(n, r), "c": cdiv(width, cols)}, r, cols
