"""Device memory of standard attention and of FlashAttention over N under named accountings, and the guide's table.

What "the memory of attention" is depends on what one counts.  An accounting says it: which passes, and in which dtype
the scores are kept.  The bytes come from the tensors of the tile programs and their lifetimes (iosim/memory/step.py),
not from formulas.

The guide is Moore Threads' page on optimising FlashAttention for MP31; its table says neither what it counts nor for
which head dimension.  Its figures (iosim/data/guide_memory.csv) are those of one head,

    standard        16 N^2 bytes: four N x N matrices in fp32, as training with fp32 scores holds them
    FlashAttention  8 N d bytes with d = 128: Q, K, V and O in fp16, and no log-sum-exp
    ratio           MB (10^6 bytes) over MiB (2^20 bytes), as printed
"""

from __future__ import annotations

import csv
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import as_file, files
from typing import Any, Literal, TypeAlias

from iosim.dataflows import load_dataflow
from iosim.hardware import Hardware, load_hardware
from iosim.memory.peak import peak_extra_bytes
from iosim.memory.step import HELD, pass_memory, step_memory
from iosim.problem import MAX_N, Attention
from iosim.schedule import Schedule

Pass: TypeAlias = Literal["forward", "training"]
ALGORITHMS: Mapping[str, tuple[str, str]] = {  # and the dataflows of their two passes
    "standard": ("standard", "standard-backward"),
    "flash": ("flash2", "flash-backward"),
}
GUIDE_D = 128  # of the guide's FlashAttention column: the only d at which 8 N d gives its figures
UNITS = {"MB": 10**6, "GB": 10**9}
MIB = 2**20
MEASURED = ("standard", "flash2", "cudnn")  # implementations whose calls stand beside


@dataclass(frozen=True, slots=True)
class Accounting:
    """What is counted: a pass, and the dtype of the scores that `standard` keeps in device memory."""

    name: str
    computes: Pass
    scores: str
    words: str


ACCOUNTINGS = (
    Accounting("forward", "forward", "data", "forward pass, S and P in the data's dtype"),
    Accounting("fp32", "forward", "fp32", "forward pass, S and P in fp32"),
    Accounting("training", "training", "fp32", "training step, S, P and their gradients in fp32"),
)


@dataclass(frozen=True, slots=True)
class Tensors:
    """What is alive when an algorithm holds most: (name, bytes) of tensors with a score a pair, and of all others."""

    scores: tuple[tuple[str, int], ...]
    others: tuple[tuple[str, int], ...]

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.score_bytes + sum(size for _, size in self.others)

    @property
    def score_bytes(self) -> int:
        """The part that grows with N^2."""
        return sum(size for _, size in self.scores)


@dataclass(frozen=True, slots=True)
class Printed:
    """A line of the guide's table, as it is printed."""

    n: int
    standard_value: float
    standard_unit: str
    flash_value: float
    flash_unit: str
    ratio: int

    @property
    def standard_bytes(self) -> int:
        """What the guide counts for standard attention: 16 N^2."""
        return 16 * self.n**2

    @property
    def flash_bytes(self) -> int:
        """What it counts for FlashAttention: 8 N d with d = 128."""
        return 8 * self.n * GUIDE_D

    @property
    def rounded(self) -> bool:
        """Whether the printed figure of standard attention is 16 N^2, rounded to its digits."""
        digits = 1 if self.standard_value % 1 else 0
        return round(self.standard_bytes / UNITS[self.standard_unit], digits) == self.standard_value

    @property
    def one_unit_ratio(self) -> float:
        """The ratio of both counts in bytes: N / 64."""
        return self.standard_bytes / self.flash_bytes

    @property
    def mixed_ratio(self) -> float:
        """The number of MB of the one over the number of MiB of the other."""
        return self.standard_bytes / UNITS["MB"] / (self.flash_bytes / MIB)


@dataclass(frozen=True, slots=True)
class Call:
    """The measured peak of one call on an H200, and that of the list of tensors that stands for it, in bytes."""

    implementation: str
    problem: Attention
    measured_bytes: int
    listed_bytes: int

    @property
    def bytes_a_score(self) -> float:
        """Measured bytes over query heads x N x N."""
        a = self.problem
        return self.measured_bytes / (a.batch * a.heads * a.n_q * a.n_k)


@dataclass(frozen=True)
class Memory:
    """Memory of both algorithms: `held` by accounting, algorithm and N.

    `longest` is the largest N that a machine holds, by machine, accounting and algorithm; None where none fits.
    """

    shape: Mapping[str, Any]
    lengths: tuple[int, ...]
    machines: tuple[Hardware, ...]
    held: Mapping[tuple[str, str, int], Tensors]
    longest: Mapping[tuple[str, str, str], int | None]
    guide: tuple[Printed, ...]
    calls: tuple[Call, ...]

    @property
    def problem(self) -> Attention:
        """The longest."""
        return Attention(n_q=self.lengths[-1], **self.shape)

    def ratio(self, accounting: str, n: int) -> float:
        """Standard attention's bytes over FlashAttention's."""
        return self.held[accounting, "standard", n].bytes / self.held[accounting, "flash", n].bytes


def memory(lengths: Sequence[int], shape: Mapping[str, Any], machines: Sequence[Hardware]) -> Memory:
    """Memory of problems of `shape` (fields of Attention but n_q) at every length, and what machines hold.

    Raises InputError for a problem out of range.
    """
    problems = {n: Attention(n_q=n, **shape) for n in lengths}
    held = {
        (c.name, name, n): tensors(a, name, c) for c in ACCOUNTINGS for name in ALGORITHMS for n, a in problems.items()
    }
    longest = {
        (m.name, c.name, name): longest_held(shape, name, c, m.hbm.capacity_bytes)
        for m in machines
        for c in ACCOUNTINGS
        for name in ALGORITHMS
    }
    return Memory(shape, tuple(lengths), tuple(machines), held, longest, guide(), measured_calls())


def tensors(a: Attention, algorithm: str, accounting: Accounting) -> Tensors:
    """What is alive in device memory when `algorithm` holds most."""
    tile = Schedule(block_q=64, block_k=64, scores=accounting.scores)  # no tensor depends on the tile
    forward, backward = (load_dataflow(name) for name in ALGORITHMS[algorithm])
    if accounting.computes == "forward":
        step = pass_memory(forward(a, tile))
    else:
        after = backward(a, tile)
        before = forward(replace(a, lse=any(t.name == "L" and t.role == "in" for t in after.tensors)), tile)
        step = step_memory(before, after)
    alive = [(t.tensor, t.bytes) for t in step.alive]
    square = _score_names(algorithm)
    return Tensors(
        tuple(item for item in alive if item[0] in square), tuple(item for item in alive if item[0] not in square)
    )


@cache
def _score_names(algorithm: str) -> frozenset[str]:
    """The tensors with one element a (query, key) pair, told by their shape in a problem where no two sizes agree."""
    probe, tile = Attention(n_q=48, n_k=80, d=16), Schedule(block_q=16, block_k=16)
    programs = [load_dataflow(name)(probe, tile) for name in ALGORITHMS[algorithm]]
    square = {t.name for p in programs for t in p.tensors if t.shape[-2:] == (probe.n_q, probe.n_k)}
    return frozenset(square | {held.name for held in HELD if held.like in square})


def longest_held(shape: Mapping[str, Any], algorithm: str, accounting: Accounting, capacity: int) -> int | None:
    """The largest N whose tensors fit into `capacity` bytes; None where not even one query does."""

    def fits(n: int) -> bool:
        return tensors(Attention(n_q=n, **shape), algorithm, accounting).bytes <= capacity

    return bisect_left(range(1, MAX_N + 1), True, key=lambda n: not fits(n)) or None


@cache
def guide() -> tuple[Printed, ...]:
    """The guide's memory table as it is printed."""
    text = files("iosim").joinpath("data", "guide_memory.csv").read_text(encoding="utf-8")
    return tuple(
        Printed(
            n=int(r["n"]),
            standard_value=float(r["standard_value"]),
            standard_unit=r["standard_unit"],
            flash_value=float(r["flash_value"]),
            flash_unit=r["flash_unit"],
            ratio=int(r["ratio"]),
        )
        for r in csv.DictReader(text.splitlines())
    )


@cache
def measured_calls() -> tuple[Call, ...]:
    """Forward calls without a mask on an H200, of one head and of a batch of about 16,384 queries, by shape."""
    from iosim.study.validate.readers import read

    with as_file(files("iosim").joinpath("data", "h200_attention.csv")) as path:
        rows = read(path)
    processors = load_hardware("h200-sxm").processors
    out = []
    for r in rows:
        a = r.problem
        if a is None or "peak_extra_bytes" not in r.measured or r.direction != "forward" or a.causal:
            continue
        if r.implementation in MEASURED and (a.n_q, a.d) == (a.n_k, GUIDE_D) and a.kv_heads == a.heads:
            listed = peak_extra_bytes(r.implementation, "forward", a, processors)
            out.append(Call(r.implementation, a, int(r.measured["peak_extra_bytes"]), listed or 0))
    return tuple(sorted(out, key=lambda c: (c.problem.heads, c.problem.n_q, MEASURED.index(c.implementation))))
