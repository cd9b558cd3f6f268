"""Predicted times and DRAM bytes of measured rows, from the kernels in iosim/kernels.

A row's implementation, pass and shape name a kernel; what its file says about how it was measured stands in
iosim/data/conditions.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.interpreters.ledger import ledger
from iosim.interpreters.timeline import Timeline, timeline
from iosim.kernels import kernel_names, load_kernel
from iosim.memory.cache import DeviceTraffic, behind_caches
from iosim.memory.counters import H200_DIRTY, with_dirty_lines
from iosim.memory.onchip import footprints
from iosim.problem import Attention
from iosim.study.choose import choose
from iosim.study.validate.rows import Kernel, Row

# A row's kernel by its role, and the kernels of our program that it stands for.
ROLES: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("forward", "attention"): ("attention",),
    ("forward", "split"): ("parts",),
    ("forward", "combine"): ("combine",),
    ("forward", "scale"): ("scale",),
    ("forward", "matmul S"): ("scores",),
    ("forward", "softmax"): ("softmax",),
    ("forward", "matmul O"): ("output",),
    ("backward", "attention"): ("gradients",),
    ("backward", "dot"): ("row sums",),
    ("backward", "convert dQ"): ("convert dQ",),
    ("backward", "matmul dV"): ("dV",),
    ("backward", "matmul dP"): ("dP",),
    ("backward", "product"): ("product",),
    ("backward", "softmax dS"): ("dS",),
    ("backward", "matmul dQ"): ("dQ",),
    ("backward", "matmul dK"): ("dK",),
    ("backward", "copy"): ("copy",),
}


# Bytes of code and parameters that the first kernel of a call reads (h200_counters.csv).
CODE: Mapping[str, int] = {"flash2": 60_000, "standard": 18_000}


@dataclass(frozen=True, slots=True)
class Modelled:
    """A call on a machine: its kernels in time, and what they move as the counters of DRAM show it."""

    timeline: Timeline
    traffic: DeviceTraffic


class NoModelError(Exception):
    """Why a row has no prediction."""


def predicted_time(row: Row, machine: Hardware) -> float:
    """Seconds of a row.  Raises NoModelError."""
    done = modelled(row, machine)
    extra = float(conditions()[row.kind]["call_us"]) * 1e-6
    if row.kernel is None:
        return done.timeline.seconds + extra
    names = _names(row.kernel, row.direction, done)
    return sum(k.makespan_ps for k in done.timeline.kernels if k.name in names) / 1e12 + extra


def predicted_bytes(row: Row, machine: Hardware) -> dict[str, float]:
    """DRAM bytes of a row about one kernel, by quantity.  Raises NoModelError."""
    if row.kernel is None:
        raise NoModelError("no bytes of whole calls")
    done = modelled(row, machine)
    names = _names(row.kernel, row.direction, done)
    read, written = map(sum, zip(*(done.traffic.of_kernel(name) for name in names), strict=True))
    if row.kernel.position == 0 and row.direction == "forward":
        read += CODE.get(row.implementation, 0)
    return {"dram_read_bytes": read, "dram_write_bytes": written}


def _names(kernel: Kernel, direction: str, done: Modelled) -> list[str]:
    """The kernels of our program that a measured kernel stands for.  Raises NoModelError."""
    names = ROLES.get((direction, kernel.role), ())
    found = [k.name for k in done.timeline.kernels if k.name in names]
    if not found:
        raise NoModelError(f"no kernel for {kernel.name}")
    return found


def modelled(row: Row, machine: Hardware) -> Modelled:
    """The call that a row is about.  Raises NoModelError where no kernel stands for it or takes the shape."""
    known = conditions()[row.kind].get("kernels", {})
    name = known.get(row.implementation, row.implementation)
    if row.direction != "forward":
        name = f"{row.implementation}-{row.direction}"
    if name not in kernel_names():
        raise NoModelError(f"no kernel for {name}")
    if row.problem is None:
        raise NoModelError("no shape")
    limit = conditions()[row.kind]["limit_w"]
    power = machine.power and replace(machine.power, limit_w=limit)
    given = _tile(row)
    if name in (known := conditions()[row.kind].get("separate", {})):
        given += (("separate", tuple(known[name])),)
    try:
        return _call(name, _problem(row.problem), replace(machine, power=power), given)
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
    if t.stages == 1:
        given["shares"] = (("v", "k"),)
    return tuple(given.items())


@lru_cache(maxsize=64)
def _call(name: str, a: Attention, machine: Hardware, tile: tuple[tuple[str, Any], ...]) -> Modelled:
    given = {key: dict(value) if key == "shares" else value for key, value in tile}
    flow = load_kernel(name).dataflow()
    schedule, _ = choose(flow, a, machine, given)
    program = flow(a, schedule)
    counted = ledger(program)
    prints = footprints(program, schedule, machine)
    resident = {kernel: f.resident * (machine.processors or 1) for kernel, f in prints.items()}
    clusters = {name: max(schedule.of(name).multicast.values(), default=1) for name in prints}
    traffic = behind_caches(program, counted, machine, resident, schedule.descending, clusters)
    capacity = machine.caches[0].capacity_bytes if machine.caches else None
    shown = traffic if capacity is None else with_dirty_lines(traffic, H200_DIRTY.of(capacity))
    return Modelled(timeline(program, schedule, machine, shown if schedule.kernels else traffic), shown)


@cache
def conditions() -> Mapping[str, Mapping[str, Any]]:
    """How each kind of row was measured."""
    return tomllib.loads(files("iosim").joinpath("data/conditions.toml").read_text(encoding="utf-8"))
