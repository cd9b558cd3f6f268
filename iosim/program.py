"""The tile language: the nouns of a tile program, the builder that writes one, `check` and `show`.

    Program = kernels that run one after another
    Kernel  = a grid of independent blocks that all run one body
    body    = Load | Store | Compute | Loop

A block sees only its own tiles.  A tile that is made in a loop body dies at the end of the iteration; a tile
that is made before the loop and written in it is carried from one iteration to the next.  Tiles have their
full shape at ragged edges: loads fill with zeros, stores drop what lies outside, and bytes count only what
lies inside.  Which values are computed and which bytes move is said here; when, where on chip and by whom is
said by a Schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from iosim.dtypes import dtype as dtype_of
from iosim.errors import InputError
from iosim.index import Ex, Expr, Index, Times, affine, at, cdiv, indices, least, most, named, plus
from iosim.ops import OPS, Shape

if TYPE_CHECKING:
    from iosim.strides import Strides

Role: TypeAlias = Literal["in", "out", "scratch"]

WIDTH = 80  # of `show`
MOST = 2**26  # extent of a grid axis, trips of a loop


class ProgramError(InputError):
    """A tile program that breaks a rule of the language."""


@dataclass(frozen=True, slots=True)
class Scales:
    """What makes a tensor one of scales: element n multiplies rows n * `rows`, ... of `tensor`, `rows` of them."""

    tensor: str
    rows: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array in device memory.  `tensor[i, rows(j, n)]` makes a View; missing trailing axes are taken whole.

    `scales` says which values of another input it multiplies, for formats that are too narrow without.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    scales: Scales | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape) * dtype_of(self.dtype).bytes

    def __getitem__(self, index: Ex | Span | tuple[Ex | Span, ...]) -> View:
        given = index if isinstance(index, tuple) else (index,)
        whole = tuple(Span(0, size) for size in self.shape[len(given) :])
        return View(self, given + whole)

    def column(self, *index: Ex | Span) -> View:
        """One number for each row of a tile, whatever axes these are along."""
        return View(self, index, column=True)


@dataclass(frozen=True, slots=True)
class Span:
    """`size` consecutive indices of one axis, from `start` on."""

    start: Ex
    size: int


def rows(i: Ex, n: int) -> Span:
    """The i-th run of n indices."""
    return Span(i * n, n)


@dataclass(frozen=True, slots=True)
class View:
    """The part of a tensor that a tile holds: per axis one index or a Span; starts are affine.

    One Span is a column, two are rows and columns; of three the first two are the tile's rows, the second running
    fastest (query heads that share keys, and the queries of each).  In a `column` two are rows alike.
    """

    tensor: Tensor
    index: tuple[Ex | Span, ...]
    column: bool = False

    @property
    def shape(self) -> Shape:
        """The tile's shape: a view with one Span is a column (rows, 1)."""
        sizes = self.spans
        if len(self.index) != len(self.tensor.shape) or len(sizes) not in (1, 2, 3):
            raise ProgramError(f"{self}: a view needs an index for each of the {len(self.tensor.shape)} axes "
                               f"of {self.tensor.name}, one to three of them spans")  # fmt: skip
        return (prod(sizes), 1) if self.column or len(sizes) == 1 else (prod(sizes[:-1]), sizes[-1])

    @property
    def spans(self) -> tuple[int, ...]:
        """Sizes of the Spans."""
        return tuple(ix.size for ix in self.index if isinstance(ix, Span))

    @property
    def is_row_statistic(self) -> bool:
        """One number a row, like the log-sum-exp; the papers' byte counts leave these out."""
        return self.shape[1] == 1 and (self.column or len(self.spans) == 1)

    @property
    def starts(self) -> tuple[Ex, ...]:
        return tuple(ix.start if isinstance(ix, Span) else ix for ix in self.index)

    @property
    def indices(self) -> frozenset[str]:
        return frozenset().union(*map(indices, self.starts))

    def __str__(self) -> str:
        parts = []
        for ix, size in zip(self.index, self.tensor.shape, strict=False):
            if not isinstance(ix, Span):
                parts.append(str(ix))
            elif ix == Span(0, size):
                parts.append(":")
            elif isinstance(ix.start, Times) and ix.start.factor == ix.size:
                parts.append(f"{ix.start} : ({ix.start.a} + 1)*{ix.size}")
            else:
                parts.append(f"{ix.start} : {ix.start + ix.size}")
        return f"{self.tensor.name}[{', '.join(parts)}]"


@dataclass(frozen=True, slots=True)
class Tile:
    """A 2-D array on chip; whether in SRAM or in registers is the schedule's choice."""

    name: str
    shape: Shape
    dtype: str = "fp32"

    @property
    def T(self) -> Transposed:  # noqa: N802 - numpy's name
        return Transposed(self)

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.shape[1] * dtype_of(self.dtype).bytes

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Transposed:
    """A tile read with its axes exchanged, as an operand."""

    tile: Tile

    @property
    def shape(self) -> Shape:
        return self.tile.shape[1], self.tile.shape[0]

    def __str__(self) -> str:
        return f"{self.tile.name}.T"


Operand: TypeAlias = Tile | Transposed


@dataclass(frozen=True, slots=True)
class When:
    """A node runs only while lo <= index < hi."""

    index: str
    lo: Ex
    hi: Ex


@dataclass(frozen=True, slots=True)
class Load:
    tile: Tile
    view: View
    phase: str
    when: When | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """Write a tile, rounded to the tensor's dtype; `add` reduces into fp32 device memory in any order."""

    view: View
    tile: Tile
    phase: str
    add: bool = False
    when: When | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """out = op(*args, **params), or out += op(...) with `add`."""

    op: str
    out: Tile
    args: tuple[Operand, ...]
    params: tuple[tuple[str, Any], ...]
    phase: str
    add: bool = False
    when: When | None = None

    @property
    def work(self) -> Mapping[str, int]:
        """Amounts by unit for one execution, see ops."""
        return OPS[self.op].work(self.out.shape, tuple(a.shape for a in self.args))


@dataclass(frozen=True, slots=True)
class Loop:
    """`body` for index = lo, ..., hi - 1; bounds depend on grid and outer loop indices."""

    index: str
    lo: Ex
    hi: Ex
    body: tuple[Node, ...]


Node: TypeAlias = Load | Store | Compute | Loop


@dataclass(frozen=True, slots=True)
class Kernel:
    """A grid of independent blocks; the last grid axis runs fastest in launch order.

    `operands_once` marks a library kernel: the papers count its operands once, however its tiles re-read them.
    """

    name: str
    grid: tuple[tuple[str, int], ...]
    body: tuple[Node, ...]
    operands_once: bool = False

    @property
    def blocks(self) -> int:
        return prod(extent for _, extent in self.grid)


@dataclass(frozen=True, slots=True)
class Program:
    """`strides` are those of tensors, by name, that do not lie in device memory as their axes stand (iosim.strides)."""

    name: str
    tensors: tuple[Tensor, ...]
    kernels: tuple[Kernel, ...]
    strides: Mapping[str, Strides] = field(default_factory=dict, hash=False)


def walk(
    body: Sequence[Node], loops: tuple[Loop, ...] = ()
) -> Iterator[tuple[Load | Store | Compute, tuple[Loop, ...]]]:
    """Every load, store and compute below `body` with the loops around it, in program order."""
    for node in body:
        if isinstance(node, Loop):
            yield from walk(node.body, (*loops, node))
        else:
            yield node, loops


def reads(node: Load | Store | Compute) -> frozenset[str]:
    """Names of the tiles that a node reads."""
    if isinstance(node, Load):
        return frozenset()
    if isinstance(node, Store):
        return frozenset((node.tile.name,))
    names = frozenset(tile_of(a).name for a in node.args)
    return names | {node.out.name} if node.add else names


def writes(node: Load | Store | Compute) -> frozenset[str]:
    """Names of the tiles that a node writes."""
    if isinstance(node, Store):
        return frozenset()
    return frozenset((node.tile.name if isinstance(node, Load) else node.out.name,))


def tile_of(operand: Operand) -> Tile:
    """The tile behind an operand."""
    return operand.tile if isinstance(operand, Transposed) else operand


def tiles(node: Load | Store | Compute) -> tuple[Tile, ...]:
    """The tiles that a node touches, the one it makes first."""
    if isinstance(node, Compute):
        return (node.out, *map(tile_of, node.args))
    return (node.tile,)


@dataclass(slots=True)
class Builder:
    """Writes a Program.  Destination first: a new name makes a tile, a tile is overwritten.

    p = Builder("copy")
    X = p.tensor("X", (64, 32), "fp16", "in")
    Y = p.tensor("Y", (64, 32), "fp16", "out")
    with p.kernel("copy", i=4) as (i,):
        p.store(Y[rows(i, 16)], p.load("x", X[rows(i, 16)]))
    program = p.done()
    """

    name: str
    _tensors: list[Tensor] = field(default_factory=list)
    _kernels: list[Kernel] = field(default_factory=list)
    _bodies: list[list[Node]] = field(default_factory=list)
    _phase: str | None = None
    _when: When | None = None

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str, role: Role) -> Tensor:
        self._tensors.append(Tensor(name, shape, dtype, role))
        return self._tensors[-1]

    def scales(self, name: str, of: Tensor, rows: int) -> Tensor:
        """The fp32 scales of an input, one for each run of `rows` rows."""
        shape = (*of.shape[:-2], cdiv(of.shape[-2], rows))
        self._tensors.append(Tensor(name, shape, "fp32", "in", Scales(of.name, rows)))
        return self._tensors[-1]

    @contextmanager
    def kernel(self, name: str, *, operands_once: bool = False, **grid: int) -> Iterator[tuple[Index, ...]]:
        """A kernel over a grid of named axes, outermost first."""
        self._bodies.append([])
        yield tuple(Index(axis) for axis in grid)
        self._kernels.append(Kernel(name, tuple(grid.items()), tuple(self._bodies.pop()), operands_once))

    @contextmanager
    def loop(self, index: str, lo: Ex, hi: Ex) -> Iterator[Index]:
        self._bodies.append([])
        yield Index(index)
        body = tuple(self._bodies.pop())
        self._bodies[-1].append(Loop(index, lo, hi, body))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The unit that a schedule may order: the nodes in it run as one."""
        self._phase, before = name, self._phase
        yield
        self._phase = before

    @contextmanager
    def when(self, index: Index, lo: Ex, hi: Ex) -> Iterator[None]:
        """The nodes in it run only while lo <= index < hi; where that is never, they are left out."""
        self._when, before = When(index.name, lo, hi), self._when
        yield
        self._when = before

    def load(self, name: str, view: View) -> Tile:
        tile = Tile(name, view.shape, view.tensor.dtype)
        self._append(Load(tile, view, self._phase or name, self._when))
        return tile

    def store(self, view: View, tile: Tile, *, add: bool = False) -> None:
        if view.shape != tile.shape:
            raise ProgramError(f"{self.name}: store of tile {tile} {tile.shape} to {view} of shape {view.shape}")
        self._append(Store(view, tile, self._phase or "compute", add, self._when))

    def fill(self, out: str | Tile, *, shape: Shape, value: float, dtype: str = "fp32") -> Tile:
        return self._compute("fill", Tile(out, shape, dtype) if isinstance(out, str) else out, (), shape=shape,
                             value=value)  # fmt: skip

    def matmul(self, out: str | Tile, a: Operand, b: Operand, *, add: bool = False, dtype: str = "fp32") -> Tile:
        """a @ b, accumulated in the dtype of the tile: one narrower than fp32 rounds after each instruction's step."""
        tile = Tile(out, (a.shape[0], b.shape[1]), dtype) if isinstance(out, str) else out
        return self._compute("matmul", tile, (a, b), add=add)

    def mask(
        self,
        x: Tile,
        *,
        row: Ex,
        col: Ex,
        keys: int,
        diagonal: int | None,
        low: int | None = None,
        kept: int = 0,
        queries: int | None = None,
    ) -> Tile:
        """-inf where key col + c is not below `keys`, above query row + r plus `diagonal`, or below it plus `low`.

        None leaves a bound out; `low` does not hide the first `kept` keys.  Where the tile has several heads, each has
        as many rows as `queries` says.
        """
        place: dict[str, Any] = {} if queries is None else {"queries": queries}
        return self._compute(
            "mask", x, (x,), row=row, col=col, keys=keys, diagonal=diagonal, low=low, kept=kept, **place
        )

    def softcap(self, out: str | Tile, x: Operand, *, by: float, cap: float) -> Tile:
        """cap * tanh(by * x / cap)."""
        return self._compute("softcap", out, (x,), by=by, cap=cap)

    def alibi(
        self, out: str | Tile, x: Operand, *, by: float, row: Ex, col: Ex, diagonal: int, head: Ex, heads: int
    ) -> Tile:
        """by * x - slope * |query row + r plus diagonal - key col + c|, with the slope of query head `head`."""
        where: dict[str, Any] = {"row": row, "col": col, "diagonal": diagonal, "head": head, "heads": heads}
        return self._compute("alibi", out, (x,), by=by, **where)

    def block_mask(self, x: Tile, *, row: Ex, col: Ex, blocks: tuple[bytes, ...], height: int, width: int) -> Tile:
        """-inf where the block of `height` queries and `width` keys that a pair is in is 0."""
        return self._compute("block_mask", x, (x,), row=row, col=col, blocks=blocks, height=height, width=width)

    def dropout(self, x: Tile, *, row: Ex, col: Ex, batch: Ex, head: Ex, probability: float) -> Tile:
        """0 where dropout takes a weight: see iosim.philox."""
        where: dict[str, Any] = {"row": row, "col": col, "batch": batch, "head": head}
        return self._compute("dropout", x, (x,), **where, probability=probability)

    def fma(self, out: str | Tile, a: Operand, b: Operand, *, by: float) -> Tile:
        """by * a + b."""
        return self._compute("fma", out, (a, b), by=by)

    def rowmax(self, out: str | Tile, a: Operand) -> Tile:
        return self._compute("rowmax", out, (a,))

    def rowsum(self, out: str | Tile, a: Operand) -> Tile:
        return self._compute("rowsum", out, (a,))

    def max(self, out: str | Tile, a: Operand, b: Operand) -> Tile:
        return self._compute("max", out, (a, b))

    def add(self, out: str | Tile, a: Operand, b: Operand) -> Tile:
        return self._compute("add", out, (a, b))

    def sub(self, out: str | Tile, a: Operand, b: Operand) -> Tile:
        return self._compute("sub", out, (a, b))

    def mul(self, out: str | Tile, a: Operand, b: Operand) -> Tile:
        return self._compute("mul", out, (a, b))

    def div(self, out: str | Tile, a: Operand, b: Operand) -> Tile:
        """a / b, and 0 where b is 0."""
        return self._compute("div", out, (a, b))

    def exp(self, out: str | Tile, x: Operand, m: Operand, *, scale: float = 1.0) -> Tile:
        """exp(scale * (x - m)), and 0 where x is -inf."""
        return self._compute("exp", out, (x, m), scale=scale)

    def log(self, out: str | Tile, a: Operand) -> Tile:
        return self._compute("log", out, (a,))

    def scale(self, out: str | Tile, a: Operand, *, by: float) -> Tile:
        return self._compute("scale", out, (a,), by=by)

    def cast(self, out: str, a: Operand, dtype: str) -> Tile:
        """Round to `dtype`, as a matrix unit's operand is."""
        return self._compute("cast", Tile(out, a.shape, dtype), (a,))

    def copy(self, out: Tile, a: Operand) -> Tile:
        """Overwrite a tile with another of its dtype."""
        return self._compute("cast", out, (a,))

    def done(self) -> Program:
        """The finished program, checked."""
        program = Program(self.name, tuple(self._tensors), tuple(self._kernels))
        check(program)
        return program

    def _compute(
        self, op: str, out: str | Tile, args: tuple[Operand, ...], *, add: bool = False, **params: Any
    ) -> Tile:
        shape = OPS[op].shape(tuple(a.shape for a in args), params)
        tile = Tile(out, shape) if isinstance(out, str) else out
        if tile.shape != shape:
            raise ProgramError(f"{self.name}: {op} gives a tile of shape {shape}, but {tile} has {tile.shape}")
        self._append(Compute(op, tile, args, tuple(params.items()), self._phase or "compute", add, self._when))
        return tile

    def _append(self, node: Load | Store | Compute) -> None:
        w = self._when
        if w is None or isinstance(w.lo, Expr) or isinstance(w.hi, Expr) or w.lo < w.hi:
            self._bodies[-1].append(node)


def check(program: Program) -> None:
    """Raise ProgramError, with the kernel and the node, for the first rule of the language that is broken."""
    written = {t.name for t in program.tensors if t.role == "in"}
    based: set[str] = set()
    if len({t.name for t in program.tensors}) < len(program.tensors):
        raise ProgramError(f"{program.name}: two tensors have one name")
    _check_scales(program)
    if not program.kernels:
        raise ProgramError(f"{program.name}: there is no kernel")
    if len({k.name for k in program.kernels}) < len(program.kernels):
        raise ProgramError(f"{program.name}: two kernels have one name")
    for kernel in program.kernels:
        where = f"{program.name}, kernel {kernel.name}"
        scope = {axis for axis, _ in kernel.grid}
        if len(scope) < len(kernel.grid) or any(not 1 <= extent <= MOST for _, extent in kernel.grid):
            raise ProgramError(f"{where}: grid {dict(kernel.grid)} needs distinct axes of extent 1 to {MOST}")
        _check_body(where, kernel.body, scope, {})
        stores = [n for n, _ in walk(kernel.body) if isinstance(n, Store)]
        for node, _ in walk(kernel.body):
            if isinstance(node, Load):
                _check_load(where, kernel, node, [s for s in stores if s.view.tensor == node.view.tensor], written)
        for store in stores:
            name = store.view.tensor.name
            if store.view.tensor.role == "in":
                raise ProgramError(f"{where}: {store.view} is stored, but {name} is an input")
            if store.add and name not in based:
                raise ProgramError(f"{where}: {store.view} is added to, but no earlier kernel gave {name} a base")
        plain = {s.view.tensor.name for s in stores if not s.add}
        based |= plain
        written |= {s.view.tensor.name for s in stores}
    if missing := [t.name for t in program.tensors if t.name not in written]:
        raise ProgramError(f"{program.name}: nothing stores {', '.join(missing)}")


def _check_scales(program: Program) -> None:
    """Scales are inputs, and there is one for each run of rows of another input."""
    inputs = {t.name: t for t in program.tensors if t.role == "in"}
    for t in program.tensors:
        if t.scales is None:
            continue
        of = inputs.get(t.scales.tensor)
        if of is None or t.role != "in":
            raise ProgramError(f"{program.name}: {t.name} scales {t.scales.tensor}; both must be inputs")
        wanted = (*of.shape[:-2], cdiv(of.shape[-2], t.scales.rows))
        if t.shape != wanted:
            raise ProgramError(f"{program.name}: {t.name} has the shape {t.shape}, one scale for each "
                               f"{t.scales.rows} rows of {of.name} takes {wanted}")  # fmt: skip


def _check_load(where: str, kernel: Kernel, load: Load, stores: Sequence[Store], written: set[str]) -> None:
    """What is loaded was stored before: by an earlier kernel, or by this block.

    Blocks run in any order, so of a tensor that the kernel also stores a block reads its own part: the store depends
    on every grid axis, and load and store are alike in all that depends on the grid.
    """
    name = load.view.tensor.name
    if name not in written and not stores:
        raise ProgramError(f"{where}: {load.view} is loaded, but no earlier kernel stored {name}")
    wide = {axis for axis, extent in kernel.grid if extent > 1}
    for store in stores:
        if missing := sorted(wide - store.view.indices):
            raise ProgramError(f"{where}: {load.view} is loaded, but blocks along {missing[0]} all store {store.view}")
        if _of_grid(store.view, wide) != _of_grid(load.view, wide):
            raise ProgramError(f"{where}: {load.view} is loaded, but another block may store {store.view}")


def _of_grid(view: View, axes: set[str]) -> dict[int, Ex | Span]:
    """What a view says, by tensor axis, where that depends on the grid axes."""
    return {n: ix for n, (ix, start) in enumerate(zip(view.index, view.starts, strict=True)) if indices(start) & axes}


def _check_body(where: str, body: Sequence[Node], scope: set[str], tiles: dict[str, Tile]) -> None:
    """One block body or loop body; `tiles` are the tiles alive when it begins."""
    alive = dict(tiles)
    phases: list[str] = []
    for node in body:
        if isinstance(node, Loop):
            _check_indices(where, f"loop {node.index}", scope, node.lo, node.hi)
            if isinstance(node.hi, int) and isinstance(node.lo, int) and node.hi - node.lo > MOST:
                raise ProgramError(f"{where}: loop {node.index} runs {node.hi - node.lo} times; {MOST} is the most")
            if node.index in scope:
                raise ProgramError(f"{where}: loop index {node.index} is used by an outer loop or the grid")
            _check_body(where, node.body, scope | {node.index}, alive)
            continue
        if missing := sorted(reads(node) - alive.keys()):
            raise ProgramError(f"{where}: {line(node)} reads {missing[0]}, which no tile of this block holds there")
        if not isinstance(node, Compute):
            if any(affine(start) is None for start in node.view.starts):
                raise ProgramError(f"{where}: {node.view} starts at an index that is not affine")
            _check_indices(where, str(node.view), scope, *node.view.starts)
        if node.when is not None:
            _check_indices(where, line(node), scope, Index(node.when.index), node.when.lo, node.when.hi)
        if isinstance(node, Compute):
            values = [v for _, v in node.params if isinstance(v, Expr)]
            _check_indices(where, line(node), scope, *values)
        if not isinstance(node, Store):
            made = node.tile if isinstance(node, Load) else node.out
            if alive.get(made.name, made) != made:
                raise ProgramError(f"{where}: {line(node)} makes a second tile called {made.name}")
            alive[made.name] = made
        if not phases or phases[-1] != node.phase:
            phases.append(node.phase)
    if tiles and len(set(phases)) < len(phases):
        twice = next(p for p in phases if phases.count(p) > 1)
        raise ProgramError(f"{where}: the nodes of phase {twice} are not consecutive")


def _check_indices(where: str, what: str, scope: set[str], *exprs: Ex) -> None:
    for e in exprs:
        if unknown := sorted(indices(e) - scope):
            raise ProgramError(f"{where}: {what} depends on {unknown[0]}, which is no index there")


_INFIX = {"matmul": "@", "add": "+", "sub": "-", "mul": "*", "div": "/"}


def line(node: Load | Store | Compute, names: Mapping[Ex, str] = MappingProxyType({})) -> str:
    """One node as pseudo-code; `names` are bounds that have been given a name."""
    if isinstance(node, Load):
        text = f"{node.tile} = load {node.view}"
    elif isinstance(node, Store):
        text = f"{'add' if node.add else 'store'} {node.view} {'+=' if node.add else '='} {node.tile}"
    else:
        args = [str(a) for a in node.args]
        params = dict(node.params)
        if node.op in _INFIX:
            value = f" {_INFIX[node.op]} ".join(args)
        elif node.op == "exp":
            difference = f"{args[0]} - {args[1]}"
            value = f"exp({difference})" if params["scale"] == 1 else f"exp({params['scale']:.6g} * ({difference}))"
        elif node.op == "softcap":
            value = f"{params['cap']:g} * tanh({args[0]} * {params['by'] / params['cap']:.6g})"
        elif node.op == "alibi":
            distance = f"|{plus(Index('query'), params['diagonal'])} - key|"
            value = f"{_times(args[0], params['by'])} - slope({params['head']}) * {distance}"
        elif node.op == "block_mask":
            value = f"mask({args[0]}: block[query//{params['height']}, key//{params['width']}])"
        elif node.op == "dropout":
            value = f"dropout({args[0]}, {params['probability']:g})"
        elif node.op == "fma":
            value = f"{_times(args[0], params['by'])} + {args[1]}"
        elif node.op == "scale":
            value = f"{args[0]} * {params['by']:.6g}"
        elif node.op == "fill":
            value = f"fill({params['value']:g}, {params['shape'][0]} x {params['shape'][1]})"
        elif node.op == "cast":
            same = node.out.dtype == tile_of(node.args[0]).dtype
            value = args[0] if same else f"{args[0]} as {node.out.dtype}"
        elif node.op == "mask":
            query, high, low = Index("query"), params["diagonal"], params["low"]
            diagonal = "" if high is None else f", key <= {plus(query, high)}"
            window = "" if low is None else f", key >= {plus(query, low)}"
            window += f" or key < {params['kept']}" if params["kept"] else ""
            value = f"mask({args[0]}: key < {params['keys']}{diagonal}{window})"
        else:
            value = f"{node.op}({', '.join(args)})"
        text = f"{node.out} {'+=' if node.add else '='} {value}"
    return text if node.when is None else f"if {_condition(node.when, names)}: {text}"


def _times(what: str, by: float) -> str:
    return what if by == 1 else f"{what} * {by:.6g}"


def _condition(when: When, names: Mapping[Ex, str]) -> str:
    lo, hi = names.get(when.lo, str(when.lo)), names.get(when.hi, str(when.hi))
    if names.get(when.hi) == f"{when.index}_end":
        return f"{when.index} >= {lo}"
    if names.get(when.lo) == f"{when.index}_begin":
        return f"{when.index} < {hi}"
    return f"{lo} <= {when.index} < {hi}"


def show(program: Program) -> str:
    """The program as pseudo-code: tensors, then for each kernel its grid and body, with phases as labels."""
    out = [f"program {program.name}"]
    for t in program.tensors:
        of = "" if t.scales is None else f", scales of {t.scales.rows} rows of {t.scales.tensor} each"
        if (lies := program.strides.get(t.name)) is not None:
            of += f", strides {', '.join(map(str, lies.steps))}" + (f" from {lies.first}" if lies.first else "")
        out.append(f"  {t.role:7} {t.name} ({', '.join(map(str, t.shape))}) {t.dtype}{of}")
    for kernel in program.kernels:
        axes = ", ".join(f"{axis} < {extent}" for axis, extent in kernel.grid)
        out += ["", f"kernel {kernel.name}: {kernel.blocks} blocks ({axes})"]
        out += _show_body(kernel.body, "  ")
    return "\n".join(out)


def _show_body(body: Sequence[Node], pad: str, names: Mapping[Ex, str] = MappingProxyType({})) -> list[str]:
    out, phase = [], None
    for node in body:
        if isinstance(node, Loop):
            known = _bounds(node)
            told: dict[Ex, str] = {}
            for bound, name in known.items():
                if isinstance(bound, Expr):
                    out += _wrapped(f"{pad}{name} = {named(bound, told)}", pad)
                    told[bound] = name
            lo, hi = (known[b] if isinstance(b, Expr) else str(b) for b in (node.lo, node.hi))
            out.append(f"{pad}for {node.index} in {lo} .. {hi}:")
            out += _show_body(node.body, pad + "  ", known)
            phase = None
            continue
        label = "" if isinstance(node, Load) or node.phase in (phase, "compute") else f"# {node.phase}"
        phase, text = node.phase, f"{pad}{line(node, names)}"
        if label and len(text) + 2 + len(label) > WIDTH:
            out.append(f"{pad}{label}")
        elif label:
            text += f"  {label}"
        out += _wrapped(text, pad)
    return out


def _wrapped(text: str, pad: str) -> list[str]:
    return wrap(text, WIDTH, subsequent_indent=pad + "    ", break_long_words=False, break_on_hyphens=False)


def _bounds(loop: Loop) -> dict[Ex, str]:
    """Names for the bounds of a loop, and for the guards on its index, which are often made of the bounds."""
    ends: dict[Ex, str] = {loop.lo: f"{loop.index}_begin", loop.hi: f"{loop.index}_end"}
    edges: dict[Ex, str] = {}
    for node in loop.body:
        if not isinstance(node, Loop) and node.when is not None and node.when.index == loop.index:
            for bound in (node.when.lo, node.when.hi):
                if isinstance(bound, Expr) and bound not in ends:
                    edges.setdefault(bound, f"{loop.index}_edge{len(edges) + 1 if edges else ''}")
    return ends | edges


def extent(start: Ex, size: int, limit: int, env: Mapping[str, Any]) -> Any:
    """How many of the `size` indices from `start` on lie in [0, limit): the clipped size, over ints or arrays."""
    s = at(start, env)
    return most(0, least(s + size, limit) - most(s, 0))
