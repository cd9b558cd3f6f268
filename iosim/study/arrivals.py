"""Requests as they arrive at a server: they wait, are batched step by step, and leave.

A trace has one request a line, with the seconds at which it arrives and the tokens of its prompt and of its answer:

    {"arrival": 0.25, "prompt": 1024, "output": 128}

A step begins when the one before it has ended.  It decodes a token of every sequence that runs, and computes prompts in
chunks with what is left of `step_tokens`, first come first served, as vLLM and Sarathi-Serve do (Agrawal et al. 2024,
arXiv 2403.02310).  A request is let in when fewer than `sequences` run and device memory has room for its whole
sequence, prompt and answer, in pages; so none is ever put out again, where engines let in more and recompute.  The end
of a prompt gives the first token.  A step takes the attention of all layers (iosim.study.serving) and `beside` seconds
for all else, which iosim does not model.  Steps that are much the same are timed once, see `signature`, so that a long
trace takes few launches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from iosim.errors import InputError
from iosim.problem import MAX_N, require_int, require_number
from iosim.study.ragged import MOST_SEQUENCES, require_prefix
from iosim.study.run import Note
from iosim.study.serving import (
    GRAIN,
    Replayed,
    Request,
    Server,
    Step,
    lines_of,
    nearest_of,
    number_of,
    rounded,
    whole_of,
)

FIELDS = ("arrival", "prompt", "output")
MOST_SECONDS = 10**7
MOST_STEPS = 1_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: seconds, tokens."""

    arrival: float
    prompt: int
    output: int

    @property
    def tokens(self) -> int:
        """That its cache holds at the end; the last token of the answer is not put into it."""
        return self.prompt + self.output - 1


@dataclass(frozen=True, slots=True)
class Policy:
    """How a server batches: see the module; `reserved` bytes of device memory are not for the cache."""

    step_tokens: int = 2048
    sequences: int = 256
    reserved: int = 0
    beside: float = 0.0

    def __post_init__(self) -> None:
        require_int("step_tokens", self.step_tokens, 1, MAX_N)
        require_int("sequences", self.sequences, 1, MOST_SEQUENCES)
        require_number("beside", self.beside, 0, 3600)


@dataclass(frozen=True, slots=True)
class Served:
    """A request that has left: when it was let in, its first and its last token came, in seconds of the trace."""

    request: Arrival
    begun: float
    first: float
    last: float

    @property
    def waited(self) -> float:
        """Before it was let in."""
        return self.begun - self.request.arrival

    @property
    def to_first(self) -> float:
        """From its arrival to its first token."""
        return self.first - self.request.arrival

    @property
    def each(self) -> float:
        """Between two tokens of its answer; 0 for one token."""
        return (self.last - self.first) / max(1, self.request.output - 1)


@dataclass(frozen=True, slots=True)
class Service:
    """A trace of arrivals on a server.

    `replayed` has its steps; `starts` says when each began, and `waiting` how many waited then.  `room` are bytes for
    the cache, of which `held` are taken at the most.
    """

    replayed: Replayed
    policy: Policy
    starts: tuple[float, ...]
    waiting: tuple[int, ...]
    served: tuple[Served, ...]
    room: int
    held: int

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(s.last for s in self.served) - min(s.request.arrival for s in self.served)

    @property
    def busy(self) -> float:
        """Seconds of steps."""
        return self.replayed.seconds + self.policy.beside * len(self.replayed.steps)


@dataclass(slots=True, eq=False)
class _Running:
    """A request that was let in: tokens of its prompt that are computed, tokens of its answer that are made."""

    request: Arrival
    begun: float
    bytes: int
    done: int = 0
    made: int = 0
    first: float = 0.0

    @property
    def decodes(self) -> bool:
        return self.done == self.request.prompt


@dataclass(slots=True)
class _Server:
    """The state between steps."""

    server: Server
    policy: Policy
    room: int
    shared: int  # bytes of the prefix, which is there once
    waiting: deque[Arrival]
    running: list[_Running] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)
    now: float = 0.0
    taken: int = 0
    held: int = 0

    def own_bytes(self, request: Arrival) -> int:
        """Of a sequence at its longest, beside the prefix."""
        return max(0, self.server.resident_bytes(request.tokens) - self.shared)

    def let_in(self) -> None:
        """Those who have arrived, in their order, as far as there is room."""
        most = min(self.policy.sequences, self.policy.step_tokens)
        while self.waiting and self.waiting[0].arrival <= self.now and len(self.running) < most:
            need = self.own_bytes(self.waiting[0])
            if self.taken + need > self.room:
                return
            self.taken += need
            self.held = max(self.held, self.taken)
            self.running.append(_Running(self.waiting.popleft(), self.now, need))

    def batch(self) -> list[tuple[_Running, Request]]:
        """What the next step computes: a token of each that decodes, then prompts."""
        out = [(r, Request(r.request.prompt + r.made - 1)) for r in self.running if r.decodes]
        left = self.policy.step_tokens - len(out)
        for r in self.running:
            if not r.decodes and left:
                new = min(left, r.request.prompt - r.done)
                out.append((r, Request(r.done, new)))
                left -= new
        return out

    def end(self, batch: Sequence[tuple[_Running, Request]]) -> None:
        """What a step has computed, at its end."""
        for r, request in batch:
            if r.done < r.request.prompt:
                r.done += request.new
                if r.done < r.request.prompt:
                    continue
                r.first = self.now
            r.made += 1
            if r.made == r.request.output:
                self.running.remove(r)
                self.taken -= r.bytes
                self.served.append(Served(r.request, r.begun, r.first, self.now))


def serve(
    server: Server, trace: Sequence[Arrival], policy: Policy | None = None, note: Note = lambda _: None
) -> Service:
    """Serve a trace, sorted by arrival.

    Raises InputError for a request that never fits, a prefix that none has, and more than MOST_STEPS steps.
    """
    policy = policy or Policy()
    require_prefix(server.cache, max(r.tokens for r in trace))
    shared = server.resident_bytes(server.cache.shared // server.cache.page * server.cache.page)
    room = server.hardware.hbm.capacity_bytes - policy.reserved - shared
    state = _Server(server, policy, room, shared, deque(sorted(trace, key=lambda r: r.arrival)))
    for r in trace:
        if (need := state.own_bytes(r)) > room:
            raise InputError(
                f"trace: a request with {r.prompt:,} + {r.output:,} tokens needs {need:,} B of K/V cache, and there is "
                f"room for {max(0, room):,} B"
            )
    steps: list[Step] = []
    starts: list[float] = []
    queue: list[int] = []
    timed: dict[tuple[Any, ...], list[Request]] = {}
    while state.waiting or state.running:
        if not state.running:
            state.now = max(state.now, state.waiting[0].arrival)
        state.let_in()
        if len(steps) == MOST_STEPS:
            raise InputError(f"trace: takes more than {MOST_STEPS:,} steps")
        note(f"step {len(steps) + 1:,}: {len(state.served):,} of {len(trace):,} requests served")
        batch = state.batch()
        starts.append(state.now)
        queue.append(sum(1 for r in state.waiting if r.arrival <= state.now))
        requests = [request for _, request in batch]
        steps.append(server.step(requests, len(steps), timed.setdefault(signature(requests), requests)))
        state.now += steps[-1].seconds + policy.beside
        state.end(batch)
    done = Replayed(server, tuple(steps))
    return Service(done, policy, tuple(starts), tuple(queue), tuple(state.served), room + shared, state.held + shared)


def signature(requests: Sequence[Request]) -> tuple[Any, ...]:
    """What a step's time hangs on: how many decode, their keys in all and the most, and what else is computed.

    Each to one of eight lengths or counts an octave.  Steps with one signature take the time of the first of them,
    scaled to their own work: of 551 steps in two random traces 0.3 % off in the mean what their own lengths take, 11 %
    at worst.
    """
    keys = [r.context + 1 for r in requests if r.new == 1]
    decoding = (nearest_of(len(keys), 1), nearest_of(sum(keys), GRAIN), nearest_of(max(keys), GRAIN)) if keys else ()
    return decoding, tuple(sorted(rounded(r.lengths) for r in requests if r.new > 1))


def load_arrivals(path: str) -> tuple[Arrival, ...]:
    """The requests of a trace.  Raises InputError with the file, the line and the field."""
    out = tuple(_arrival(place, data) for place, data in lines_of(path, FIELDS))
    if not out:
        raise InputError(f"trace: {path}: has no line with a request")
    return out


def has_arrivals(path: str) -> bool:
    """Whether a trace is one of arrivals, by its first line."""
    return next((not data.keys().isdisjoint(FIELDS) for _, data in lines_of(path)), False)


def _arrival(place: str, data: Mapping[str, Any]) -> Arrival:
    for name in FIELDS:
        if name not in data:
            raise InputError(f"{place}: {name} is missing")
    prompt, output = (whole_of(place, data, name, 1, MAX_N // 2, 1) for name in ("prompt", "output"))
    return Arrival(number_of(place, data, "arrival", 0, MOST_SECONDS), prompt, output)
