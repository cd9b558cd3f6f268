"""A server's steps: traces, the times of rounded lengths, bytes of the cache and what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.problem import MAX_N, Attention
from iosim.study import ragged
from iosim.study.capacity import capacity, held
from iosim.study.models import load_model
from iosim.study.ragged import Cache, Engine, Lengths
from iosim.study.serving import Layer, Request, Server, layers_of, load_trace, replayed, rounded
from tests.model_configs import CONFIGS

MP31, H200 = load_hardware("mp31"), load_hardware("h200-sxm")
SHAPE = Attention(n_q=1, d=64, heads=8, kv_heads=2, causal=True)
ONE = (Layer("full", 1, SHAPE),)


@given(q=st.integers(1, 10_000), context=st.integers(0, 200_000))
def test_rounded_lengths_are_near_and_few(q: int, context: int) -> None:
    """Keys within a sixteenth or half a tile, one query stays one, and rounding again changes nothing."""
    s = rounded(Lengths(q, context + q))
    assert (s.q == 1) == (q == 1)
    assert abs(s.q - q) <= max(15, q / 16)
    assert abs(s.k - s.q - context) <= max(64, context / 16) + (s.q == 1)
    assert s.k >= s.q
    assert rounded(s) == s


@pytest.mark.slow
def test_times_of_rounded_lengths_are_those_of_the_true_ones() -> None:
    """Decode, and decode with a chunk of a prompt: within 5 % of a launch of the true lengths."""
    draw = np.random.default_rng(7)
    server, engine = Server(ONE, MP31), Engine(SHAPE, MP31, "split-kv", cache=Cache())
    for chunks in ([], [Request(300, 200)]):
        requests = [Request(int(n)) for n in draw.integers(0, 3000, 16)] + chunks
        step = server.step(requests)
        exact = engine.step(sorted((r.lengths for r in requests), reverse=True), "longest-first")
        assert step.seconds == pytest.approx(exact.seconds, rel=0.05)
        assert step.dram_bytes == pytest.approx(exact.dram_bytes, rel=0.01)
        assert step.flops == exact.flops


def test_bytes_of_a_step_by_hand() -> None:
    """Two full layers and three that keep 100 tokens; 2 K/V heads, d 64, fp16: 512 B a token and layer."""
    layers = (Layer("full", 2, SHAPE), Layer("sliding", 3, replace(SHAPE, window=100)))
    server = Server(layers, MP31, cache=Cache(page=16))
    step = server.step([Request(999), Request(49), Request(500, 20)])
    full, sliding = 1000 + 50 + 520, 100 + 50 + 119  # 20 queries of a window see 119 keys together
    assert step.kv_bytes == 512 * (2 * full + 3 * sliding)
    assert step.written_bytes == 512 * 5 * 22
    assert (step.tokens, step.decoding, step.requests) == (22, 2, 3)
    assert server.resident_bytes(1000) == 512 * (2 * 1008 + 3 * 112)  # whole pages of 16
    assert server.token_bytes == 512 * 5


def test_layers_of_a_model_are_summed() -> None:
    case = load_model(CONFIGS["gemma-2-9b"]).case(n=MAX_N, phase="decode")
    layers = layers_of(case)
    assert [(layer.kind, layer.count, layer.shape.window) for layer in layers] == [
        ("full", 21, None),
        ("sliding", 21, 4096),
    ]
    whole = Server(layers, H200).step([Request(8000)] * 4)
    parts = [Server((replace(layer, count=1),), H200).step([Request(8000)] * 4) for layer in layers]
    assert whole.picoseconds == 21 * sum(part.picoseconds for part in parts)
    assert parts[1].kv_bytes == 4 * 4096 * 8 * 512 * 2


def test_steps_that_repeat_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 steps of 8 sequences that grow by a token each: a few launches, whatever their context."""
    timed: list[Any] = []
    real = ragged.launch_time
    monkeypatch.setattr(ragged, "launch_time", lambda launch, *rest: timed.append(launch) or real(launch, *rest))
    for first in (2_000, 200_000):
        server = Server(ONE, MP31)
        done = replayed(server, [(n, [Request(first + n)] * 8) for n in range(100)])
        assert len(timed) <= 4
        times = [s.picoseconds for s in done.steps]
        assert times == sorted(times)
        timed.clear()


def test_what_fits_is_the_memory_by_the_pages() -> None:
    """Of 1 GB less 0.5 GB, sequences of 1000 tokens in pages of 64: 1024 tokens of 512 B each."""
    small = replace(MP31, hbm=replace(MP31.hbm, capacity_bytes=10**9))
    done = capacity(Server(ONE, small, cache=Cache(page=64)), (1000,), (2,), (1, 512), reserved=5 * 10**8)
    assert [(r.bytes, r.sequences) for r in done.rooms] == [(1024 * 512, 953)]
    assert done.chunks[1].bound in ("dram", "launch")
    assert done.crossing == 512


def test_decode_calls_of_an_h200_are_held_against() -> None:
    """The large grouped calls of cuDNN, which no host bounds, are predicted within 15 % (8 sequences: 25 %)."""
    errors = {(h.kernel, h.problem.batch, h.problem.n_k): h.error_pct for h in held() if not h.host_bound}
    assert len(errors) == 7
    assert abs(errors["cudnn", 64, 16384]) < 6
    assert abs(errors["cudnn", 1, 131072]) < 15
    assert abs(errors["cudnn", 8, 8192]) < 25


def trace(place: Path, *lines: object) -> str:
    """A file with these lines, objects as JSON."""
    place.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(place)


def test_a_trace_has_steps_of_requests(tmp_path: Path) -> None:
    path = trace(
        tmp_path / "t.jsonl",
        {"step": 3, "context": 5},
        {"step": 3, "context": 0, "new": 7},
        "",
        {"step": 9, "context": 6},
    )
    assert load_trace(path) == ((3, (Request(5), Request(0, 7))), (9, (Request(6),)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is not JSON: {"),
        ("[1]", 'line 2: is not a JSON object like {"context": 4096, "new": 1}'),
        ({"contxt": 1}, "line 2: 'contxt' is not one of step, context, new (did you mean 'context'?)"),
        ({"new": 1}, "line 2: context is missing"),
        ({"context": -1}, "line 2: context: -1 is out of range; 0 to 8388608 is allowed"),
        ({"context": 1, "new": 0}, "line 2: new: 0 is out of range; 1 to 8388608 is allowed"),
        ({"context": 1.5}, "line 2: context: 1.5 is not a whole number"),
        ({"context": True}, "line 2: context: true is not a whole number"),
        ({"context": 1, "step": 1}, "line 3: step 0 goes on after step 1; lines of a step must stand together"),
        ("x" * 5000, "line 2: a line has at most 4096 bytes"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = trace(tmp_path / "t.jsonl", {"context": 1}, line, {"context": 2})
    with pytest.raises(InputError) as caught:
        load_trace(path)
    assert str(caught.value) == f"trace: {path}, {message}"


def test_an_empty_trace_and_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no line with a request"):
        load_trace(trace(tmp_path / "t.jsonl", "", ""))
    with pytest.raises(InputError, match="cannot be read: No such file or directory"):
        load_trace(str(tmp_path / "none"))
    with pytest.raises(InputError, match="is not a regular file"):
        load_trace(str(tmp_path))


@pytest.mark.parametrize("new", [2, 7, 8, 40, 250])
def test_no_step_is_faster_than_its_bytes(new: int) -> None:
    """Few tokens of many sequences in int8 on MP31: K and V, once, take what DRAM's bandwidth lets them."""
    server = Server((Layer("full", 1, replace(SHAPE, d=128, heads=32, kv_heads=8)),), MP31, cache=Cache(dtype="int8"))
    step = server.step([Request(4096 - new, new)] * 64)
    assert step.kv_bytes <= step.dram_bytes
    assert step.seconds >= step.dram_bytes / MP31.hbm.bandwidth
