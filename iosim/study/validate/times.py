"""Predicted times and DRAM bytes of measured rows, from the kernels in iosim/kernels.

A row's implementation, pass and shape name a kernel; what its file says about how it was measured stands in
iosim/data/conditions.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from typing import Any, TypeAlias

from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.interpreters.ledger import ledger
from iosim.interpreters.timeline import Timeline, timeline
from iosim.kernels import kernel_names, load_kernel
from iosim.memory.cache import DeviceTraffic, behind_caches
from iosim.memory.counters import dirty_lines, l2_counted, with_dirty_lines
from iosim.memory.onchip import Footprint, footprints
from iosim.problem import Attention
from iosim.program import Program
from iosim.schedule import Schedule
from iosim.study.choose import choose
from iosim.study.validate.rows import Kernel, Row

Changes: TypeAlias = tuple[tuple[str, float], ...]  # dotted fields of a kernel's file, and what they shall be

# A row's kernel by its role, and the kernels of our program that it stands for; of several, which a call begins with,
# its place in the call tells.
ROLES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("forward", "attention"): ("attention",),
    ("forward", "split"): ("parts",),
    ("forward", "combine"): ("combine",),
    ("forward", "scale"): ("scale",),
    ("forward", "matmul S"): ("scores",),
    ("forward", "softmax"): ("softmax",),
    ("forward", "matmul O"): ("output",),
    ("backward", "attention"): ("gradients",),
    ("backward", "copy"): ("copy O", "copy dO", "copy"),
    ("backward", "dot"): ("row sums",),
    ("backward", "convert dQ"): ("convert dQ",),
    ("backward", "matmul dV"): ("dV",),
    ("backward", "matmul dP"): ("dP",),
    ("backward", "product"): ("product",),
    ("backward", "softmax dS"): ("dS",),
    ("backward", "matmul dQ"): ("dQ",),
    ("backward", "matmul dK"): ("dK",),
}


@dataclass(frozen=True)
class Modelled:
    """A call on a machine: its kernels in time, and what they move.  `code_bytes` are read by the first of them."""

    program: Program
    schedule: Schedule
    machine: Hardware
    prints: Mapping[str, Footprint]
    traffic: DeviceTraffic
    code_bytes: int
    dirty: bool  # lines that a flush, or unfused calls before it, have left dirty in the L2 take DRAM time

    @cached_property
    def timeline(self) -> Timeline:
        """The call in time."""
        traffic = with_dirty_lines(self.traffic, dirty_lines(self.machine)) if self.dirty else self.traffic
        return timeline(self.program, self.schedule, self.machine, traffic)

    @cached_property
    def dram(self) -> Mapping[str, tuple[float, float]]:
        """(read, written) DRAM bytes of each kernel, as counters show them after a fill that flushes the L2."""
        moved = {k.name: self.traffic.of_kernel(k.name) for k in self.program.kernels}
        first = self.program.kernels[0].name
        moved[first] = moved[first][0] + self.code_bytes, moved[first][1]
        written = dirty_lines(self.machine).counted(moved.values())
        return {name: (read, w) for (name, (read, _)), w in zip(moved.items(), written, strict=True)}

    @cached_property
    def l2(self) -> Mapping[str, int]:
        """Bytes of the L2 of each kernel, as its counter shows them."""
        return l2_counted(self.program, self.schedule, self.machine, self.prints, self.traffic)


class NoModelError(Exception):
    """Why a row has no prediction."""


def predicted_time(row: Row, machine: Hardware, changes: Changes = ()) -> float:
    """Seconds of a row; `changes` are fields of its kernel's file that differ.  Raises NoModelError."""
    done = modelled(row, machine, changes)
    extra = float(conditions()[row.kind]["call_us"]) * 1e-6
    if row.kernel is None:
        return done.timeline.seconds + extra
    name = _kernel_of(row, row.kernel, done.program)
    return sum(k.makespan_ps for k in done.timeline.kernels if k.name == name) / 1e12 + extra


def predicted_dram(row: Row, machine: Hardware) -> tuple[float, float]:
    """Bytes that a row's kernel reads from DRAM and writes there.  Raises NoModelError."""
    if row.kernel is None:
        raise NoModelError("no kernel")
    done = modelled(row, machine)
    return done.dram[_kernel_of(row, row.kernel, done.program)]


def predicted_l2(row: Row, machine: Hardware) -> float:
    """Bytes of the L2 in a row's kernel, as its counter shows them.  Raises NoModelError."""
    if row.kernel is None:
        raise NoModelError("no kernel")
    done = modelled(row, machine)
    return done.l2[_kernel_of(row, row.kernel, done.program)]


def _kernel_of(row: Row, kernel: Kernel, program: Program) -> str:
    """The kernel of our program that a row's kernel is.  Raises NoModelError."""
    names = ROLES.get((row.direction, kernel.role), ())
    found = [k.name for k in program.kernels if k.name in names]
    nth = kernel.position if len(found) > 1 else 0
    if nth >= len(found):
        raise NoModelError(f"no kernel for {kernel.name}")
    return found[nth]


def modelled(row: Row, machine: Hardware, changes: Changes = ()) -> Modelled:
    """The call that a row is about.  Raises NoModelError where no kernel stands for it or takes the shape."""
    condition = conditions()[row.kind]
    known = condition.get("kernels", {}) | condition.get("on", {}).get(row.machine, {})
    name = known.get(row.implementation, row.implementation)
    if row.direction != "forward":
        name = f"{row.implementation}-{row.direction}"
    if name not in kernel_names():
        raise NoModelError(f"no kernel for {name}")
    if row.problem is None:
        raise NoModelError("no shape")
    limit = conditions()[row.kind]["limit_w"]
    strided = row.direction == "backward" and bool(conditions()[row.kind]["strided"])
    flushed = bool(condition.get("flushed", False))
    power = machine.power and replace(machine.power, limit_w=limit)
    kernel = load_kernel(name).with_values(changes)
    given = _tile(row)
    if (parts := kernel.splits(row.problem, machine.processors)) > 1:
        given += (("splits", parts),)
    if name in (known := conditions()[row.kind].get("separate", {})):
        given += (("separate", tuple(known[name])),)
    try:
        return _call(name, _problem(row.problem), replace(machine, power=power), given, strided, flushed, changes)
    except InputError as error:
        raise NoModelError(str(error)) from None


def _problem(a: Attention) -> Attention:
    """The problem as its kernel sees it: with one query, query heads that share a key head are rows of a tile."""
    if a.n_q == 1 and a.group > 1:
        a = replace(a, n_q=a.group, heads=a.kv_heads, causal=False)
    return a


def _tile(row: Row) -> tuple[tuple[str, Any], ...]:
    """What a row of a tile sweep settles."""
    if row.tile is None:
        return ()
    t = row.tile
    given: dict[str, Any] = {"block_q": t.block_q, "block_k": t.block_k, "stages": (t.stages,), "groups": t.warps // 4}
    if t.registers is not None:
        given |= {"registers": t.registers, "spills": t.spills or 0}
    return tuple(given.items())


@lru_cache(maxsize=64)
def _call(
    name: str, a: Attention, machine: Hardware, tile: tuple[tuple[str, Any], ...], strided: bool, flushed: bool,
    changes: Changes,
) -> Modelled:  # fmt: skip
    given = dict(tile)
    kernel = load_kernel(name).with_values(changes)
    flow = kernel.dataflow(strided=strided)
    schedule, _ = choose(flow, a, machine, given)
    program = flow(a, schedule)
    prints = footprints(program, schedule, machine)
    resident = {kernel: f.resident * (machine.processors or 1) for kernel, f in prints.items()}
    multicast = {name: schedule.of(name).multicast for name in prints}
    traffic = behind_caches(program, ledger(program), machine, resident, schedule.descending, multicast)
    return Modelled(program, schedule, machine, prints, traffic, kernel.file.code_bytes,
                    flushed or bool(kernel.file.kernels))  # fmt: skip


@cache
def conditions() -> Mapping[str, Mapping[str, Any]]:
    """How each kind of row was measured."""
    return tomllib.loads(files("iosim").joinpath("data/conditions.toml").read_text(encoding="utf-8"))
