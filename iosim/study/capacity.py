"""Decode and chunked prefill over context, batch and new tokens: what a report of serving shows.

How many sequences fit, and where DRAM stops to bound and the processors' own work begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import as_file, files

from iosim.hardware import load_hardware
from iosim.memory.counters import dirty_lines
from iosim.problem import Attention
from iosim.study.ragged import Engine, Lengths, require_prefix
from iosim.study.run import Note
from iosim.study.serving import Request, Server, Step

MEMORY = ("dram", "l2", "copy")  # units that move what others work on
MEASURED = "h200-sxm"  # the machine of the measurements


@dataclass(frozen=True, slots=True)
class Room:
    """What sequences of one context hold of device memory; `sequences` is how many fit."""

    context: int
    bytes: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Held:
    """A decode call measured on an H200 beside its prediction, in seconds; `floor` is the host's own time.

    The call came after a fill that flushes the L2: its dirty lines are written meanwhile, and an event is waited for
    (iosim/data/conditions.toml).  Both are in the prediction.
    """

    problem: Attention
    kernel: str
    measured: float
    predicted: float
    floor: float

    @property
    def host_bound(self) -> bool:
        """Whether the host's time may be what was measured."""
        return self.measured < self.floor

    @property
    def error_pct(self) -> float:
        """Of the prediction."""
        return 100 * (self.predicted / self.measured - 1)


@dataclass(frozen=True)
class Capacity:
    """Steps by (context, batch) with one new token, and by new tokens at one context and batch; and who fits.

    `unpacked` are the latter where each query head has tiles of its own; empty where no heads share K and V.

    `reserved` bytes of device memory are not for the cache.
    """

    server: Server
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    decode: Mapping[tuple[int, int], Step]
    chunks: Mapping[int, Step]
    at: tuple[int, int]
    rooms: tuple[Room, ...]
    reserved: int
    held: tuple[Held, ...]
    unpacked: Mapping[int, Step] = field(default_factory=dict)

    @property
    def crossing(self) -> int | None:
        """The fewest new tokens a sequence with which no memory bounds any more; None where there is none."""
        bound = [n for n, step in self.chunks.items() if step.bound in (*MEMORY, "launch")]
        last = max(bound, default=0)
        return next((n for n in self.chunks if n > last), None)

    def fits(self, context: int, batch: int) -> bool:
        """Whether the cache of so many sequences fits."""
        room = next(r for r in self.rooms if r.context == context)
        return batch <= room.sequences


def capacity(
    server: Server,
    contexts: Sequence[int],
    batches: Sequence[int],
    news: Sequence[int],
    reserved: int = 0,
    note: Note = lambda _: None,
) -> Capacity:
    """Time steps of alike sequences; the new tokens are tried at the middle context and batch."""
    require_prefix(server.cache, max(contexts))
    decode = {}
    for context in contexts:
        for batch in batches:
            note(f"decode of {batch} sequences of {context:,} tokens")
            decode[context, batch] = server.step([Request(max(0, context - 1))] * batch)
    at = contexts[len(contexts) // 2], batches[len(batches) // 2]
    chunks, unpacked = {}, {}
    apart = replace(server, given={**server.given, "pack_gqa": False})
    for new in news:
        note(f"{new} new tokens a sequence")
        requests = [Request(max(0, at[0] - new), new)] * at[1]
        chunks[new] = server.step(requests)
        if server.packed:
            unpacked[new] = apart.step(requests)
    room = max(0, server.hardware.hbm.capacity_bytes - reserved)
    each = {context: server.resident_bytes(context) for context in contexts}
    rooms = tuple(Room(context, bytes_, room // bytes_) for context, bytes_ in each.items())
    note("decode rows measured on an H200")
    return Capacity(server, tuple(contexts), tuple(batches), decode, chunks, at, rooms, reserved, held(), unpacked)


@cache
def held() -> tuple[Held, ...]:
    """The decode rows of the shipped measurements, forward, beside split-kv's time on an H200 by the balanced rule."""
    from iosim.study.validate.readers import read
    from iosim.study.validate.score import host_floors
    from iosim.study.validate.times import conditions

    with as_file(files("iosim").joinpath("data", "h200_attention.csv")) as path:
        rows = [r for r in read(path) if r.problem is not None and r.problem.n_q == 1 and "time" in r.measured]
    floors, machine, out = host_floors(), load_hardware(MEASURED), []
    call = float(conditions()["calls"]["call_us"]) * 1e-6
    for row in rows:
        if row.problem is None or row.implementation not in floors or row.direction != "forward":
            continue
        a = replace(row.problem, causal=False, causal_align="bottom-right")
        step = Engine(a, machine).step([Lengths(1, a.n_k)] * a.batch)
        counted = dirty_lines(machine).counted([(step.dram_read_bytes, step.dram_write_bytes)])[0]
        dirty = max(0.0, counted - step.dram_write_bytes) / (machine.hbm.bandwidth * machine.hbm.mixed_efficiency)
        predicted = step.seconds + call + dirty
        out.append(Held(a, row.implementation, row.measured["time"], predicted, floors[row.implementation]))
    return tuple(out)
