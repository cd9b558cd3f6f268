"""Replay: a tile program computed in numpy, in the program's own order, and the bytes it moved on the way.

The grid is vectorised.  Each grid axis is a leading axis of every array that depends on it (size 1 where one does
not), so one numpy call runs a node for many blocks at once.  Loops stay loops: where trip counts differ between
blocks (causal), each iteration runs on the boxes of blocks that still take part; so does a node with a `When`.
The grid is cut in parts whose largest tile fits a cache.

Arrays are float32 and hold values of the dtype that the program stores: a tile or tensor of another dtype is
rounded whenever it is written.  What no store has written is NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from math import ceil, prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from iosim.dtypes import DTYPES
from iosim.errors import InputError
from iosim.index import Ex, Expr, Index, affine, at, indices
from iosim.interpreters.region import Box, region, within
from iosim.ops import OPS
from iosim.parallel import workers
from iosim.program import (
    Compute,
    Kernel,
    Load,
    Loop,
    Node,
    Operand,
    Program,
    Span,
    Store,
    Tensor,
    Tile,
    Transposed,
    View,
    extent,
    walk,
)
from iosim.rounding import round_into

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[np.float32]

Source: TypeAlias = Callable[[Tensor, Box], "Array"]
Mapper: TypeAlias = Callable[..., Iterable[Any]]  # `map`, or that of an executor

STEP_BYTES = 32  # of a row of an operand that one matrix instruction takes
PART_BYTES = 1 << 20  # the largest tile of a part, over all its blocks: some tiles together fit a core's share of cache


@dataclass(frozen=True, slots=True)
class Replay:
    """The demanded boxes of the outputs, and the bytes that the blocks which ran loaded, stored and added.

    `moved[tensor, direction]` counts elements inside the tensor; the directions are read, write and add.
    `blocks` says how many blocks of each kernel ran.
    """

    outputs: Mapping[str, Array]
    moved: Mapping[tuple[str, str], int]
    blocks: tuple[int, ...]


def replay(program: Program, source: Source, demand: Mapping[str, Box] | None = None) -> Replay:
    """Run `program` as far as `demand` asks: {output name: a (lo, hi) range for each axis}, all outputs by default.

    `source(tensor, box)` gives an input's values in a box, as float32 already rounded to the tensor's dtype.
    """
    return Replayer(program).run(source, demand)


class Replayer:
    """A program prepared for several replays of different regions; tile buffers are kept between them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._tensors = {t.name: t for t in program.tensors}
        self._kernels = tuple(_Prepared.of(kernel) for kernel in program.kernels)
        self._pool = _Pool()
        self._spare: list[_Pool] = []

    def run(self, source: Source, demand: Mapping[str, Box] | None = None, mapper: Mapper | None = None) -> Replay:
        """See `replay`.  `mapper` runs the parts of a kernel; by default on threads of their own (iosim.parallel)."""
        if mapper is None:
            with workers() as threads:
                return self.run(source, demand, threads.map)
        if demand is None:
            demand = {t.name: tuple((0, n) for n in t.shape) for t in self.program.tensors if t.role == "out"}
        for name, box in demand.items():
            _require_box(self._tensors, name, box)
        needed = region(self.program, demand)
        memory = {name: self._allocate(self._tensors[name], box, source) for name, box in needed.touched.items()}
        moved: dict[tuple[str, str], int] = {}
        for kernel, cells in zip(self._kernels, needed.cells, strict=True):
            if cells is not None:
                run = partial(self._run_part, kernel, memory)
                for counts in (map if kernel.shared else mapper)(run, kernel.parts(cells)):
                    for key, count in counts.items():
                        moved[key] = moved.get(key, 0) + count
        outputs = {name: memory[name].part(box).copy() for name, box in demand.items()}
        blocks = tuple(prod(hi - lo for lo, hi in cells) if cells else 0 for cells in needed.cells)
        return Replay(outputs, {key: count for key, count in moved.items() if count}, blocks)

    def _run_part(self, kernel: _Prepared, memory: Mapping[str, _Memory], box: Box) -> dict[tuple[str, str], int]:
        pool = self._spare.pop() if self._spare else _Pool()
        part = _Part(kernel, box, memory, pool)
        with np.errstate(over="ignore", invalid="ignore"):  # infinity and NaN are results like others
            part.run()
        self._spare.append(pool)
        return part.moved

    def _allocate(self, tensor: Tensor, box: Box, source: Source) -> _Memory:
        inside = within(box, tensor)
        if tensor.role == "in" and inside == box:
            return _Memory(tensor, np.ascontiguousarray(source(tensor, box), np.float32), box)
        data = self._pool.take(f"tensor {tensor.name}", tuple(hi - lo for lo, hi in box))
        memory = _Memory(tensor, data, box)
        data.fill(0 if tensor.role == "in" else np.nan)
        if tensor.role == "in":
            memory.part(inside)[...] = source(tensor, inside)
        else:
            memory.clear_padding()
        return memory


def _require_box(tensors: Mapping[str, Tensor], name: str, box: Box) -> None:
    if name not in tensors or tensors[name].role == "in":
        raise InputError(f"demand: {name!r} is not an output of the program")
    shape = tensors[name].shape
    if len(box) != len(shape) or any(not 0 <= lo < hi <= n for (lo, hi), n in zip(box, shape, strict=True)):
        raise InputError(f"demand of {name}: {box} is not a box of one or more elements inside {shape}")


class _Pool:
    """Arrays by purpose, kept for the next part or run: fresh memory costs a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._held: dict[str, Array] = {}

    def take(self, purpose: str, shape: tuple[int, ...]) -> Array:
        size = prod(shape)
        held = self._held.get(purpose)
        if held is None or held.size < size:
            held = self._held[purpose] = np.empty(size, np.float32)
        return held[:size].reshape(shape)


@dataclass(frozen=True, slots=True)
class _Memory:
    """A tensor's elements in `box`, which may reach beyond the tensor: there they are 0."""

    tensor: Tensor
    data: Array
    box: Box

    def part(self, box: Box) -> Array:
        return self.data[tuple(slice(lo - mine, hi - mine) for (lo, hi), (mine, _) in zip(box, self.box, strict=True))]

    def clear_padding(self) -> None:
        for axis, ((lo, hi), size) in enumerate(zip(self.box, self.tensor.shape, strict=True)):
            before = (slice(None),) * axis
            if hi > size:
                self.data[(*before, slice(max(0, size - lo), None))] = 0
            if lo < 0:
                self.data[(*before, slice(0, -lo))] = 0


@dataclass(frozen=True, slots=True)
class _Start:
    """Where a view begins on one tensor axis: `first` + coefficients times grid axes and loop indices."""

    first: int
    grid: tuple[tuple[int, int], ...]  # (grid axis, coefficient)
    loops: tuple[tuple[str, int], ...]
    size: int
    span: bool
    limit: int


@dataclass(frozen=True, slots=True)
class _Access:
    """A view as numbers."""

    starts: tuple[_Start, ...]
    axes: frozenset[int]  # grid axes that it depends on
    overlaps: bool  # two blocks may touch one element

    @classmethod
    def of(cls, view: View, grid: Mapping[str, int]) -> _Access:
        axis = {name: n for n, name in enumerate(grid)}
        starts, overlaps = [], False
        for ix, limit in zip(view.index, view.tensor.shape, strict=True):
            first, terms = affine(ix.start if isinstance(ix, Span) else ix) or (0, {})
            inner = tuple((axis[name], c) for name, c in terms.items() if name in axis and c)
            loops = tuple((name, c) for name, c in terms.items() if name not in axis)
            size = covered = ix.size if isinstance(ix, Span) else 1
            for c, count in sorted((abs(c), grid[name]) for name, c in terms.items() if name in axis):
                overlaps |= 0 < c < covered and count > 1
                covered += c * (count - 1)
            starts.append(_Start(first, inner, loops, size, isinstance(ix, Span), limit))
        return cls(tuple(starts), frozenset(n for start in starts for n, _ in start.grid), overlaps)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A kernel with what its blocks have in common."""

    kernel: Kernel
    axis: Mapping[str, int]
    axes: Mapping[str, frozenset[int]]  # by tile: the grid axes that it varies along
    access: Mapping[int, _Access]  # by id of the Load or Store
    aliased: frozenset[str]  # tiles that are read where they lie in device memory
    partial: frozenset[str]  # tiles that some blocks may leave unwritten
    shared: bool  # blocks may store to one element: the parts must keep their order
    repeats: frozenset[int]  # ids of the computes whose result is the same along a grid axis of its tile

    @classmethod
    def of(cls, kernel: Kernel) -> _Prepared:
        grid = dict(kernel.grid)
        axis = {name: n for n, name in enumerate(grid)}
        nodes = [node for node, _ in walk(kernel.body)]
        stored = {n.view.tensor.name for n in nodes if isinstance(n, Store)}
        rewritten = {n.out.name for n in nodes if isinstance(n, Compute)}
        guarded = {_written(n) for n in nodes if n.when is not None and not isinstance(n, Store)}
        loaded = [n for n in nodes if isinstance(n, Load)]
        times = Counter(n.tile.name for n in loaded)
        aliased = {name for name, count in times.items() if count == 1} - rewritten - guarded
        aliased -= {n.tile.name for n in loaded if n.view.tensor.name in stored}
        access = {id(n): _Access.of(n.view, grid) for n in nodes if not isinstance(n, Compute)}
        stores = [access[id(n)] for n in nodes if isinstance(n, Store)]
        wide = {n for n, count in enumerate(grid.values()) if count > 1}
        shared = any(store.overlaps or not wide <= store.axes for store in stores)
        axes = _tile_axes(kernel, axis)
        computes = [n for n in nodes if isinstance(n, Compute)]
        repeats = frozenset(id(n) for n in computes if _result_axes(n, axes, axis) != axes[n.out.name])
        return cls(kernel, axis, axes, access, frozenset(aliased), frozenset(guarded), shared, repeats)

    def parts(self, cells: Box) -> Iterator[Box]:
        """The cells cut into boxes, in launch order, outer axes first; the largest tile fits PART_BYTES."""
        sizes = [hi - lo for lo, hi in cells]
        nodes = (node for node, _ in walk(self.kernel.body) if not isinstance(node, Store))
        tiles = {_written(node): node.out if isinstance(node, Compute) else node.tile for node in nodes}
        weights = [(4 * prod(tile.shape), self.axes[name]) for name, tile in tiles.items()]

        def largest() -> int:
            return max((size * prod(sizes[n] for n in axes) for size, axes in weights), default=0)

        for n in range(len(sizes)):
            over = ceil(largest() / PART_BYTES)
            if over > 1:
                sizes[n] = ceil(sizes[n] / min(sizes[n], over))
        ranges = (
            [(at_, min(at_ + size, hi)) for at_ in range(lo, hi, size)]
            for (lo, hi), size in zip(cells, sizes, strict=True)
        )
        return product(*ranges)


def _written(node: Load | Compute) -> str:
    return node.tile.name if isinstance(node, Load) else node.out.name


def _tile_axes(kernel: Kernel, axis: Mapping[str, int]) -> dict[str, frozenset[int]]:
    """The grid axes that every tile varies along, as the least fixed point of what its writers need."""
    home: dict[str, tuple[Loop, ...]] = {}
    writers: list[tuple[Load | Compute, frozenset[int]]] = []
    for node, loops in walk(kernel.body):
        if isinstance(node, Store):
            continue
        first = home.setdefault(_written(node), loops)
        exprs: list[Ex] = [e for loop in loops if loop not in first for e in (loop.lo, loop.hi)]
        if node.when is not None:
            exprs += [Index(node.when.index), node.when.lo, node.when.hi]
        if isinstance(node, Load):
            exprs += node.view.starts
        writers.append((node, _grid_axes(exprs, axis)))
    axes: dict[str, frozenset[int]] = dict.fromkeys(home, frozenset())
    while True:
        before = dict(axes)
        for node, own in writers:
            own |= _result_axes(node, axes, axis) if isinstance(node, Compute) else frozenset()
            axes[_written(node)] |= own
        if axes == before:
            return axes


def _result_axes(node: Compute, axes: Mapping[str, frozenset[int]], axis: Mapping[str, int]) -> frozenset[int]:
    """The grid axes along which the result of a node varies."""
    own = _grid_axes([value for _, value in node.params if isinstance(value, Expr)], axis)
    return own.union(*(axes[_operand(a).name] for a in node.args))


def _grid_axes(exprs: Iterable[Ex], axis: Mapping[str, int]) -> frozenset[int]:
    return frozenset(axis[name] for e in exprs for name in indices(e) if name in axis)


def _operand(operand: Operand) -> Tile:
    return operand.tile if isinstance(operand, Transposed) else operand


@dataclass(slots=True)
class _Part:
    """One box of a kernel's blocks in execution."""

    kernel: _Prepared
    box: Box
    memory: Mapping[str, _Memory]
    pool: _Pool
    moved: dict[tuple[str, str], int] = field(default_factory=dict)
    loop: dict[str, int] = field(default_factory=dict)
    tiles: dict[str, tuple[Array, Box]] = field(default_factory=dict)
    buffers: dict[str, Array] = field(default_factory=dict)

    def run(self) -> None:
        self._body(self.kernel.kernel.body, self.box)

    def _body(self, body: Sequence[Node], box: Box) -> None:
        for node in body:
            if isinstance(node, Loop):
                self._loop(node, box)
            elif node.when is None:
                self._step(node, box)
            else:
                index = self._value(Index(node.when.index), box)
                for cells in self._active(index, node.when.lo, node.when.hi, box):
                    self._step(node, cells)

    def _loop(self, loop: Loop, box: Box) -> None:
        lo, hi = self._value(loop.lo, box), self._value(loop.hi, box)
        for n in range(int(np.min(lo)), int(np.max(hi))):
            self.loop[loop.index] = n
            for cells in self._active(n, lo, hi, box):
                self._body(loop.body, cells)
        self.loop.pop(loop.index, None)

    def _active(self, index: Any, lo: Any, hi: Any, box: Box) -> list[Box]:
        """The boxes of cells for which lo <= index < hi."""
        on = (self._value(lo, box) <= index) & (index < self._value(hi, box))
        return _boxes(on, box) if isinstance(on, np.ndarray) else [box] if on else []

    def _value(self, e: Any, box: Box) -> Any:
        """An expression over the cells of a box: an int, or an array with one axis a grid axis."""
        if not isinstance(e, Expr):
            return e
        env: dict[str, Any] = dict(self.loop)
        for name in indices(e) & self.kernel.axis.keys():
            shape = [1] * len(box)
            n = self.kernel.axis[name]
            shape[n] = -1
            env[name] = np.arange(*box[n]).reshape(shape)
        return at(e, env)

    def _step(self, node: Load | Store | Compute, box: Box) -> None:
        if isinstance(node, Load):
            self._load(node, box)
        elif isinstance(node, Store):
            self._store(node, box)
        else:
            self._compute(node, box)

    def _load(self, node: Load, box: Box) -> None:
        access = self.kernel.access[id(node)]
        view = self._view(access, self.memory[node.view.tensor.name], box)
        view = view.reshape(*view.shape[: len(box)], *node.tile.shape)
        self._count(node, access, "read", box)
        if node.tile.name in self.kernel.aliased:
            self.tiles[node.tile.name] = view, box
        else:
            self._target(node.tile, box)[...] = view

    def _compute(self, node: Compute, box: Box) -> None:
        args = [self._read(a, box) for a in node.args]
        params = {name: self._value(value, box) for name, value in node.params}
        out, op = self._target(node.out, box), OPS[node.op]
        direct = id(node) not in self.kernel.repeats
        exact = op.selects and all(_operand(a).dtype == node.out.dtype for a in node.args)
        if node.op == "matmul" and node.out.dtype != "fp32":
            _accumulate(node, args, out)
        elif node.add:
            out += (
                op.run(*args, **params, out=self.pool.take("spare", out.shape)) if direct else op.run(*args, **params)
            )
            if node.out.dtype != "fp32":
                round_into(out, out, DTYPES[node.out.dtype])
        elif node.out.dtype != "fp32" and not exact:
            round_into(out, op.run(*args, **params), DTYPES[node.out.dtype])
        elif direct:
            op.run(*args, **params, out=out)
        else:
            out[...] = op.run(*args, **params)

    def _store(self, node: Store, box: Box) -> None:
        access, memory = self.kernel.access[id(node)], self.memory[node.view.tensor.name]
        self._count(node, access, "add" if node.add else "write", box)
        single = access.overlaps and any(hi - lo > 1 for lo, hi in box)
        for cells in product(*([(n, n + 1) for n in range(*span)] for span in box)) if single else (box,):
            self._put(node, access, memory, cells)
        memory.clear_padding()

    def _put(self, node: Store, access: _Access, memory: _Memory, box: Box) -> None:
        """One store whose cells touch distinct elements, or the same ones along whole axes that the view lacks."""
        view, value = self._view(access, memory, box), self._read(node.tile, box)
        dtype = DTYPES[node.view.tensor.dtype]
        for n, (lo, hi) in enumerate(box):
            if n in access.axes:
                continue
            if not node.add:
                value = value[(slice(None),) * n + (slice(-1, None),)]  # the last block in launch order
            elif value.shape[n] > 1:
                value = value.sum(n, keepdims=True)
            elif hi - lo > 1:
                value = value * np.float32(hi - lo)
        value = value.reshape(*value.shape[: len(box)], *view.shape[len(box) :])
        if node.add:
            view += value
            round_into(view, view, dtype)
        elif node.tile.dtype == dtype.name:
            view[...] = value
        else:
            round_into(view, value, dtype)

    def _view(self, access: _Access, memory: _Memory, box: Box) -> Array:
        """A view of device memory over the cells of a box, one leading axis a grid axis."""
        offset, strides = 0, [0] * len(box)
        shape = [hi - lo if n in access.axes else 1 for n, (lo, hi) in enumerate(box)]
        for start, (origin, _), stride in zip(access.starts, memory.box, memory.data.strides, strict=True):
            at_ = start.first - origin
            for n, c in start.grid:
                at_ += box[n][0] * c
                strides[n] += c * stride
            for name, c in start.loops:
                at_ += self.loop[name] * c
            offset += at_ * stride
            if start.span:
                shape.append(start.size)
                strides.append(stride)
        missing = max(0, len(box) + 2 - len(shape))
        return np.ndarray(shape + [1] * missing, np.float32, memory.data.data, offset, strides + [4] * missing)

    def _count(self, node: Load | Store, access: _Access, direction: str, box: Box) -> None:
        """Count the elements inside the tensor that every cell of the box touches."""
        elements: Any = 1
        for start in access.starts:
            low = start.first + sum(self.loop[name] * c for name, c in start.loops)
            high = low
            for n, c in start.grid:
                ends = box[n][0] * c, (box[n][1] - 1) * c
                low, high = low + min(ends), high + max(ends)
            inside = low >= 0 and high + start.size <= start.limit
            elements = elements * (start.size if inside else self._clipped(start, box))
        named = np.shape(elements) or (1,) * len(box)
        repeated = prod(hi - lo for (lo, hi), n in zip(box, named, strict=True) if n == 1)
        tensor = node.view.tensor
        key = tensor.name, direction
        self.moved[key] = self.moved.get(key, 0) + int(np.sum(elements)) * repeated * DTYPES[tensor.dtype].bytes

    def _clipped(self, start: _Start, box: Box) -> Any:
        """For each cell, how many indices of one axis lie inside the tensor."""
        at_: Any = start.first + sum(self.loop[name] * c for name, c in start.loops)
        for n, c in start.grid:
            at_ = at_ + c * np.arange(*box[n]).reshape([-1 if m == n else 1 for m in range(len(box))])
        return extent(at_, start.size, start.limit, {})

    def _target(self, tile: Tile, box: Box) -> Array:
        """Where a tile is written for the cells of a box."""
        name = tile.name
        buffer = self.buffers.get(name)
        if buffer is None:
            buffer = self.buffers[name] = self._buffer(tile)
        self.tiles[name] = buffer, self.box
        return _slice(buffer, self.box, box)

    def _buffer(self, tile: Tile) -> Array:
        lead = (hi - lo if n in self.kernel.axes[tile.name] else 1 for n, (lo, hi) in enumerate(self.box))
        buffer = self.pool.take(f"tile {tile.name}", (*lead, *tile.shape))
        if tile.name in self.kernel.partial:
            buffer.fill(np.nan)
        return buffer

    def _read(self, operand: Operand, box: Box) -> Array:
        array, origin = self.tiles[_operand(operand).name]
        array = _slice(array, origin, box)
        return array.swapaxes(-1, -2) if isinstance(operand, Transposed) else array


def _accumulate(node: Compute, args: Sequence[Array], out: Array) -> None:
    """A product whose sum is rounded to the tile's dtype after each step of 32 bytes of the operands' rows.

    So long is k of the matrix instructions of every machine that sums in fp16: 16 for fp16.
    """
    a, b = args
    step, dtype = STEP_BYTES // DTYPES[_operand(node.args[0]).dtype].bytes, DTYPES[node.out.dtype]
    if not node.add:
        out.fill(0)
    for k in range(0, a.shape[-1], step):
        out += OPS["matmul"].run(a[..., k : k + step], b[..., k : k + step, :])
        round_into(out, out, dtype)


def _slice(array: Array, origin: Box, box: Box) -> Array:
    """The cells of `box` of an array that is laid out for `origin`."""
    if box == origin:
        return array
    index = [
        slice(lo - first, hi - first) if size > 1 else slice(None)
        for (lo, hi), (first, _), size in zip(box, origin, array.shape[:-2], strict=True)
    ]
    return array[tuple(index)]


def _boxes(on: NDArray[np.bool_], box: Box) -> list[Box]:
    """The cells of `box` where `on` is true, as boxes; `on` has size 1 along axes that do not matter."""
    if on.all():
        return [box]
    if not on.any():
        return []
    n = next(axis for axis, size in enumerate(on.shape) if size > 1)
    slices = np.moveaxis(on, n, 0)
    same = (slices[1:] == slices[:-1]).reshape(len(slices) - 1, -1).all(1)
    cuts = [0, *(np.flatnonzero(~same) + 1).tolist(), len(slices)]
    out = []
    for start, stop in pairwise(cuts):
        first = box[n][0]
        run = (*box[:n], (first + start, first + stop), *box[n + 1 :])
        out += _boxes(np.take(on, [start], n), run)
    return out
