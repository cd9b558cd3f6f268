"""What is left behind a cache, from a kernel's flows and grid alone: for programs that are too long to simulate.

The cache keeps the last of what was brought in.  Hashed sets make its edge soft: of what was used x bytes ago,

    P_hit(x) = P(Poisson(WAYS * x / capacity) < WAYS)

is still there.  The blocks of a wave walk their loops together, so that a tile which several of them read is fetched
once.  What is fetched again is a tile that another wave has used before, x bytes ago: all that a wave, or the blocks
in between, brought in.  What another kernel used, u of the way through it, and this kernel comes to u of its own way
through, was used x = (1 - u) * its bytes + those of kernels in between + u * the bytes of this kernel ago.

With several partitions, bytes are counted with their replicas: what m blocks of a wave read is asked for by
h = min(m, partitions) of them, and is kept h + 1 - h / partitions times, as its home may be one that did not ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import exp, gcd, prod
from typing import TYPE_CHECKING

from iosim.interpreters.ledger import Direction, Flow, union_bytes
from iosim.memory.lru import WAYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from iosim.interpreters.ledger import Ledger
    from iosim.program import Kernel, Program

POINTS = 64  # at which the hits from one kernel to another are averaged


def closed_form(
    program: Program, ledger: Ledger, capacity: int, partitions: int, resident: Mapping[str, int]
) -> list[tuple[int, int]]:
    """(read, written) DRAM bytes of each flow of `ledger`, behind a cache of `capacity` bytes in all."""
    out: list[tuple[int, int]] = []
    before: list[_Kernel] = []
    for kernel in program.kernels:
        own = tuple(f for f in ledger.flows if f.kernel == kernel.name)
        now = _Kernel(kernel, own, capacity, partitions, max(1, min(resident[kernel.name], kernel.blocks)))
        out += now.moved(before)
        before.append(now)
    return out


def kept(x: float, capacity: int) -> float:
    """P_hit(x): the share of what was used x bytes ago that a cache of `capacity` bytes still holds."""
    mean = WAYS * x / capacity if capacity else float("inf")
    if mean > 700:  # exp(-mean) is next to the smallest float
        return 0.0
    term = total = exp(-mean)
    for k in range(1, WAYS):
        term *= mean / k
        total += term
    return min(1.0, total)


def distinct_tiles(grid: Sequence[tuple[str, int]], named: frozenset[str], blocks: int) -> int:
    """How many tiles the first `blocks` blocks in launch order use of a view that names the axes `named`."""
    if blocks == 0:
        return 0
    if not grid:
        return 1
    (axis, _), inner = grid[0], grid[1:]
    slices, rest = divmod(blocks, prod(n for _, n in inner))
    whole = prod(n for name, n in inner if name in named)
    if axis in named:
        return slices * whole + distinct_tiles(inner, named, rest)
    return whole if slices else distinct_tiles(inner, named, rest)


@dataclass(frozen=True)
class _Kernel:
    kernel: Kernel
    flows: tuple[Flow, ...]
    capacity: int
    partitions: int
    wave: int  # blocks that run at one time

    def moved(self, before: Sequence[_Kernel]) -> list[tuple[int, int]]:
        """(read, written) of each flow; `before` are the kernels that ran before, in order."""
        out = []
        reads, writes = _once(self.flows, besides="write"), _once(self.flows, besides="read")
        for flow, first_read, first_written in zip(self.flows, reads, writes, strict=True):
            again = self._again(flow, first_written if flow.direction == "write" else first_read)
            lost = 1.0 - self._left_by(flow.tensor, before)
            read = 0 if flow.direction == "write" else round(first_read * lost + again)
            if flow.direction == "add":
                write = read
            else:
                write = 0 if flow.direction == "read" else round(first_written + again)
            out.append((min(read, flow.hbm_bytes), min(write, flow.hbm_bytes)))
        return out

    def _again(self, flow: Flow, first: int) -> float:
        """Bytes of a flow that are fetched, or made dirty, beyond those that the kernel touches for the first time."""
        later = max(0.0, flow.hbm_bytes * self._visits(flow) / self.kernel.blocks - first)
        return later * (1.0 - kept(self._footprint(max(self.wave, self._stride(flow))), self.capacity))

    def _left_by(self, tensor: str, before: Sequence[_Kernel]) -> float:
        """The share of a tensor that is still there, from the kernel that touched it last, when this one gets to it."""
        between = 0.0
        for kernel in reversed(before):
            if any(f.tensor == tensor for f in kernel.flows):
                there, here = kernel._all, self._all
                at = [(n + 0.5) / POINTS for n in range(POINTS)]
                return sum(kept((1 - u) * there + between + u * here, self.capacity) for u in at) / POINTS
            between += kernel._all
        return 0.0

    @cached_property
    def _all(self) -> float:
        return self._footprint(self.kernel.blocks)

    def _named(self, flow: Flow) -> frozenset[str]:
        return flow.node.view.indices & {axis for axis, _ in self.kernel.grid}

    def _footprint(self, blocks: int) -> float:
        """Bytes with replicas that so many consecutive blocks touch."""
        by_tensor: dict[str, float] = {}
        for flow in self.flows:
            named = self._named(flow)
            distinct = distinct_tiles(self.kernel.grid, named, min(blocks, self.kernel.blocks))
            share = distinct / prod(n for axis, n in self.kernel.grid if axis in named)
            touched = self._copies(flow) * flow.unique_bytes * share
            by_tensor[flow.tensor] = max(by_tensor.get(flow.tensor, 0.0), touched)
        return sum(by_tensor.values())

    def _copies(self, flow: Flow) -> float:
        """How often what a flow touches is in the cache."""
        if flow.direction != "read":
            return 1.0
        readers = self.wave / distinct_tiles(self.kernel.grid, self._named(flow), self.wave)
        asking = min(readers, self.partitions)
        return asking + 1 - asking / self.partitions

    def _visits(self, flow: Flow) -> int:
        """Pairs of a wave and a tile that some of its blocks use."""
        grid, named = self.kernel.grid, self._named(flow)
        waves = -(-self.kernel.blocks // self.wave)
        tail = [axis not in named for axis, n in grid if n > 1]
        if tail == sorted(tail):  # blocks that share a tile follow each other
            run = prod(n for axis, n in grid if axis not in named)
            cut = (waves - 1) - (waves - 1) // (run // gcd(run, self.wave))  # runs that a new wave interrupts
            return self.kernel.blocks // run + cut
        return min(self.kernel.blocks, waves * distinct_tiles(grid, named, self.wave))

    def _stride(self, flow: Flow) -> int:
        """Blocks from one use of a tile to the next."""
        named, stride = self._named(flow), 1
        for axis, n in reversed(self.kernel.grid):
            if n > 1 and axis not in named:
                break
            stride *= n
        return stride


def _once(flows: Iterable[Flow], besides: Direction) -> list[int]:
    """Bytes of its tensor that each flow, those in direction `besides` left out, is the first to touch."""
    out: list[int] = []
    seen: dict[str, list[Flow]] = {}
    for flow in flows:
        before = seen.get(flow.tensor, [])
        after = before if flow.direction == besides else [*before, flow]
        out.append(union_bytes(after) - union_bytes(before))
        seen[flow.tensor] = after
    return out
