"""Device memory cut into units that a cache keeps or drops whole, and requests for tiles as accesses to them.

A unit is a rectangle of a tensor: tiles begin and end at its edges, so that none touches a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from iosim.dtypes import dtype
from iosim.index import affine
from iosim.program import Compute, Span, walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from iosim.memory.launch import Requests
    from iosim.program import Program, Tensor, View

    Ints: TypeAlias = NDArray[np.int64]

LINE = 128  # bytes: no smaller unit is chosen, as far as the tiles allow
LARGEST = 16384  # bytes of a unit


@dataclass(frozen=True, slots=True)
class Units:
    """How one tensor is cut: elements of a unit along each axis; its units are numbered from `first` on."""

    tensor: Tensor
    size: tuple[int, ...]
    first: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Units along each axis."""
        return tuple(-(-n // u) for n, u in zip(self.tensor.shape, self.size, strict=True))

    @property
    def bytes(self) -> int:
        """Bytes of a unit that no edge of the tensor cuts."""
        return prod(self.size) * dtype(self.tensor.dtype).bytes

    @property
    def count(self) -> int:
        """Units of the tensor."""
        return prod(self.counts)

    def in_tile(self, view: View) -> tuple[int, ...]:
        """Units along each axis of one tile."""
        return tuple(-(-span // u) for span, u in zip(_spans(view), self.size, strict=True))

    def accesses(self, r: Requests) -> tuple[Ints, Ints, Ints]:
        """(request, unit, bytes) of each access: the units of a tile follow each other."""
        n = len(r.step)
        numbers, size = np.full((n, 1), self.first), np.full((n, 1), dtype(self.tensor.dtype).bytes)
        there = np.ones((n, 1), bool)
        steps = [prod(self.counts[axis + 1 :]) for axis in range(len(self.size))]
        for axis, (across, unit, limit) in enumerate(
            zip(self.in_tile(r.node.view), self.size, self.tensor.shape, strict=True)
        ):
            at = r.starts[axis][:, None] // unit + np.arange(across)
            inside = np.clip(limit - at * unit, 0, unit) * (at >= 0)
            shape = n, size.shape[1] * across
            numbers = (numbers[:, :, None] + (at * steps[axis])[:, None, :]).reshape(shape)
            size = (size[:, :, None] * inside[:, None, :]).reshape(shape)
            there = (there[:, :, None] & (inside > 0)[:, None, :]).reshape(shape)
        request = np.nonzero(there)[0]
        return request, numbers[there], size[there]


def cut(program: Program, largest: int) -> dict[str, Units]:
    """The units of each tensor: as large as the tiles allow, up to `largest` bytes."""
    views: dict[str, list[View]] = {t.name: [] for t in program.tensors}
    for kernel in program.kernels:
        for node, _ in walk(kernel.body):
            if not isinstance(node, Compute):
                views[node.view.tensor.name].append(node.view)
    out: dict[str, Units] = {}
    first = 0
    for tensor in program.tensors:
        out[tensor.name] = Units(tensor, _unit(tensor, views[tensor.name], largest), first)
        first += out[tensor.name].count
    return out


def _spans(view: View) -> tuple[int, ...]:
    return tuple(ix.size if isinstance(ix, Span) else 1 for ix in view.index)


def _unit(tensor: Tensor, views: Sequence[View], largest: int) -> tuple[int, ...]:
    room = max(1, largest // dtype(tensor.dtype).bytes)
    size: list[int] = []
    for axis, n in reversed(list(enumerate(tensor.shape))):
        grain = _grain(views, axis, n)
        size.append(next(k for k in range(min(grain, room), 0, -1) if grain % k == 0))
        room = max(1, room // size[-1])
    return tuple(reversed(size))


def _grain(views: Sequence[View], axis: int, n: int) -> int:
    """The largest length that tiles are a multiple of along an axis; a tile that spans all of it does not count."""
    grain = 0
    for view in views:
        span, form = _spans(view)[axis], affine(view.starts[axis])
        if form is None:
            return 1
        if form != (0, {}) or span < n:
            grain = gcd(grain, span, form[0], *form[1].values())
    return grain or n
