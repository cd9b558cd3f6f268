"""A server's steps: requests in prefill and decode run in one launch a layer, as inference engines batch them.

This is attention alone: no projections, no MLP, no sampling and nothing between kernels, so that a server's own steps
take longer.  A step is a list of requests, each with so many tokens in the K/V cache (`context`) and so many `new` ones
whose attention is computed, over the context and one another.  A trace has one request a line:

    {"step": 0, "context": 4096, "new": 1}

with `step` left out where there is one step.  `Server` times a step.  It computes times for rounded lengths, at most
eight to an octave, keeps them, and scales them to the true work: mostly within 2.5 % of the time of the true lengths,
5 % at worst of 32 random steps.  So what a step of a long trace costs does not grow with its context, and steps that
differ by little cost nothing.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from iosim.errors import InputError, nearest
from iosim.hardware import Hardware
from iosim.problem import MAX_N, Attention
from iosim.study.models import ModelCase
from iosim.study.ragged import MOST_SEQUENCES, Cache, Engine, Lengths, require_prefix, token_bytes
from iosim.study.ragged import Step as Launched
from iosim.study.run import Note

MOST_BYTES = 2**28  # of a trace
MOST_LINES = 2_000_000
MOST_LINE = 4096  # bytes of a line
FIELDS = ("step", "context", "new")
GRAIN, FINE = 128, 16  # keys are rounded to whole GRAINs at least, those up to one to whole FINEs
KEPT = 4096  # launches whose times are kept, the latest
STEPS = 8  # and at most to so many lengths between one power of two and the next


@dataclass(frozen=True, slots=True)
class Request:
    """One request in one step: tokens in the cache, and new ones."""

    context: int
    new: int = 1

    @property
    def lengths(self) -> Lengths:
        """Its queries and keys."""
        return Lengths(self.new, self.context + self.new)


@dataclass(frozen=True, slots=True)
class Layer:
    """So many layers with one attention; `shape` has heads, d, dtype and mask, its n do not count."""

    kind: str
    count: int
    shape: Attention


@dataclass(frozen=True, slots=True)
class Step:
    """What the attention of all layers takes in one step.

    `kv_bytes` are the K and V that its requests attend to, each once, `written_bytes` those of the new tokens, which
    are in the cache before.  `pages` hold the tokens of its sequences, each in every layer.  `dram_bytes` are what the
    launches move both ways.  `bound` is the busiest unit of the layers that take most time.
    """

    number: int
    requests: int
    decoding: int
    tokens: int
    picoseconds: int
    kv_bytes: int
    written_bytes: int
    dram_bytes: int
    table_bytes: int
    saved_bytes: int
    flops: int
    bound: str
    pages: int = 0

    @property
    def seconds(self) -> float:
        """Predicted time."""
        return self.picoseconds / 1e12


@dataclass(eq=False)
class Server:
    """Steps of requests on one machine, an engine a kind of layer; `dataflow`, `given`, `rule` as Engine has them."""

    layers: Sequence[Layer]
    hardware: Hardware
    dataflow: str = "split-kv"
    given: Mapping[str, Any] = field(default_factory=dict)
    rule: str = "balanced"
    cache: Cache = field(default_factory=Cache)
    _engines: list[Engine] = field(default_factory=list, init=False, repr=False)
    _steps: dict[tuple[int, tuple[tuple[Lengths, int], ...]], Launched] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        self._engines = [
            Engine(layer.shape, self.hardware, self.dataflow, self.given, self.rule, self.cache)
            for layer in self.layers
        ]

    @property
    def packed(self) -> bool:
        """Whether the query heads of a K/V head are rows of one tile in some layer."""
        return any(engine.packed for engine in self._engines)

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return sum(layer.count * token_bytes(layer.shape, self.cache) for layer in self.layers)

    def resident_bytes(self, context: int) -> int:
        """What one sequence of so many tokens holds of the cache, in whole pages; sliding layers keep their window."""
        page, total = self.cache.page, 0
        for layer in self.layers:
            kept = context if layer.shape.window is None else min(context, layer.shape.window)
            total += layer.count * token_bytes(layer.shape, self.cache) * -(-kept // page) * page
        return total

    def step(self, requests: Sequence[Request], number: int = 0, like: Sequence[Request] | None = None) -> Step:
        """What a step of these requests takes; times are those of a launch `like` it, scaled to its work.

        Raises InputError for none, too many, or a length out of range.
        """
        times = Counter(rounded(r.lengths) for r in like or requests)
        parts = [(layer, self._launched(n, times)) for n, layer in enumerate(self.layers)]
        scaled = [
            (layer, s, *_scaled(layer.shape, self.cache, s, requests, self.hardware.hbm.bandwidth))
            for layer, s in parts
        ]
        _, most, *_ = max(scaled, key=lambda part: part[0].count * part[2])
        return Step(
            number=number,
            requests=len(requests),
            decoding=sum(r.new == 1 for r in requests),
            tokens=sum(r.new for r in requests),
            picoseconds=sum(layer.count * time for layer, _, time, _ in scaled),
            kv_bytes=sum(layer.count * kv_bytes(layer.shape, self.cache, requests) for layer in self.layers),
            written_bytes=self.token_bytes * sum(r.new for r in requests),
            dram_bytes=sum(layer.count * moved for layer, _, _, moved in scaled),
            table_bytes=sum(layer.count * s.table_bytes for layer, s in parts),
            saved_bytes=sum(layer.count * s.saved_bytes for layer, s in parts),
            flops=sum(layer.count * flops(layer.shape, requests) for layer in self.layers),
            bound=most.bound,
            pages=sum(self.cache.pages(r.context + r.new) for r in requests),
        )

    def _launched(self, number: int, times: Mapping[Lengths, int]) -> Launched:
        """The launch of one layer; the order of its sequences is the longest first, as a scheduler would sort them."""
        order = tuple(sorted(times.items(), reverse=True))
        if (number, order) not in self._steps:
            while len(self._steps) >= KEPT:
                del self._steps[next(iter(self._steps))]
            sequences = [s for s, n in order for _ in range(n)]
            self._steps[number, order] = self._engines[number].step(sequences, "longest-first")
        return self._steps[number, order]


def rounded(s: Lengths) -> Lengths:
    """Lengths that times are computed for: queries and the keys before them, each to the nearest that there is."""
    q = nearest_of(s.q, 1)
    return Lengths(q, max(q, q + nearest_of(s.k - s.q, GRAIN if s.k > GRAIN else FINE)) if q > 1 else _alone(s.k))


def _alone(k: int) -> int:
    """Keys of one query."""
    return max(FINE, nearest_of(k, GRAIN if k > GRAIN else FINE))


def nearest_of(n: int, grain: int) -> int:
    """The nearest multiple of the grain, or of an eighth of the power of two below where that is more."""
    step = max(grain, (1 << max(0, n.bit_length() - 1)) // STEPS)
    return (n + step // 2) // step * step


def _scaled(a: Attention, cache: Cache, s: Launched, requests: Sequence[Request], bandwidth: float) -> tuple[int, int]:
    """Picoseconds and DRAM bytes of a launch, in proportion to the true work: of K and V, or of FLOPs if these bound.

    Launching costs what it does, and bytes take what DRAM's `bandwidth` lets them.
    """
    alike = [Request(each.k - each.q, each.q) for each in s.sequences]
    moved = kv_bytes(a, cache, requests) / kv_bytes(a, cache, alike)
    done = flops(a, requests) / flops(a, alike)
    launch = sum(kernel.launch_ps for kernel in s.timeline.kernels)
    share = moved if s.bound in ("dram", "l2", "copy") else done
    dram = round(s.dram_bytes * moved)
    least = round(dram * 10**12 / bandwidth)
    return launch + max(least, round((s.timeline.makespan_ps - launch) * share)), dram


def kv_bytes(a: Attention, cache: Cache, requests: Iterable[Request]) -> int:
    """K and V of one layer that the requests attend to, each once."""
    seen = (r.context + r.new if a.window is None else min(r.context + r.new, a.window + r.new - 1) for r in requests)
    return token_bytes(a, cache) * sum(seen)


def flops(a: Attention, requests: Iterable[Request]) -> int:
    """FLOPs of one layer by convention: of the pairs that are not masked."""
    return sum(n * replace(a, n_q=r.new, n_k=r.context + r.new).flops for r, n in Counter(requests).items())


def layers_of(case: ModelCase) -> tuple[Layer, ...]:
    """The kinds of layer of a model that decodes, for sequences of any length."""
    shapes = (replace(part.problem, n_q=1, n_k=1, batch=1, causal=True) for part in case.layers)
    return tuple(Layer(part.kind, part.count, shape) for part, shape in zip(case.layers, shapes, strict=True))


# ---------------------------------------------------------------- traces


@dataclass(frozen=True, slots=True)
class Replayed:
    """A trace, step by step, on a server."""

    server: Server
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Of all steps, one after another."""
        return sum(s.picoseconds for s in self.steps) / 1e12

    @property
    def tokens(self) -> int:
        """New tokens of all steps."""
        return sum(s.tokens for s in self.steps)


def replayed(server: Server, trace: Sequence[tuple[int, Sequence[Request]]], note: Note = lambda _: None) -> Replayed:
    """Time every step of a trace.  Raises InputError for a shared prefix that no request has."""
    require_prefix(server.cache, max(r.context + r.new for _, requests in trace for r in requests))
    steps = []
    for n, (number, requests) in enumerate(trace, start=1):
        note(f"step {n:,} of {len(trace):,}")
        steps.append(server.step(requests, number))
    return Replayed(server, tuple(steps))


def load_trace(path: str) -> tuple[tuple[int, tuple[Request, ...]], ...]:
    """The steps of a trace, (number, requests), in the order in which they begin; the lines of one stand together.

    Raises InputError with the file, the line and the field.
    """
    steps: dict[int, list[Request]] = {}
    last = None
    for place, data in lines_of(path, FIELDS):
        number, request = _request(place, data)
        if number != last and number in steps:
            raise InputError(f"{place}: step {number} goes on after step {last}; lines of a step must stand together")
        if len(steps.setdefault(number, [])) == MOST_SEQUENCES:
            raise InputError(f"{place}: step {number} has more than {MOST_SEQUENCES} requests")
        steps[number].append(request)
        last = number
    if not steps:
        raise InputError(f"trace: {path}: has no line with a request")
    return tuple((number, tuple(requests)) for number, requests in steps.items())


def lines_of(path: str, fields: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a file of JSON lines with the place of each; with `fields` the names that they may have."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"trace: {path}: is not a regular file")
        if status.st_size > MOST_BYTES:
            raise InputError(f"trace: {path}: {status.st_size} bytes; at most {MOST_BYTES} are allowed")
        with Path(path).open("rb") as file:
            for n, line in enumerate(iter(lambda: file.readline(MOST_LINE + 1), b""), start=1):
                place = f"trace: {path}, line {n}"
                if n > MOST_LINES:
                    raise InputError(f"{place}: more than {MOST_LINES} lines")
                if line.strip():
                    yield place, _object(place, line, fields)
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"trace: {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _object(place: str, line: bytes, fields: Sequence[str]) -> dict[str, Any]:
    if len(line) > MOST_LINE:
        raise InputError(f"{place}: a line has at most {MOST_LINE} bytes")
    try:
        data = json.loads(line, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise InputError(f"{place}: {error}") from None
        raise InputError(f"{place}: is not JSON: {line[:60].decode(errors='replace').strip()}") from None
    if not isinstance(data, dict):
        raise InputError(f'{place}: is not a JSON object like {{"context": 4096, "new": 1}}')
    for name in data if fields else ():
        if name not in fields:
            raise InputError(f"{place}: {name!r:.60} is not one of {', '.join(fields)}{nearest(name, fields)}")
    return data


def _request(place: str, data: Mapping[str, Any]) -> tuple[int, Request]:
    if "context" not in data:
        raise InputError(f"{place}: context is missing")
    step = whole_of(place, data, "step", 0, 2**53, 0)
    context, new = (whole_of(place, data, n, low, MAX_N // 2, low) for n, low in (("context", 0), ("new", 1)))
    return step, Request(context, new)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; raises InputError for a key that is there twice."""
    if len(out := dict(pairs)) < len(pairs):
        raise InputError("a key is there twice")
    return out


def number_of(place: str, data: Mapping[str, Any], name: str, low: float, high: float) -> float:
    """A number of a line; raises InputError for another value."""
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise InputError(f"{place}: {name}: {json.dumps(value):.40} is not a number")
    if not low <= value <= high:
        raise InputError(f"{place}: {name}: {json.dumps(value):.40} is out of range; {low:g} to {high:g} is allowed")
    return float(value)


def whole_of(place: str, data: Mapping[str, Any], name: str, low: int, high: int, default: int) -> int:
    """A whole number of a line, or the default; raises InputError for another value."""
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{place}: {name}: {json.dumps(value):.60} is not a whole number")
    if not low <= value <= high:
        raise InputError(f"{place}: {name}: {value} is out of range; {low} to {high} is allowed")
    return value
