"""Which tiles of a pair of loops hold something to compute, and which of them need a mask: shared by the dataflows.

Query i sees the keys from i + diagonal + 1 - window (a sliding window) to i + diagonal (a causal mask), those inside
0 .. n_k - 1.  Seen from a key, the queries that see it are as many consecutive ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

from iosim.blockmask import BlockMask
from iosim.errors import InputError
from iosim.index import Ex, Index, cdiv, least, lookup, most
from iosim.problem import FEATURES, Attention
from iosim.program import Builder, Span, Tensor, Tile, rows
from iosim.schedule import Schedule

# Weights are at most 1, and an fp8 number below 2^-9 is 0: kernels multiply them by 2^8, and their sum with them.
GAIN = 2**8
TILE = 16  # rows or keys, which blocks of so many and more have room for
MOST_RUNS = 64  # of blocks in a row of a block mask: a loop for each
Edges: TypeAlias = tuple[Ex, Ex, Ex, Ex]


def key_tiles(a: Attention, i: Ex, block_q: int, block_k: int) -> Edges:
    """(lo, left, right, hi) for query tile i: the key tiles lo .. hi - 1 hold a key that some query of the tile sees.

    All its queries see all keys of the tiles left .. right - 1; the others need a mask.
    """
    first, end = i * block_q, least((i + 1) * block_q, a.n_q)  # of the queries
    lo: Ex = 0
    left: Ex = 0
    right: Ex = a.n_k // block_k
    hi = cdiv(a.n_k, block_k)
    if a.causal:
        hi = cdiv(most(0, least(end + a.diagonal, a.n_k)), block_k)
        right = least(hi, most(0, least(first + a.diagonal + 1, a.n_k)) // block_k)
    if a.window is not None:
        low = a.diagonal + 1 - a.window
        lo = _tile_of(first + low, (a.n_q - 1) // block_q * block_q + low, a.n_k, block_k)
        left = least(hi, cdiv(most(0, end - 1 + low), block_k))
        right = _from(left, right, hi)
    return lo, left, right, hi


def key_runs(a: Attention, i: Ex, block_q: int, block_k: int) -> list[tuple[str, Edges]]:
    """The loops over the key tiles that query tile i visits: a name and `key_tiles`' numbers for each.

    One loop "j", and where a window leaves global tokens one before it, "s", over their tiles.  With a block mask loops
    "j", "j2", ... over the runs of blocks of its row, as many as the row with most has.
    """
    lo, left, right, hi = key_tiles(a, i, block_q, block_k)
    if a.block_mask is not None:
        runs = _runs(a, a.block_mask, i, block_q, block_k)
        return [(name, (most(lo, first), left, right, least(hi, end))) for name, (first, end) in runs]
    if not a.global_tokens:
        return [("j", (lo, left, right, hi))]
    tokens = min(a.global_tokens, a.n_k)
    tiles, whole = cdiv(tokens, block_k), least(hi, tokens // block_k)
    if a.causal:
        whole = least(whole, most(0, i * block_q + a.diagonal + 1) // block_k)
    return [("s", (0, 0, whole, least(hi, tiles))), ("j", (most(lo, tiles), left, right, hi))]


def _runs(a: Attention, mask: BlockMask, i: Ex, block_q: int, block_k: int) -> list[tuple[str, tuple[Ex, Ex]]]:
    """For each run of blocks in a row of the mask: a loop's name, and its first and end key tile at query tile i.

    Raises InputError for tiles that do not divide blocks, and for more runs than MOST_RUNS.
    """
    height, width = mask.size(a.n_q, a.n_k)
    _require_tiles(mask, (block_q, height), (block_k, width))
    return _loops("j", mask, "row", i // (height // block_q), width // block_k, int(cdiv(a.n_k, block_k)))


def _require_tiles(mask: BlockMask, *sizes: tuple[int, int]) -> None:
    """Raise InputError unless query tiles, then key tiles, divide the blocks of a mask: pairs of both."""
    blocks = len(mask.rows), len(mask.rows[0])
    for name, what, count, (tile, size) in zip(("block_q", "block_k"), ("rows", "keys"), blocks, sizes, strict=True):
        if size % tile:
            raise InputError(f"{name}: {tile} does not divide the {size} {what} of a block of {mask.origin}; give a "
                             f"tile that does, or {what} in a multiple of {TILE * count}")  # fmt: skip


def _loops(
    index: str, mask: BlockMask, line: str, at: Ex, tiles: int, most_tiles: int
) -> list[tuple[str, tuple[Ex, Ex]]]:
    """Loops over the runs in line number `at` of a mask: a name, and the first and end tile of `tiles` a block."""
    runs = [mask.runs(row) for row in range(len(mask.rows))]
    count = max(map(len, runs))
    if count > MOST_RUNS:
        n = next(n for n, some in enumerate(runs) if len(some) == count)
        raise InputError(
            f"block_mask: {mask.origin}: {line} {n} has {count} runs of blocks; {MOST_RUNS} is the most, as each is a "
            f"loop"
        )
    out = []
    for n in range(max(1, count)):
        ends = [some[n] if n < len(some) else (0, 0) for some in runs]
        first = tuple(end[0] * tiles for end in ends)
        last = tuple(min(end[1] * tiles, most_tiles) for end in ends)
        name = f"{index}{n + 1}" if n else index
        out.append((name, (lookup(f"first {name}", first, at), lookup(f"end {name}", last, at))))
    return out


def query_runs(a: Attention, j: Ex, block_q: int, block_k: int) -> list[tuple[str, Edges]]:
    """The loops over the query tiles that see key tile j: a name and `query_tiles`' numbers for each.

    One loop "i"; with a block mask loops "i", "i2", ... over the runs of blocks of its column.
    """
    lo, left, right, hi = query_tiles(a, j, block_q, block_k)
    mask = a.block_mask
    if mask is None:
        return [("i", (lo, left, right, hi))]
    height, width = mask.size(a.n_q, a.n_k)
    _require_tiles(mask, (block_q, height), (block_k, width))
    tiles, at = int(cdiv(a.n_q, block_q)), j // (width // block_k)
    runs = _loops("i", mask.turned, "column", at, height // block_q, tiles)
    return [(name, (most(lo, first), left, right, least(hi, end))) for name, (first, end) in runs]


def query_tiles(a: Attention, j: Ex, block_q: int, block_k: int) -> Edges:
    """(lo, left, right, hi) for key tile j: the query tiles lo .. hi - 1 hold a query that sees some key of the tile.

    All keys of the tile are seen by all queries of the tiles left .. right - 1; the others need a mask, and so do all
    of a key tile that reaches beyond n_k.
    """
    first, end = j * block_k, least((j + 1) * block_k, a.n_k)  # of the keys
    greatest, tiles = (a.n_k - 1) // block_k * block_k, cdiv(a.n_q, block_q)
    lo: Ex = 0
    left: Ex = 0
    right = hi = tiles
    if a.window is not None:
        low = a.window - a.diagonal
        hi = cdiv(most(0, least(end - 1 + low, a.n_q)), block_q)
        right = least(hi, _tile_of(first + low, greatest + low, a.n_q, block_q))
    if a.causal:
        lo = _tile_of(first - a.diagonal, greatest - a.diagonal, a.n_q, block_q)
        left = least(hi, cdiv(most(0, end - 1 - a.diagonal), block_q))
    if a.global_tokens:  # all queries see them, a tile that has none but such keys whole
        tokens = min(a.global_tokens, a.n_k)
        some, only = (least(1, most(0, n - j)) * tiles for n in (cdiv(tokens, block_k), tokens // block_k))
        hi = most(hi, some)
        right = most(right, only)
    if a.n_k % block_k:  # j - n_k // block_k + 1 is 1 for the last key tile, less for the others
        left = most(left, least(hi, (j - a.n_k // block_k + 1) * tiles))
    return lo, left, right if a.window is None else _from(left, right, hi), hi


def _from(left: Ex, right: Ex, hi: Ex) -> Ex:
    """max(left, right), where neither is above hi."""
    return hi if right == hi else most(left, right)


def _tile_of(x: Ex, greatest: int, n: int, size: int) -> Ex:
    """The tile of index x of n, the first one for an x below 0, the number of tiles for an x of n or more.

    `greatest` is the greatest value of x.
    """
    if greatest < n:
        tile: Ex = most(0, x) // size
    else:
        beyond = most(0, least(1, x - n + 1))  # 1 from n on
        tile = most(0, least(x, n - 1)) // size + beyond
    return tile


def operand(p: Builder, x: Tile, dtype: str) -> Tile:
    """A loaded tile as the matrix unit takes it: cast, in a phase of its own, where it is stored in another dtype."""
    if x.dtype == dtype:
        return x
    with p.phase(f"cast {x.name}"):
        return p.cast(f"{x.name} {dtype}", x, dtype)


@dataclass(frozen=True, slots=True)
class QueryTile:
    """The rows of a query tile: `queries` of each of `heads` query heads that share a K/V head."""

    heads: int
    queries: int

    @classmethod
    def of(cls, a: Attention, s: Schedule) -> QueryTile:
        """That of a schedule: block_q queries of one head, or with `pack_gqa` about as many rows of all heads that fit.

        Raises InputError for what a packed tile is not written for: where heads differ in more than their queries.
        """
        if not s.pack_gqa:
            return cls(1, s.block_q)
        if a.group == 1:
            raise InputError("pack_gqa: changes nothing where no query heads share a K/V head")
        if beside := unpackable(a):
            raise InputError(f"pack_gqa: is not written for {FEATURES[beside][1]}")
        heads = max(n for n in range(1, min(a.group, s.block_q) + 1) if a.group % n == 0)
        return cls(heads, s.block_q // heads)

    def grid(self, a: Attention) -> dict[str, Any]:
        """Grid axes of all query tiles: batch, K/V heads, runs of their query heads, runs of queries."""
        return {"b": a.batch, "kv": a.kv_heads, "g": a.group // self.heads, "i": cdiv(a.n_q, self.queries)}

    @property
    def rows(self) -> int:
        """Of the tile."""
        return self.heads * self.queries

    @property
    def packed(self) -> int | None:
        """Rows of each head where there are several."""
        return self.queries if self.heads > 1 else None

    def place(self, b: Ex, first: Ex, i: Ex) -> tuple[Ex | Span, ...]:
        """Index of the tile that begins at query head `first`, in a tensor with a row for each query of each head."""
        return b, Span(first, self.heads) if self.heads > 1 else first, rows(i, self.queries)


def unpackable(a: Attention) -> str:
    """Which of a problem's FEATURES tells the heads of a packed tile apart by more than their queries; "" for none."""
    apart = ("fp8", "ALiBi", "bias", "sinks", "dropout", "block mask")
    return next((feature for feature in a.features if feature in apart), "")


def query_tiles_of(a: Attention, s: Schedule) -> int:
    """Query tiles of all heads."""
    return int(prod(QueryTile.of(a, s).grid(a).values()))


def operands(p: Builder, a: Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V."""
    return (
        p.tensor("Q", (a.batch, a.heads, a.n_q, a.d), a.dtype, "in"),
        p.tensor("K", (a.batch, a.kv_heads, a.n_k, a.d), a.dtype, "in"),
        p.tensor("V", (a.batch, a.kv_heads, a.n_k, a.d_v), a.dtype, "in"),
    )


@dataclass(frozen=True, slots=True)
class Scores:
    """What changes the scores of a problem: a soft-cap, ALiBi and a bias, in this order.

    `bias` is the tensor that is added, if any.
    """

    attention: Attention
    bias: Tensor | None

    @classmethod
    def of(cls, p: Builder, a: Attention) -> Scores:
        return cls(a, None if a.bias is None else p.tensor("bias", a.bias_shape, a.out_dtype, "in"))

    @property
    def scale(self) -> float:
        """What scores are multiplied by at the exp: the first operation that changes them scales them too."""
        return self.attention.scale if self._plain else 1.0

    @property
    def _plain(self) -> bool:
        a = self.attention
        return a.softcap is None and not a.alibi and a.bias is None

    def load(self, p: Builder, b: Ex, h: Ex, i: Ex, j: Ex, block_q: int, block_k: int) -> Tile | None:
        """The tile of the bias for query tile i and key tile j."""
        if self.bias is None:
            return None
        batch, heads = self.bias.shape[:2]
        view = b if batch > 1 else 0, h if heads > 1 else 0, rows(i, block_q), rows(j, block_k)
        return p.load("bias", self.bias[view])

    def change(
        self, p: Builder, x: Tile, bias: Tile | None, h: Ex, i: Ex, j: Ex, block_q: int, block_k: int, by: float
    ) -> float:
        """Change the scores x, which `by` scales; returns what still has to scale them."""
        return self.add(p, x, bias, h, i, j, block_q, block_k, self.cap(p, x, by))

    def cap(self, p: Builder, x: Tile, by: float) -> float:
        """The first of the changes, the soft-cap."""
        if self.attention.softcap is None:
            return by
        p.softcap(x, x, by=by, cap=self.attention.softcap)
        return 1.0

    def add(
        self, p: Builder, x: Tile, bias: Tile | None, h: Ex, i: Ex, j: Ex, block_q: int, block_k: int, by: float
    ) -> float:
        """The changes after it."""
        a = self.attention
        if a.alibi:
            row, col = i * block_q, j * block_k
            p.alibi(x, x, by=by, row=row, col=col, diagonal=a.diagonal, head=h, heads=a.heads)
            by = 1.0
        if bias is not None:
            p.fma(x, x, bias if bias.dtype == "fp32" else p.cast("bias fp32", bias, "fp32"), by=by)
            by = 1.0
        return by


def cap_slope(p: Builder, a: Attention, x: Tile) -> Tile | None:
    """1 - (x / c)^2: how much capped scores x move with those that were capped; None without a soft-cap c."""
    if a.softcap is None:
        return None
    slope = p.mul("slope", x, x)
    return p.fma(slope, slope, p.fill("one", shape=(1, 1), value=1), by=-1 / a.softcap**2)


def is_masked(a: Attention) -> bool:
    """Whether some mask hides pairs."""
    return a.causal or a.window is not None or a.block_mask is not None


def drop(p: Builder, a: Attention, x: Tile, b: Ex, h: Ex, i: Ex, j: Ex, block_q: int, block_k: int) -> None:
    """Set weights `x` of query tile i and key tile j to 0 where dropout takes them; what is left is not scaled yet."""
    if a.dropout:
        p.dropout(x, row=i * block_q, col=j * block_k, batch=b, head=h, probability=a.dropout)


def sinks_of(p: Builder, a: Attention) -> Tensor | None:
    """The logits of the attention sinks, one a query head."""
    return p.tensor("sinks", (a.heads,), "fp32", "in") if a.sinks else None


def mask_keys(
    p: Builder, a: Attention, x: Tile, i: Ex, j: Ex, block_q: int, block_k: int, *, visited: bool = False,
    packed: int | None = None,
) -> None:  # fmt: skip
    """Mask the scores `x` of query tile i and key tile j; of one that is `visited` by key_runs, at its edges.

    `packed`: rows of each head, where the tile has several.
    """
    high = a.diagonal if a.causal else None
    low = None if a.window is None else a.diagonal + 1 - a.window
    if a.block_mask is not None and not visited:
        height, width = a.block_mask.size(a.n_q, a.n_k)
        row, col = i * block_q, j * block_k
        p.block_mask(x, row=row, col=col, blocks=a.block_mask.rows, height=height, width=width)
    p.mask(
        x, row=i * block_q, col=j * block_k, keys=a.n_k, diagonal=high, low=low, kept=a.global_tokens, queries=packed
    )


def mask_edges(
    p: Builder, a: Attention, x: Tile, i: Ex, j: Ex, block_q: int, block_k: int, along: Index, edges: Edges,
    packed: int | None = None,
) -> None:  # fmt: skip
    """Mask the scores `x` of query tile i and key tile j in the tiles at the two `edges` of the loop `along` i or j."""
    lo, left, right, hi = edges
    for first, end in ((lo, left), (right, hi)):
        with p.when(along, first, end):
            mask_keys(p, a, x, i, j, block_q, block_k, visited=True, packed=packed)
