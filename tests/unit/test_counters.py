"""The L2 held against the DRAM counters of an H200's kernels (iosim/data/h200_counters.csv), as iosim programs.

The kernels' tiles are those of their libraries: FlashAttention-2 128 x 128 (d = 64) or 128 x 64 (d = 128) with two
blocks a processor, keys from the last to the first; cuDNN 128 x 128, one; in the backward passes 128 x 128, and
64 x 128 for FlashAttention-2 at d = 128, one block.  cuBLAS names its tiles; it has 132 blocks run at one time and
walks the scores row by row, and those of more than 4096 rows in bands of 4096 rows, in which columns come first.
Both products of `standard` are written here for that.  Two kernels of the unfused backward pass are left out.
"""

from __future__ import annotations

import csv
import re
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import NamedTuple

import pytest

from iosim.dataflows import load_dataflow
from iosim.interpreters.ledger import ledger
from iosim.kernels import load_kernel
from iosim.memory.cache import DeviceTraffic, Method, dram_flows
from iosim.memory.counters import H200_DIRTY
from iosim.problem import Attention
from iosim.program import Builder, Program, rows
from iosim.schedule import Schedule

L2_BYTES, PARTITIONS, PROCESSORS = 62_914_560, 2, 132
CODE = {"flash2": load_kernel("flash2").file.code_bytes, "standard": 18_000}  # read by the first kernel of a call


class Call(NamedTuple):
    impl: str
    direction: str
    batch: int
    heads: int
    n: int
    d: int
    causal: bool

    @property
    def problem(self) -> Attention:
        return Attention(batch=self.batch, heads=self.heads, n_q=self.n, d=self.d, causal=self.causal)


class Row(NamedTuple):
    kernel: str
    grid: int
    read: int
    written: int


class Score(NamedTuple):
    call: Call
    kernel: str
    read: float
    measured_read: int
    written: float
    measured_written: int


def calls() -> list[tuple[Call, list[Row]]]:
    with (files("iosim.data") / "h200_counters.csv").open() as file:
        table = list(csv.DictReader(file))

    def call(r: dict[str, str]) -> Call:
        sizes = (int(r[name]) for name in ("batch", "heads", "n", "d"))
        return Call(r["impl"], r["pass"], *sizes, causal=r["causal"] == "1")

    def row(r: dict[str, str]) -> Row:
        return Row(r["kernel"], int(r["grid"]), int(r["dram_read_bytes"]), int(r["dram_write_bytes"]))

    return [(key, [row(r) for r in own]) for key, own in groupby(table, call)]


def library(c: Call, scores: tuple[int, int], output_rows: int, together: int) -> Program:
    """`standard` as cuBLAS and PyTorch launch it; `together` rows of a softmax are one block here."""
    p, heads, n, d, step = Builder("library"), c.batch * c.heads, c.n, c.d, 64
    Q, K, V = (p.tensor(name, (heads, n, d), "fp16", "in") for name in "QKV")
    S, P = (p.tensor(name, (heads, n, n), "fp16", "scratch") for name in "SP")
    O = p.tensor("O", (heads, n, d), "fp16", "out")
    (bq, bk), tall = scores, n > 4096
    band = 4096 // bq if tall else 1
    with p.kernel("scores", h=heads, a=n // bq // band, j=n // bk, i=band) as (h, a, j, i):
        with p.loop("t", 0, d // step) as t:
            p.load("q", Q[h, rows(a * band + i, bq), rows(t, step)])
            p.load("k", K[h, rows(j, bk), rows(t, step)])
        p.store(S[h, rows(a * band + i, bq), rows(j, bk)], p.fill("s", shape=(bq, bk), value=0))
    with p.kernel("softmax", h=heads, i=n // together) as (h, i):
        p.store(P[h, rows(i, together), rows(0, n)], p.load("x", S[h, rows(i, together), rows(0, n)]))
    with p.kernel("output", h=heads, i=n // output_rows) as (h, i):
        with p.loop("t", 0, n // step) as t:
            p.load("pr", P[h, rows(i, output_rows), rows(t, step)])
            p.load("v", V[h, rows(t, step), rows(0, d)])
        p.store(O[h, rows(i, output_rows), rows(0, d)], p.fill("o", shape=(output_rows, d), value=0))
    return p.done()


def copy(c: Call) -> Program:
    """What makes dO or O contiguous before FlashAttention-2's backward pass."""
    p, n = Builder("copy"), c.batch * c.heads * c.n
    strided, contiguous = p.tensor("X", (n, c.d), "fp16", "in"), p.tensor("Y", (n, c.d), "fp16", "out")
    with p.kernel("copy", i=n // 32) as (i,):
        p.store(contiguous[rows(i, 32)], p.load("x", strided[rows(i, 32)]))
    return p.done()


def tile(kernel: str) -> tuple[int, int]:
    found = re.search(r"_hsh_(\d+)x(\d+)_", kernel)
    assert found, kernel
    return int(found[1]), int(found[2])


def behind(program: Program, method: Method | None, resident: dict[str, int], down: tuple[str, ...]) -> DeviceTraffic:
    each = {k.name: resident.get(k.name, PROCESSORS) for k in program.kernels}
    options = {"partitions": PARTITIONS, "descending": down, "method": method}
    return dram_flows(program, ledger(program), L2_BYTES, each, **options)  # type: ignore[arg-type]


def modelled(c: Call, found: list[Row], method: Method | None) -> list[tuple[str, Row, tuple[int, int]]]:
    """(kernel, measured, (read, written)) of the kernels of a call that are modelled, in order."""
    names: tuple[str, ...]
    resident: dict[str, int] = {}
    down: tuple[str, ...] = ()
    if c.impl == "standard" and c.direction == "fwd":
        together = {4096: 4, 16384: 8}.get(c.n, 1)
        program = library(c, tile(found[0].kernel), tile(found[2].kernel)[0], together)
        resident = {"softmax": (2 if c.n > 1024 else 16) * PROCESSORS // together}  # warps that take a row, or blocks
        names = ("scores", "softmax", "output")
    elif c.impl == "standard":
        program = load_dataflow("standard-backward")(c.problem, Schedule(block_q=256, block_k=128, softmax_cols=c.n))
        names = ("dV", "dP", "dS", "", "dK", "dQ")  # dS takes two kernels
    elif c.direction == "bwd":
        block_q = 64 if c.impl == "flash2" and c.d == 128 else 128
        program = load_dataflow("flash-backward")(c.problem, Schedule(block_q=block_q, block_k=128))
        names = ("row sums", "gradients", "convert dQ")
    elif len(found) == 2:
        splits = found[0].grid * 64 // (c.batch * c.heads * c.n)
        s = Schedule(block_q=64, block_k=256 if c.d == 64 else 128, splits=splits)
        program, names, resident = load_dataflow("split-kv")(c.problem, s), ("parts", "combine"), {}
    else:
        wide = c.impl == "cudnn" or c.d == 64
        program = load_dataflow("flash2")(c.problem, Schedule(block_q=128, block_k=128 if wide else 64))
        names = ("attention",)
        if c.impl == "flash2":
            resident, down = {"attention": 2 * PROCESSORS}, ("j",)
    traffic = behind(program, method, resident, down)
    copies = found[: len(found) - len(names)] if c.direction == "bwd" and c.impl != "standard" else []
    copied = behind(copy(c), method, {}, ()).of_kernel("copy")
    modelled = zip(names, found[len(copies) :], strict=False)
    return [("copy", row, copied) for row in copies] + [(n, row, traffic.of_kernel(n)) for n, row in modelled if n]


@cache
def scores(method: Method | None) -> list[Score]:
    out = []
    for call, found in calls():
        own = modelled(call, found, method)
        written = H200_DIRTY.counted(moved for _, _, moved in own)
        for n, ((name, row, (read, _)), counted) in enumerate(zip(own, written, strict=True)):
            code = CODE.get(call.impl, 0) if n == 0 and call.direction == "fwd" else 0
            out.append(Score(call, name, read + code, row.read, counted, row.written))
    return out


def errors(method: Method | None) -> tuple[list[float], list[float]]:
    """Absolute percentage errors of reads over 0.1 MB and of writes over 20 MB."""
    reads = [100 * abs(s.read / s.measured_read - 1) for s in scores(method) if s.measured_read > 1e5]
    writes = [100 * abs(s.written / s.measured_written - 1) for s in scores(method) if s.measured_written > 20e6]
    assert len(reads) >= 90
    assert len(writes) >= 50
    return reads, writes


@pytest.mark.parametrize("method", [pytest.param(None, marks=pytest.mark.slow), "closed form"])
def test_dram_bytes_of_the_measured_kernels(method: Method | None) -> None:
    reads, writes = errors(method)
    assert sum(reads) / len(reads) <= 2
    assert max(reads) <= 16
    assert sum(writes) / len(writes) <= 5
    assert max(writes) <= 25


@pytest.mark.slow
def test_the_closed_form_of_the_measured_kernels_is_near_the_simulation() -> None:
    pairs = zip(scores("closed form"), scores(None), strict=True)
    apart = [(abs(fast.read / slow.read - 1), fast) for fast, slow in pairs if slow.measured_read > 1e5]
    assert max(apart)[0] <= 0.07, max(apart)  # the product that reads what a softmax has written
    assert sum(error for error, _ in apart) / len(apart) <= 0.005


def test_dirty_lines_leave_with_the_next_kernels_or_stay() -> None:
    # 29.6 MB are dirty after the flush: all of it leaves beside a kernel that reads much and writes nothing, none
    # beside one that only writes; the counter is what was written and what the dirty lines changed by.
    only_reads, only_writes = (1e9, 0.0), (0.0, 1e9)
    assert H200_DIRTY.counted([only_reads]) == [pytest.approx(29.6e6, rel=1e-4)]
    assert H200_DIRTY.counted([only_writes]) == [pytest.approx(1e9)]
    assert H200_DIRTY.counted([only_reads, only_writes])[1] == pytest.approx(1e9 - 29.6e6, rel=1e-4)
    assert H200_DIRTY.counted([only_writes], before=0.0) == [pytest.approx(1e9 - 29.6e6, rel=1e-4)]
    # As much read as written: 29.6 * (1 - 1 / 1.69) = 12.1 MB more.
    assert H200_DIRTY.counted([(1e9, 1e9)]) == [pytest.approx(1e9 + 12.085e6, rel=1e-5)]
