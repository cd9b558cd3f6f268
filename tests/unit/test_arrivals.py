"""Requests as they arrive: who is let in when, what a step computes, and what is waited for."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.problem import Attention
from iosim.study.arrivals import Arrival, Policy, Service, has_arrivals, load_arrivals, serve
from iosim.study.ragged import Cache
from iosim.study.serving import Layer, Request, Server, Step

SECOND = 10**12


@dataclass
class Fixed:
    """A server whose steps take a second each, with a byte a token of cache; it keeps what it was asked."""

    room: int = 10**9
    cache: Cache = field(default_factory=lambda: Cache(page=1))
    steps: list[list[Request]] = field(default_factory=list)

    @property
    def hardware(self) -> Any:
        return SimpleNamespace(hbm=SimpleNamespace(capacity_bytes=self.room))

    def resident_bytes(self, context: int) -> int:
        return context

    def step(self, requests: list[Request], number: int, like: object) -> Step:
        del like
        self.steps.append(list(requests))
        return Step(number, len(requests), 0, sum(r.new for r in requests), SECOND, 0, 0, 0, 0, 0, 0, "dram")


def served(server: Fixed, trace: list[Arrival], **policy: Any) -> Service:
    return serve(cast(Server, server), trace, Policy(**policy))


def test_a_request_alone() -> None:
    """A prompt of 5 in chunks of 2, then two more tokens: the third step gives the first one."""
    server = Fixed()
    done = served(server, [Arrival(7.0, 5, 3)], step_tokens=2)
    assert server.steps == [[Request(0, 2)], [Request(2, 2)], [Request(4, 1)], [Request(5)], [Request(6)]]
    (one,) = done.served
    assert (one.waited, one.to_first, one.last, one.each) == (0, 3, 12, 1)
    assert (done.starts, done.seconds) == ((7, 8, 9, 10, 11), 5)


def test_decoding_comes_first_and_prompts_take_what_is_left() -> None:
    server = Fixed()
    served(server, [Arrival(0, 1, 9), Arrival(0.5, 10, 1)], step_tokens=4)
    assert server.steps[:3] == [[Request(0, 1)], [Request(1), Request(0, 3)], [Request(2), Request(3, 3)]]


def test_who_finds_no_room_waits_for_one_who_leaves() -> None:
    """Room for 10 tokens: 6 + 1 fit, 4 + 1 more do not, so 1 + 1 behind them waits too (first come, first served)."""
    done = served(Fixed(room=10), [Arrival(0, 6, 1), Arrival(0, 4, 2), Arrival(0, 1, 2)])
    assert [(s.request.prompt, s.begun, s.last) for s in done.served] == [(6, 0, 1), (4, 1, 3), (1, 1, 3)]
    assert (done.held, done.room, done.waiting) == (7, 10, (2, 0, 0))


def test_memory_that_is_reserved_and_a_prefix_that_is_shared() -> None:
    """20 bytes less 4, and a prefix of 5 tokens once: two sequences of 8 fit (5 + 2 * 3), as would a third."""
    trace = [Arrival(0, 7, 2)] * 3
    alone = served(Fixed(room=20), trace, reserved=4)
    shared = served(Fixed(room=20, cache=Cache(page=1, shared=5)), trace, reserved=4)
    assert [s.waited for s in alone.served] == [0, 0, 2]
    assert [s.waited for s in shared.served] == [0, 0, 0]
    assert (alone.held, shared.held) == (16, 5 + 3 * 3)
    with pytest.raises(
        InputError, match=r"a request with 7 \+ 2 tokens needs 8 B of K/V cache, and there is room for 7"
    ):
        served(Fixed(room=11), trace, reserved=4)


def test_a_second_beside_attention_is_in_every_step() -> None:
    trace = [Arrival(0, 1, 4)]
    plain, beside = (served(Fixed(), trace, beside=b) for b in (0.0, 0.5))
    assert (plain.seconds, beside.seconds, beside.busy) == (4, 6, 6)
    assert beside.served[0].each == 1.5


TRACES = st.lists(
    st.builds(Arrival, st.integers(0, 30), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12
)


@given(trace=TRACES, tokens=st.integers(1, 30), sequences=st.integers(1, 5), room=st.integers(51, 200))
def test_every_token_is_computed_once(trace: list[Arrival], tokens: int, sequences: int, room: int) -> None:
    """Within the limits of tokens, sequences and memory; nobody is let in before it arrives or out of turn."""
    server = Fixed(room=room)
    done = served(server, trace, step_tokens=tokens, sequences=sequences)
    assert sum(r.new for step in server.steps for r in step) == sum(r.tokens for r in trace)
    assert all(sum(r.new for r in step) <= tokens and 1 <= len(step) <= sequences for step in server.steps)
    assert done.held <= room
    assert sorted(map(repr, trace)) == sorted(repr(s.request) for s in done.served)
    begun = [s.begun for s in sorted(done.served, key=lambda s: (s.request.arrival, s.begun))]
    assert begun == sorted(begun)
    for s in done.served:
        assert s.request.arrival <= s.begun < s.first <= s.last
        assert s.last - s.first >= s.request.output - 1


@pytest.mark.parametrize(
    "name", [pytest.param("h200-sxm", marks=pytest.mark.long), pytest.param("mp31", marks=pytest.mark.slow)]
)
def test_steps_that_are_much_the_same_are_timed_once(name: str) -> None:
    """Every eighth step of a trace beside the launch of its own lengths; far fewer launches than steps."""
    random = np.random.default_rng(3)
    at = np.cumsum(random.exponential(2e-5, 24))
    trace = [
        Arrival(float(t), int(p), int(o))
        for t, p, o in zip(at, random.integers(50, 3000, 24), random.integers(1, 60, 24), strict=True)
    ]
    layers = (Layer("full", 1, Attention(n_q=1, d=64, heads=8, kv_heads=2, causal=True)),)
    server, log = Server(layers, load_hardware(name)), []
    real = server.step

    def step(requests: list[Request], number: int, like: list[Request]) -> Step:
        log.append((list(requests), real(requests, number, like)))
        return log[-1][1]

    server.step = step  # type: ignore[method-assign,assignment]
    done = serve(server, trace)
    assert len(server._steps) < 0.8 * len(done.replayed.steps)
    errors = [made.seconds / real(requests).seconds - 1 for requests, made in log[::8]]
    assert np.mean(np.abs(errors)) < 0.02
    assert np.max(np.abs(errors)) < 0.15


def test_a_trace_of_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [{"arrival": 0.5, "prompt": 3, "output": 2}, {"arrival": 0, "prompt": 1, "output": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert has_arrivals(str(path))
    assert load_arrivals(str(path)) == (Arrival(0.5, 3, 2), Arrival(0.0, 1, 1))
    path.write_text('{"context": 5}\n')
    assert not has_arrivals(str(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival": 0, "prompt": 1}', "line 1: output is missing"),
        ('{"arrival": -1, "prompt": 1, "output": 1}', "line 1: arrival: -1 is out of range; 0 to 1e+07 is allowed"),
        ('{"arrival": "now", "prompt": 1, "output": 1}', 'line 1: arrival: "now" is not a number'),
        ('{"arrival": 0, "prompt": 0, "output": 1}', "line 1: prompt: 0 is out of range; 1 to 8388608 is allowed"),
        ('{"arrival": 0, "promt": 1, "output": 1}', "line 1: 'promt' is not one of arrival, prompt, output"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(InputError) as caught:
        load_arrivals(str(path))
    assert message in str(caught.value)
