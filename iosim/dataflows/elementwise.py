"""Kernels of a library that do one operation on every element: of its rows or matrices, as it stores them."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

from iosim.index import cdiv
from iosim.program import Builder, Tensor, Tile, rows

# Elements of a block, as in PyTorch's kernels (iosim/data/h200_counters.csv): 128 threads of 8, or of 4 where operands
# are laid out differently.
BLOCK, STRIDED = 1024, 512


def elementwise(
    p: Builder, name: str, out: Tensor, inputs: tuple[Tensor, ...], operation: Callable[..., Tile], block: int = BLOCK
) -> None:
    """The kernel: out = operation(*inputs) on tiles of `block` elements; all (batch, heads, rows, columns), alike.

    A library's block takes elements as they lie, whatever the rows; so that there are as many blocks here, a tile is as
    wide as a power of two that divides a row.
    """
    batch, heads, n, width = out.shape
    cols = gcd(width, block)
    r = max(1, block // cols)
    with p.kernel(name, operands_once=True, b=batch, h=heads, i=cdiv(n, r), c=cdiv(width, cols)) as (b, h, i, c):
        view = b, h, rows(i, r), rows(c, cols)
        loaded = [p.load(tensor.name.lower(), tensor[view]) for tensor in inputs]
        p.store(out[view], operation(*loaded))
