"""Checks of outputs with a row for each query: whole blocks of rows, all of them within a budget, else sampled ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import TYPE_CHECKING, Protocol

import numpy as np

from iosim.check.outcome import Check, Index, Result, Total
from iosim.interpreters.narrow import narrowed
from iosim.interpreters.region import Box, Range, nodes, reach, region
from iosim.interpreters.replay import Mapper, Replay, Replayer, Source
from iosim.parallel import workers
from iosim.program import Program, Span, Store

if TYPE_CHECKING:
    from iosim.problem import Attention

BAND_PAIRS = 2**22  # pairs of a band: the scores of standard attention then take 16 MiB twice
SAMPLED = 2  # a sample has at most the budget over this, as it makes whole heads for a few of their rows
FEW_BANDS, MOST_BANDS = 8, 64  # of a sample, as far as the budget and whole blocks allow
MOST_HEADS = 4096
_ORACLE_PAIRS = 2**20  # of a step of the float64 computation
_ORACLE_ROWS, _ORACLE_MOST = 32, 2**24  # but so many rows, up to so many pairs: each step reads all keys


@dataclass(frozen=True, slots=True)
class Band:
    """Some rows of some heads.  `sampled`: others will not be computed."""

    batch: Range
    heads: Range
    rows: Range
    sampled: bool = False

    @property
    def rows_count(self) -> int:
        return prod(hi - lo for lo, hi in (self.batch, self.heads, self.rows))

    def place(self, at: Index) -> str:
        """Where an element of an array (batch * heads, rows, ...) of the band lies."""
        batch, head = divmod(at[0], self.heads[1] - self.heads[0])
        place = [f"batch {self.batch[0] + batch}", f"head {self.heads[0] + head}", f"row {self.rows[0] + at[1]}"]
        return ", ".join(place + [f"column {column}" for column in at[2:]])


class Case(Protocol):
    """The operands of some heads, and what their rows should come to."""

    def compare(self, totals: Sequence[Total], band: Band, inner: Mapper) -> list[Result]:
        """Every program's result for a band."""


def check_rows(
    a: Attention, programs: Sequence[Program], seed: int, budget: int, case_of: Callable[[Sequence[Band]], Case]
) -> list[Check]:
    """Check programs band by band; `case_of` takes bands of the same heads."""
    totals = [Total(program) for program in programs]
    rows = 0
    with workers() as threads:
        for group in by_heads(bands(a, programs, seed, budget)):
            case = case_of(group)
            outer: Mapper = threads.map if len(group) > 1 else map
            inner: Mapper = map if len(group) > 1 else threads.map
            for results in outer(lambda band: case.compare(totals, band, inner), group):  # noqa: B023 - used at once
                for total, result in zip(totals, results, strict=True):
                    total.results.append(result)
            rows += sum(band.rows_count for band in group)
    return [total.check(rows, a.batch * a.heads * a.n_q) for total in totals]


def rows_memory(a: Attention, programs: Sequence[Program]) -> int:
    """Bytes of a step of the float64 computation and of the largest band of one head."""
    most = 0
    for program in programs:
        rows = min(a.n_q, block_rows(a, programs))
        boxes = region(program, demand(program, Band((0, 1), (0, 1), (0, rows)))).touched
        made = [t.name for t in program.tensors if t.role != "in" and t.name in boxes]
        most = max(most, sum(4 * prod(hi - lo for lo, hi in boxes[name]) for name in made))
    return 28 * oracle_rows(a.n_k) * a.n_k + most


def oracle_rows(keys: int) -> int:
    """Rows of one step of the float64 computation, for `keys` keys over all heads of a band."""
    return max(1, _ORACLE_PAIRS // keys, min(_ORACLE_ROWS, _ORACLE_MOST // keys))


def run(total: Total, band: Band, give: Source, inner: Mapper, scores: bool = False) -> Replay:
    """Replay a program as far as the band asks."""
    wanted = demand(total.program, band, scores)
    if band.sampled:
        return Replayer(narrowed(total.program, wanted)).run(give, wanted, inner)
    replayer = total.idle.pop() if total.idle else Replayer(total.program)
    done = replayer.run(give, wanted, inner)
    total.idle.append(replayer)
    return done


def demand(program: Program, band: Band, scores: bool = False) -> dict[str, Box]:
    """The band's part of every output, and of S where asked."""
    lead = (band.batch, band.heads, band.rows)
    wanted = [t for t in program.tensors if t.role == "out" or (scores and t.name == "S")]
    return {t.name: (*lead, *((0, n) for n in t.shape[3:])) for t in wanted}


def block_rows(a: Attention, programs: Sequence[Program], *, narrow: bool = False) -> int:
    """Rows that a band must be a multiple of so that it holds whole blocks of every kernel of every program.

    Where that is very many, the most rows of a block: some kernels then run blocks twice.  `narrow`: rows of a tile
    instead, for bands that leave out of a block what they do not need.
    """
    sizes = {1}
    for program in programs:
        for kernel in program.kernels:
            first = {axis: (0, 1) for axis, _ in kernel.grid}
            for node, ranges in nodes(kernel.body, first):
                if isinstance(node, Store) and node.view.tensor.shape[:3] == (a.batch, a.heads, a.n_q):
                    span = node.view.index[2]
                    lo, hi = reach(node.view, ranges)[2]
                    size = span.size if isinstance(span, Span) else 1
                    sizes.add(size if narrow else hi - lo)
    together = lcm(*sizes)
    return together if together <= max(1024, max(sizes)) else max(sizes)


def rewrites(program: Program, name: str) -> int:
    """How often an element of an output is stored at most, by the loops and grid axes that its view does not name."""
    times = 0
    for kernel in program.kernels:
        for node, ranges in nodes(kernel.body, {axis: (0, n) for axis, n in kernel.grid}):
            if isinstance(node, Store) and node.view.tensor.name == name:
                times += prod(hi - lo for index, (lo, hi) in ranges.items() if index not in node.view.indices)
    return times


def padded(a: Attention, programs: Sequence[Program]) -> tuple[int, int]:
    """Rows and keys of one head as the programs' tiles cover them: replay computes whole tiles."""
    rows, keys = a.n_q, a.n_k
    for program in programs:
        tensors = {t.name: t for t in program.tensors}
        for name, box in region(program, demand(program, Band((0, 1), (0, 1), (0, a.n_q)))).touched.items():
            length = [hi - lo for lo, hi in box]
            if tensors[name].shape[:3] == (a.batch, a.heads, a.n_q):
                rows = max(rows, length[2])
            if tensors[name].shape[:3] == (a.batch, a.kv_heads, a.n_k):
                keys = max(keys, length[2])
            if tensors[name].shape == (a.batch, a.heads, a.n_q, a.n_k):
                keys = max(keys, length[3])
    return rows, keys


def bands(a: Attention, programs: Sequence[Program], seed: int, budget: int) -> Iterator[Band]:
    """The rows to check, ordered by head."""
    block, (rows_of_head, keys) = block_rows(a, programs), padded(a, programs)
    pairs = rows_of_head * keys
    size = max(block, BAND_PAIRS // keys // block * block)
    if a.batch * a.heads <= MOST_HEADS and a.batch * a.heads * pairs <= budget:
        together = max(1, BAND_PAIRS // pairs)  # small heads in one band
        together = together // a.group * a.group or 1
        many = max(1, together // a.heads)
        for batches in cut(a.batch, many):
            for heads in cut(a.heads, together):
                for rows in cut(a.n_q, size):
                    yield Band(batches, heads, rows)
        return
    budget //= SAMPLED
    few = 1 << (max(1, budget // keys).bit_length() - 1)  # a part of a tile, where keys are that many
    block = min(block_rows(a, programs, narrow=True), few)
    size = max(block, min(BAND_PAIRS, budget // FEW_BANDS) // keys // block * block)
    starts = range(0, a.n_q, size)
    count = min(MOST_BANDS, max(1, budget // (min(size, rows_of_head) * keys)), a.batch * a.heads * len(starts))
    random = np.random.default_rng([seed, count])
    chosen: set[tuple[int, int, int]] = set()
    kv_heads = random.permutation(a.kv_heads)
    while len(chosen) < count:
        n = len(chosen)
        batch, member, place = (int(random.integers(k)) for k in (a.batch, a.group, len(starts)))
        place = {0: len(starts) - 1, 1: 0}.get(n, place)
        kv = int(kv_heads[n] if n < a.kv_heads else random.integers(a.kv_heads))
        chosen.add((batch, kv * a.group + member, place))
    for batch, head, place in sorted(chosen):
        rows = starts[place], min(starts[place] + size, a.n_q)
        yield Band((batch, batch + 1), (head, head + 1), rows, sampled=True)


def cut(count: int, size: int) -> list[Range]:
    return [(lo, min(lo + size, count)) for lo in range(0, count, size)]


def by_heads(bands: Iterable[Band]) -> Iterator[list[Band]]:
    """Runs of bands of the same heads."""
    group: list[Band] = []
    for band in bands:
        if group and (band.batch, band.heads) != (group[0].batch, group[0].heads):
            yield group
            group = []
        group.append(band)
    if group:
        yield group
