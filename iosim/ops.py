"""What a tile program may compute: one row an operation.

A row gives the shape of the result, the meaning in numpy, and the work by unit.  Tiles are 2-D; a statistic
of the rows is (rows, 1), so that numpy's broadcasting is the only rule.  In `run` the arrays may carry leading
axes (one entry a block), and the result goes to `out`, which may be an argument, where it is given.  Work is
counted on whole tiles, as the hardware executes them:

    matrix   FLOPs (a multiply-add is two)
    vector   FP32 lane operations (a fused multiply-add is one)
    alu      lane operations of the other kind: maxima, comparisons, conversions
    exp      special-function operations (exp2, log2, reciprocal, tanh)

A scale that follows the difference of an exp is one fused multiply-add with it; a conversion makes two numbers at once.

Infinities are handled here, once: exp(scale * (-inf - m)) is 0 whatever m is, x / 0 is 0 and log 0 is -inf.
A fully masked row then gives O = 0 and a log-sum-exp of -inf without a special case anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from iosim.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float32]

Shape: TypeAlias = tuple[int, int]
Params: TypeAlias = Mapping[str, Any]
Work: TypeAlias = Mapping[str, int]


class ShapeError(InputError):
    """Tiles of shapes that an operation cannot combine."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation; see the module's docstring.  One that `selects` gives values of its operands, -inf or 0."""

    shape: Callable[[tuple[Shape, ...], Params], Shape]
    run: Callable[..., Array]
    work: Callable[[Shape, tuple[Shape, ...]], Work]
    selects: bool = False


def _broadcast(shapes: tuple[Shape, ...], _: Params) -> Shape:
    rows, cols = (max(axis) for axis in zip(*shapes, strict=True))
    if any(s[0] not in (1, rows) or s[1] not in (1, cols) for s in shapes):
        raise ShapeError(f"tiles of shapes {', '.join(map(str, shapes))} do not broadcast")
    return rows, cols


def _same(shapes: tuple[Shape, ...], _: Params) -> Shape:
    return shapes[0]


def _given(_: tuple[Shape, ...], params: Params) -> Shape:
    rows, cols = params["shape"]
    return rows, cols


def _product(shapes: tuple[Shape, ...], _: Params) -> Shape:
    (rows, inner), (inner_b, cols) = shapes
    if inner != inner_b:
        raise ShapeError(f"matmul of {shapes[0]} and {shapes[1]}: the inner sizes {inner} and {inner_b} differ")
    return rows, cols


def _column(shapes: tuple[Shape, ...], _: Params) -> Shape:
    return shapes[0][0], 1


def _fill(*, shape: Shape, value: float, out: Array | None = None) -> Array:
    import numpy as np

    if out is None:
        return np.full(shape, value, np.float32)
    out.fill(value)
    return out


def _matmul(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """a @ b, one BLAS call a block, so that a block's result does not depend on which others run with it."""
    import numpy as np

    return np.matmul(a, b, out=out)


def _copy(a: Array, out: Array) -> Array:
    out[...] = a
    return out


def _mask(
    x: Array,
    *,
    row: Any,
    col: Any,
    keys: int,
    diagonal: int | None,
    low: int | None,
    kept: int = 0,
    queries: int | None = None,
    out: Array | None = None,
) -> Array:
    """-inf where the key's index is not below `keys`, exceeds the query's + `diagonal`, or is below its + `low`.

    The last of these does not hide keys below `kept`.  Rows are those of so many `queries`, head after head.
    """
    import numpy as np

    below = np.arange(x.shape[-2], dtype=np.int32)
    query = np.asarray(row, np.int32)[..., None, None] + (below if queries is None else below % queries)[:, None]
    shift = np.asarray(col, np.int32)[..., None, None]
    key = np.arange(x.shape[-1], dtype=np.int32)
    end = np.full((x.shape[-2], 1), keys, np.int32)  # of the keys that a row sees
    if diagonal is not None:
        end = np.minimum(end, query + np.int32(diagonal + 1))
    hidden = key >= end - shift
    if low is not None:
        before = key < query + np.int32(low) - shift
        hidden = hidden | (before & (key >= kept - shift) if kept else before)
    out = np.empty(np.broadcast_shapes(x.shape, hidden.shape), np.float32) if out is None else out
    if out is not x:
        out[...] = x
    np.copyto(out, np.float32(-np.inf), where=hidden)
    return out


def _softcap(x: Array, *, by: float, cap: float, out: Array | None = None) -> Array:
    """cap * tanh(by * x / cap)."""
    import numpy as np

    out = np.multiply(x, np.float32(by / cap), out=out)
    np.tanh(out, out=out)
    out *= np.float32(cap)
    return out


def _alibi(
    x: Array, *, by: float, row: Any, col: Any, diagonal: int, head: Any, heads: int, out: Array | None = None
) -> Array:
    """by * x - slope * |query + diagonal - key|, for the slope of a query head."""
    import numpy as np

    from iosim.problem import alibi_slope

    query = np.asarray(row, np.int32)[..., None, None] + np.arange(x.shape[-2], dtype=np.int32)[:, None]
    shift = np.asarray(col, np.int32)[..., None, None]
    apart = np.abs(query + np.int32(diagonal) - shift - np.arange(x.shape[-1], dtype=np.int32)).astype(np.float32)
    slope: Array = np.asarray(alibi_slope(head, heads), np.float32)[..., None, None]
    result: Array = np.subtract(x if by == 1 else x * np.float32(by), slope * apart, out=out)
    return result


def _block_mask(
    x: Array, *, row: Any, col: Any, blocks: tuple[bytes, ...], height: int, width: int, out: Array | None = None
) -> Array:
    """-inf where the block of the query's and the key's index is 0."""
    import numpy as np

    table = np.array([list(line) for line in blocks], bool)
    query = (np.asarray(row)[..., None, None] + np.arange(x.shape[-2])[:, None]) // height
    key = (np.asarray(col)[..., None, None] + np.arange(x.shape[-1])) // width
    seen = table[np.minimum(query, len(table) - 1), np.minimum(key, len(table[0]) - 1)]
    out = np.empty(np.broadcast_shapes(x.shape, seen.shape), np.float32) if out is None else out
    if out is not x:
        out[...] = x
    np.copyto(out, np.float32(-np.inf), where=~seen)
    return out


def _dropout(
    x: Array, *, row: Any, col: Any, batch: Any, head: Any, probability: float, out: Array | None = None
) -> Array:
    """x, and 0 where dropout takes it."""
    import numpy as np

    from iosim.philox import kept

    query = np.asarray(row)[..., None] + np.arange(x.shape[-2])
    left: Array = kept(batch, head, query, col, x.shape[-1], probability).astype(np.float32)
    return np.multiply(x, left, out=out)


def _fma(a: Array, b: Array, *, by: float, out: Array | None = None) -> Array:
    """by * a + b."""
    import numpy as np

    return np.add(a if by == 1 else a * np.float32(by), b, out=out)


_LEAST = -87.0  # exp of less is below 2^-126


def _exp(x: Array, m: Array, *, scale: float, out: Array | None = None) -> Array:
    """exp(scale * (x - m)), with 0 where x is -inf; results below 2^-126 are flushed to 0, as GPUs do."""
    import numpy as np

    m = np.where(np.isneginf(m), np.float32(0), m)
    out = np.subtract(x, m, out=out)
    if scale != 1:
        out *= np.float32(scale)
    least = np.float32(_LEAST)
    np.clip(out, least, np.float32(np.inf), out=out)  # numpy's exp is slow where its result is subnormal
    with np.errstate(over="ignore"):  # without a maximum subtracted: infinity, as on a machine
        np.exp(out, out=out)
    out -= np.exp(least)
    return out


def _div(a: Array, b: Array, *, out: Array | None = None) -> Array:
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(b == 0, np.float32(0), np.float32(1) / b)
        return np.multiply(a, inverse, out=out)


def _log(a: Array, *, out: Array | None = None) -> Array:
    import numpy as np

    with np.errstate(divide="ignore"):
        return np.log(a, out=out)


def _max(a: Array, b: Array, *, out: Array | None = None) -> Array:
    import numpy as np

    return np.maximum(a, b, out=out)


def _add(a: Array, b: Array, *, out: Array | None = None) -> Array:
    import numpy as np

    return np.add(a, b, out=out)


def _sub(a: Array, b: Array, *, out: Array | None = None) -> Array:
    import numpy as np

    return np.subtract(a, b, out=out)


def _mul(a: Array, b: Array, *, out: Array | None = None) -> Array:
    import numpy as np

    return np.multiply(a, b, out=out)


def _scale(a: Array, *, by: float, out: Array | None = None) -> Array:
    import numpy as np

    return np.multiply(a, np.float32(by), out=out)


def _rowmax(a: Array, *, out: Array | None = None) -> Array:
    import numpy as np

    return np.max(a, -1, keepdims=True, out=out)


def _rowsum(a: Array, *, out: Array | None = None) -> Array:
    import numpy as np

    return np.sum(a, -1, keepdims=True, out=out)


def _cast(a: Array, *, out: Array | None = None) -> Array:
    """The same values: whoever runs an operation rounds the result to the dtype of its tile."""
    return a if out is None else _copy(a, out)


def _size(shape: Shape) -> int:
    return shape[0] * shape[1]


def _lanes(count: int, unit: str = "vector") -> Callable[[Shape, tuple[Shape, ...]], Work]:
    """`count` operations an element of the largest tile involved."""
    return lambda out, args: {unit: count * max(map(_size, (out, *args)))}


OPS: Mapping[str, Op] = {
    "fill": Op(_given, _fill, _lanes(1)),
    "matmul": Op(_product, _matmul, lambda out, args: {"matrix": 2 * _size(out) * args[0][1]}),
    "mask": Op(_same, _mask, _lanes(2, "alu"), selects=True),
    "block_mask": Op(_same, _block_mask, _lanes(2, "alu"), selects=True),
    # A call of Philox: 7 rounds of two wide products, two additions and two exclusive ors, for 16 elements; then a byte
    # is cut out and compared, and the element chosen.
    "dropout": Op(_same, _dropout, lambda out, _: {"alu": 3 * _size(out) - (-7 * 6 * _size(out) // 16)}, selects=True),
    "softcap": Op(_same, _softcap, lambda out, _: {"vector": 2 * _size(out), "exp": _size(out)}),
    "alibi": Op(_same, _alibi, _lanes(2)),
    "fma": Op(_broadcast, _fma, _lanes(1)),
    "rowmax": Op(_column, _rowmax, _lanes(1, "alu"), selects=True),
    "rowsum": Op(_column, _rowsum, _lanes(1)),
    "max": Op(_broadcast, _max, _lanes(1, "alu"), selects=True),
    "add": Op(_broadcast, _add, _lanes(1)),
    "sub": Op(_broadcast, _sub, _lanes(1)),
    "mul": Op(_broadcast, _mul, _lanes(1)),
    "div": Op(_broadcast, _div, lambda out, args: {"vector": _size(out), "exp": _size(args[1])}),
    "exp": Op(_broadcast, _exp, lambda out, _: {"vector": _size(out), "exp": _size(out)}),
    "log": Op(_broadcast, _log, lambda out, _: {"vector": _size(out), "exp": _size(out)}),
    "scale": Op(_broadcast, _scale, _lanes(1)),
    "cast": Op(_broadcast, _cast, lambda out, _: {"alu": -(-_size(out) // 2)}),
}
