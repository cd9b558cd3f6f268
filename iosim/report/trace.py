"""A recorded run in the Trace Event Format, which Perfetto and chrome://tracing open.

What is written (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): an object with
`traceEvents`, complete events (ph "X"), metadata (ph "M"), counters (ph "C"), flows (ph "s" and, bound to the slice
around them, ph "f" with bp "e") and instants (ph "i").  `ts` and `dur` are microseconds, given to the nanosecond.
Slices of one track never overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import iosim
from iosim.interpreters.recording import Flight, Ran, Recording, merged, use_of
from iosim.report.layout import paragraph
from iosim.report.text import STALL_WORDS

if TYPE_CHECKING:
    from iosim.study.pipeline import Trace

SCHEMA = "iosim.trace/1"
NAMES = {"dram": "DRAM", "l2": "L2", "copy": "copy engine", "sram": "SRAM", "matrix": "matrix unit", "exp": "exp unit",
         "alu": "ALU", "vector": "vector lanes", "issue": "issue slots"}  # fmt: skip
BIN_PS = 100_000  # of the bandwidth counters, at least
BINS = 400  # of the bandwidth counters, at most
PROGRAM = 1  # pid of the track of kernels

Event = dict[str, Any]


def us(ps: int) -> float:
    """Microseconds, to the nanosecond."""
    return round(ps / 1e6, 3)


@dataclass(slots=True)
class _Writer:
    """Events of one process after another, moved by `offset` ps and cut to `start` .. `end`."""

    events: list[Event] = field(default_factory=list)
    pid: int = PROGRAM
    tid: int = 0
    offset: int = 0
    start: int = 0
    end: int = 0
    flows: int = 0

    def process(self, name: str) -> None:
        self.pid, self.tid = self.pid + 1, 0
        self.meta("process_name", name=name)
        self.meta("process_sort_index", sort_index=self.pid)

    def thread(self, name: str) -> int:
        self.tid = max(self.tid, 100 * self.pid) + 1  # not that of the process, which viewers take for its main thread
        self.meta("thread_name", name=name)
        self.meta("thread_sort_index", sort_index=self.tid)
        return self.tid

    def meta(self, what: str, **args: Any) -> None:
        self.events.append({"ph": "M", "name": what, "pid": self.pid, "tid": self.tid, "args": args})

    def slice(self, name: str, kind: str, start: int, end: int, args: Mapping[str, Any]) -> None:
        """A complete event on the current track, if any of it is in the window."""
        a, b = us(max(start, self.start) + self.offset), us(min(end, self.end) + self.offset)
        if b > a:
            self.events.append({"ph": "X", "name": name, "cat": kind, "pid": self.pid, "tid": self.tid, "ts": a,
                                "dur": round(b - a, 3), "args": dict(args)})  # fmt: skip

    def counter(self, name: str, at: int, **values: float) -> None:
        self.events.append({"ph": "C", "name": name, "pid": self.pid, "ts": us(at + self.offset), "args": values})

    def flow(self, name: str, leave: tuple[int, int, int], arrive: tuple[int, int, int]) -> None:
        """From a slice to another: each a (pid, tid, ps) inside of it."""
        self.flows += 1
        common = {"name": name, "cat": "load to use", "id": self.flows}
        for ph, (pid, tid, at) in (("s", leave), ("f", arrive)):
            end = {"bp": "e"} if ph == "f" else {}
            self.events.append({"ph": ph, **common, "pid": pid, "tid": tid, "ts": us(at + self.offset), **end})


def document(trace: Trace, request: Mapping[str, Any]) -> dict[str, Any]:
    """The trace as one JSON object; `request` repeats what was asked for."""
    writer = _Writer()
    writer.meta("process_name", name=f"{trace.run.dataflow.name} on {trace.run.hardware.name}")
    writer.meta("process_sort_index", sort_index=PROGRAM)
    writer.thread("kernels")
    timed = trace.kernels
    begin = 0
    for kernel in timed:
        writer.offset, writer.start, writer.end = begin, 0, kernel.makespan_ps
        blocks = {"blocks": kernel.blocks, "processors": kernel.processors, "resident blocks": kernel.resident}
        writer.slice("launch", "launch", 0, kernel.launch_ps, {})
        writer.slice(kernel.name, "kernel", kernel.launch_ps, kernel.makespan_ps, blocks)
        begin += kernel.makespan_ps
    begin = 0
    for kernel in timed:
        if (recording := trace.recordings.get(kernel.name)) is not None:
            writer.offset = begin + recording.launch_ps
            writer.start, writer.end = recording.window(*trace.iterations(recording))
            _kernel(writer, trace, recording)
        begin += kernel.makespan_ps
    a = trace.run.problem
    return {
        "otherData": {
            "schema": SCHEMA,
            "iosim": iosim.__version__,
            "request": dict(request),
            "problem": a.as_dict(),
            "dataflow": trace.run.dataflow.name,
            "hardware": trace.run.hardware.name,
            "notes": trace.notes(),
        },
        "displayTimeUnit": "ns",
        "traceEvents": writer.events,
    }


def _kernel(w: _Writer, trace: Trace, r: Recording) -> None:
    called = trace.run.hardware.called
    w.process(f"{r.kernel}: {called} {r.processor}, units")
    for name, spells in r.units.items():
        w.thread(NAMES.get(name, name))
        for spell in merged(spells):
            if spell.cause is not None:
                w.slice(f"waits: {spell.cause}", "stall", spell.start, spell.end, {"why": STALL_WORDS[spell.cause]})
            elif spell.who is None:
                w.slice("other processors", "other", spell.start, spell.end, {})
            else:
                name_, args = _named(spell.who)
                w.slice(name_, "work", spell.start, spell.end, {**args, "block": spell.who.block})
    _counters(w, r)
    for block in r.blocks:
        if trace.block in (None, block):
            w.process(f"{r.kernel}: {called} {r.processor}, block {block}")
            _block(w, r, block)
    for note in trace.cuts(r):
        w.events.append({"ph": "i", "name": note, "cat": "note", "s": "g", "pid": w.pid, "tid": 0,
                         "ts": us(w.end + w.offset)})  # fmt: skip


def _named(who: Any) -> tuple[str, dict[str, Any]]:
    return who.phase, {"iteration": who.turn, "group": f"{who.role or 'worker'} {who.rank}"}


def _counters(w: _Writer, r: Recording) -> None:
    """SRAM in use, and the share of the bandwidth that is used; each step of a counter holds until the next."""
    before = [held for time, held in r.sram() if time <= w.start]
    w.counter("SRAM in use", w.start, bytes=before[-1] if before else 0)
    for time, held in r.sram():
        if w.start < time <= w.end:
            w.counter("SRAM in use", time, bytes=held)
    copy = [(s.start, s.end) for s in r.units["copy"] if s.cause is None]
    span = max(1, w.end - w.start)
    bins = max(1, min(BINS, span // BIN_PS))
    for name, spans in {**r.chip, "copy": copy}.items():
        last = -1.0
        for n, share in enumerate(use_of(spans, w.start, w.start + span, bins)):
            if (percent := round(100 * share, 1)) != last:
                w.counter(f"{NAMES[name]} used", w.start + span * n // bins, percent=percent)
            last = percent
        w.counter(f"{NAMES[name]} used", w.end, percent=0.0)


def _block(w: _Writer, r: Recording, block: int) -> None:
    """The warp groups of a block with what they have issued, its loads and stores, and flows between them."""
    tracks: dict[tuple[Any, ...], int] = {}
    for (_, role, rank), spells in r.groups.items():
        mine = [s for s in spells if s.who is None or s.who.block == block]
        own = any(s.who is not None and s.who.block == block for s in spells)
        if not own and not _of_block(r, block, role, rank, spells):
            continue
        name = f"{role or 'group'} {rank}"
        tracks["group", role, rank] = w.thread(name)
        for s in merged(mine):
            if s.who is None:
                w.slice(f"waits: {s.cause}", "stall", s.start, s.end, {"why": STALL_WORDS[s.cause or "tail"]})
            else:
                w.slice(s.who.phase, "work", s.start, s.end, _named(s.who)[1])
        alone = {s.who for s in mine}
        issued = [ran for ran in r.phases if ran.who[:3] == (block, role, rank) and ran.who not in alone]
        if issued:
            tracks["issued", role, rank] = w.thread(f"{name}: issued")
            for ran in issued:
                w.slice(ran.who.phase, "work", ran.start, ran.end, _named(ran.who)[1])
    flights = [f for f in r.flights if f.who.block == block]
    loads: dict[Flight, int] = {}
    for way, verb in (("read", "load"), ("", "store")):
        some = [f for f in flights if (f.direction == "read") == (way == "read")]
        for tensor in dict.fromkeys(f.tensor for f in some):
            for n, row in enumerate(apart([f for f in some if f.tensor == tensor], r.end)):
                tid = w.thread(f"{verb} {tensor}" + (f", {n + 1}" if n else ""))
                for f in row:
                    loads[f] = tid
                    args = {"iteration": f.who.turn, "bytes": f.bytes, "tile": f.who.phase, "way": f.direction}
                    w.slice(f"{verb} {f.tensor} {f.who.turn}", verb, f.sent, _until(f, r.end), args)
    _flows(w, r, block, loads, tracks)


def _of_block(r: Recording, block: int, role: str, rank: int, spells: Sequence[Any]) -> bool:
    """Whether a role that runs no phase (a producer) is the block's: of its slot, by the order of slots."""
    slots = [key for key in r.groups if key[1:] == (role, rank)]
    mine = next((key for key in slots if r.groups[key] is spells), None)
    return mine is not None and not any(s.who for s in spells) and slots.index(mine) == r.blocks.index(block)


def _flows(
    w: _Writer, r: Recording, block: int, loads: Mapping[Flight, int], tracks: Mapping[tuple[Any, ...], int]
) -> None:
    """From the end of each load to its first use."""
    for life in r.lives:
        use, flight = life.first, life.flight
        if life.block != block or use is None or flight is None or flight.arrived is None:
            continue
        inside = max(flight.sent, w.start) <= flight.arrived <= w.end and w.start <= use.start < use.end <= w.end
        kind = "issued" if ("issued", *use.who[1:3]) in tracks and _was_issued(r, use) else "group"
        if inside and us(use.end) > us(use.start) and us(flight.arrived) > us(flight.sent):
            leave = max(flight.sent, flight.arrived - 1000)
            ends = (w.pid, loads[flight], leave), (w.pid, tracks[kind, *use.who[1:3]], use.start)
            w.flow(f"{life.tile} {flight.who.turn}", *ends)


def _was_issued(r: Recording, use: Ran) -> bool:
    """Whether a phase ran beside its warp group, which went on."""
    own = (spells for (_, role, rank), spells in r.groups.items() if (role, rank) == use.who[1:3])
    return not any(s.who == use.who for spells in own for s in spells)


def _until(f: Flight, end: int) -> int:
    return end if f.arrived is None else f.arrived


def apart(flights: Sequence[Flight], end: int) -> Iterator[list[Flight]]:
    """Flights in as few rows as they need not to overlap in."""
    rows: list[list[Flight]] = []
    for f in sorted(flights, key=lambda f: f.sent):
        row = next((row for row in rows if _until(row[-1], end) <= f.sent), None)
        if row is None:
            rows.append([f])
        else:
            row.append(f)
    yield from rows


def summary(trace: Trace, made: Mapping[str, Any], file: str) -> str:
    """What was written, in words."""
    events, r = len(made["traceEvents"]), trace.run
    kernels = ", ".join(trace.recordings)
    lines = paragraph(f"{file}: {events:,} events of {r.dataflow.name} on {r.hardware.name} ({kernels}). "
                      "Open it at ui.perfetto.dev (it stays on your machine) or in chrome://tracing.")  # fmt: skip
    return "\n".join([*lines, *(line for note in trace.notes() for line in paragraph(f"Note: {note}."))]) + "\n"
