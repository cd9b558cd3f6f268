"""Sequences of different lengths in one launch: their numbers, bytes and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.dtypes import DTYPES
from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.interpreters.replay import replay
from iosim.interpreters.timeline import place_blocks
from iosim.problem import Attention
from iosim.rounding import round_to
from iosim.study.ragged import Cache, Engine, Lengths, OneClass, lengths_of, ragged, split_counts
from iosim.study.run import evaluate, plan_of
from tests.conftest import Iosim

MP31 = load_hardware("mp31")
HEADS, KV, D = 4, 2, 16
SMALL = Attention(n_q=1, d=D, heads=HEADS, kv_heads=KV, causal=True)
SEQUENCES = (Lengths(5, 5), Lengths(1, 37), Lengths(3, 20), Lengths(1, 200), Lengths(70, 90))


def normal(random: np.random.Generator, shape: tuple[int, ...], dtype: str = "fp16") -> np.ndarray:
    """Normal numbers of a format."""
    out = random.standard_normal(shape).astype(np.float32)
    round_to(out, DTYPES[dtype])
    return out


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """O of one sequence in float64, (queries, heads, d) and causal, by the definition alone."""
    out = np.empty((*q.shape[:2], v.shape[2]))
    for head in range(q.shape[1]):
        keys, values = (x[:, head * k.shape[1] // q.shape[1]].astype(np.float64) for x in (k, v))
        for row in range(len(q)):
            seen = len(k) - len(q) + row + 1
            scores = keys[:seen] @ q[row, head].astype(np.float64) / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ values[:seen]
    return out


def replayed(one: OneClass, q: np.ndarray, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """O of one sequence by its program, from its rows of the packed tensors: (queries, heads, d)."""
    a = one.problem
    rows = q.transpose(1, 0, 2).reshape(a.heads, a.n_q, -1)  # one query: the heads of a K/V head are rows
    own = {"Q": rows[None], **{name: x.swapaxes(0, 1)[None] for name, x in tensors.items()}}
    done = replay(one.program, lambda tensor, box: own[tensor.name][tuple(slice(*ends) for ends in box)])
    return done.outputs["O"][0].reshape(q.shape[1], len(q), -1).transpose(1, 0, 2)


@pytest.mark.parametrize(("dataflow", "splits"), [("flash2", 1), ("split-kv", 1), ("split-kv", 3)])
def test_numbers_of_each_packed_sequence(dataflow: str, splits: int) -> None:
    """Q, K and V of all sequences lie in three packed arrays; each program has the rows of one."""
    random = np.random.default_rng(1)
    q = normal(random, (sum(s.q for s in SEQUENCES), HEADS, D))
    k, v = (normal(random, (sum(s.k for s in SEQUENCES), KV, D)) for _ in "KV")
    engine = Engine(SMALL, MP31, dataflow)
    schedule = replace(engine.schedule(SEQUENCES), splits=splits)
    first_q = first_k = 0
    for s in SEQUENCES:
        own_q, keys = q[first_q : first_q + s.q], slice(first_k, first_k + s.k)
        got = replayed(engine.one(s, schedule), own_q, {"K": k[keys], "V": v[keys]})
        assert np.abs(got - attention(own_q, k[keys], v[keys])).max() < 2e-3
        first_q, first_k = first_q + s.q, first_k + s.k


def test_numbers_from_a_cache_in_fp8() -> None:
    """What the program computes is the attention over rows of fp8 times the scale of each row."""
    random = np.random.default_rng(2)
    engine = Engine(SMALL, MP31, cache=Cache(dtype="fp8"))
    for s, splits in ((Lengths(1, 200), 3), (Lengths(1, 37), 1), (Lengths(40, 75), 1)):
        q = normal(random, (s.q, HEADS, D))
        k, v = (normal(random, (s.k, KV, D), "fp8_e4m3") for _ in "KV")
        scales = [2.0 ** random.integers(-2, 2, (s.k, KV)).astype(np.float32) for _ in "KV"]
        wide = [x * scale[..., None] for x, scale in zip((k, v), scales, strict=True)]  # exact in fp16
        one = engine.one(s, replace(engine.schedule([s]), splits=splits))
        assert {t.name: t.dtype for t in one.program.tensors}["K"] == "fp8_e4m3"
        got = replayed(one, q, {"K": k, "V": v, "SK": scales[0], "SV": scales[1]})
        assert np.abs(got - attention(q, *wide)).max() < 8e-3  # values are up to 4 times as large


def test_a_cache_in_fp8_moves_a_byte_an_element_and_four_a_row() -> None:
    plain, narrow = (Engine(SMALL, MP31, cache=Cache(dtype=dtype)).step([Lengths(1, 777)]) for dtype in (None, "fp8"))
    asked = [sum(n for (t, _), n in s.launch.moved.items() if t in ("K", "V", "SK", "SV")) for s in (plain, narrow)]
    assert asked == [KV * 777 * 2 * D * 2, KV * 777 * (2 * D + 2 * 4)]


LENGTHS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 600)), min_size=1, max_size=6)


@settings(max_examples=10)
@given(pairs=LENGTHS, dataflow=st.sampled_from(["flash2", "split-kv"]))
def test_every_sequence_is_there_once(pairs: list[tuple[int, int]], dataflow: str) -> None:
    """Each query row is loaded once a split and each output written once; blocks, bytes and bounds add up."""
    sequences = [Lengths(q, q + more) for q, more in pairs]
    step = Engine(SMALL, MP31, dataflow).step(sequences)
    rows = sum(s.q * n for s, n in zip(sequences, step.splits, strict=True))
    moved = step.timeline.moved
    assert moved["O", "write"] == 2 * HEADS * D * sum(s.q for s in sequences)
    assert step.hbm_read_bytes + step.hbm_write_bytes == sum(moved.values())
    seen = moved["Q", "read"] // (
        2 * HEADS * D
    )  # a split of causal queries may see no key, and loads them all the same
    assert seen == rows
    whole = [s for s in sequences if s.q == 1]
    assert moved["K", "read"] >= 2 * KV * D * sum(s.k for s in sequences)
    if len(whole) == len(sequences):
        assert moved["K", "read"] == moved["V", "read"] == 2 * KV * D * sum(s.k for s in sequences)
    assert step.seconds >= step.dram_bytes / MP31.hbm.bandwidth
    assert step.flops == sum(replace(SMALL, n_q=s.q, n_k=s.k).flops for s in sequences)


def test_alike_sequences_take_what_an_ordinary_batch_does() -> None:
    shape = Attention(n_q=1, d=64, heads=8)
    for q, k, batch in ((1, 3000, 40), (256, 256, 5)):
        engine = Engine(shape, MP31, "flash2")
        step = engine.step([Lengths(q, k)] * batch)
        given = {"block_q": step.schedule.block_q, "block_k": step.schedule.block_k, "stages": step.schedule.stages}
        run = evaluate(plan_of(replace(shape, n_q=q, n_k=k, batch=batch), MP31, engine.flow, given))
        assert step.seconds == pytest.approx(run.seconds, rel=0.02)
        assert step.hbm_read_bytes == run.ledger.hbm_read_bytes
        assert step.executed_flops == run.ledger.executed_flops


def test_a_long_sequence_that_comes_last_is_a_tail() -> None:
    """400 blocks of one key tile and one of 64: last, it begins when others have ended; first, it hides behind them."""
    sequences = [Lengths(128, 128)] * 400 + [Lengths(128, 8192)]
    done = ragged(Engine(Attention(n_q=1, d=64), MP31, "flash2"), sequences, check=False)
    natural, first = (done.orders[order, False] for order in ("natural", "longest-first"))
    assert done.best[0] == "longest-first"
    assert first.seconds < natural.seconds
    assert first.launch.moved == natural.launch.moved
    assert (first.launch.longest, done.padded.queries) == (64, 128 * 401)
    assert done.padded.dram_bytes > 10 * natural.dram_bytes
    assert done.padded.seconds > natural.seconds


@given(
    each=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 60)), min_size=1, max_size=8),
    slots=st.integers(1, 400),
)
def test_balanced_splits_are_the_shortest_runs_that_fit(each: list[tuple[int, int]], slots: int) -> None:
    blocks, tiles = zip(*each, strict=True)
    needed: Callable[[int], int] = lambda run: sum(b * -(-t // run) for b, t in each)  # noqa: E731
    fitting = [run for run in range(1, max(tiles) + 1) if needed(run) <= slots]
    wanted = [-(-t // fitting[0]) for t in tiles] if fitting else [1] * len(tiles)
    assert split_counts(blocks, tiles, slots) == wanted


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ("40", ("Attention of 1 sequence, one launch 1 head, d 16", "Numbers of 1 class of", "Blocks read 12 B of")),
        ("40,30", ("Attention of 2 sequences of their own lengths, one launch", "Numbers of all 2 classes of")),
    ],
)
def test_one_sequence_is_said_as_one(iosim: Iosim, lengths: str, said: tuple[str, ...]) -> None:
    shown = iosim("run", "--lengths", lengths, "-d", "16", "--page", "16")
    assert (shown.code, shown.err) == (0, "")
    assert [words for words in said if words not in " ".join(shown.out.split())] == []
    assert "  " not in " ".join(line.strip() for line in shown.out.splitlines() if "Blocks read" in line)


def test_a_shared_prefix_is_read_from_dram_once() -> None:
    """16 sequences of 1000 tokens, 600 of them the same: DRAM gives 600 + 16 * 400 tokens."""
    token = 2 * KV * D * 2
    alone, shared = (Engine(SMALL, MP31, cache=Cache(shared=n)).step([Lengths(1, 1000)] * 16) for n in (0, 600))
    assert alone.dram_read_bytes - shared.dram_read_bytes == shared.saved_bytes == 15 * 600 * token
    assert shared.hbm_read_bytes == alone.hbm_read_bytes
    assert shared.seconds <= alone.seconds


@pytest.mark.parametrize(("scales", "of_token"), [("token", 2 * KV * (D + 4)), ("head", 2 * KV * D)])
def test_a_shared_prefix_in_8_bits_saves_its_scales_by_token_too(scales: str, of_token: int) -> None:
    """Scales by head are a sequence's own: each reads them."""
    caches = (Cache(dtype="fp8", scales=scales, shared=n) for n in (0, 600))
    alone, shared = (Engine(SMALL, MP31, cache=c).step([Lengths(1, 1000)] * 16) for c in caches)
    assert alone.dram_read_bytes - shared.dram_read_bytes == shared.saved_bytes == 15 * 600 * of_token


def test_block_tables_are_read_by_every_head_and_cost_an_access() -> None:
    plain, paged = (Engine(SMALL, MP31, "flash2", cache=c).step([Lengths(1, 1000)]) for c in (None, Cache(page=16)))
    assert (plain.table_bytes, paged.table_bytes) == (0, 4 * KV * 63)
    waited = paged.timeline.makespan_ps - plain.timeline.makespan_ps
    assert waited >= (MP31.l2.latency_ps if MP31.l2 is not None else 0) // 2 > 0


def test_lengths_are_read_from_words_and_files(tmp_path: Any) -> None:
    place = tmp_path / "lengths.txt"
    place.write_text("# a batch\n512\n1:777, 3\n")
    assert lengths_of(str(place)) == (Lengths(512, 512), Lengths(1, 777), Lengths(3, 3))
    assert lengths_of("4,1:9") == (Lengths(4, 4), Lengths(1, 9))
    place.write_text("512\n1:x\n")
    with pytest.raises(InputError, match=r"lengths.txt, line 2: '1:x' is not a length from 1 to 16777216"):
        lengths_of(str(place))
    with pytest.raises(InputError, match="fewer keys than queries"):
        Engine(SMALL, MP31).step([Lengths(9, 4)])


@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize("kept", ["fp8", "int8"])
def test_a_cache_in_8_bits_beside_a_q_in_8_bits_is_refused(kept: str, scales: str) -> None:
    narrow, machine = replace(SMALL, dtype="fp8"), load_hardware("h200-sxm")
    with pytest.raises(InputError, match=r"cache_dtype: .* is not modelled beside a Q in fp8_e4m3; leave it out"):
        Engine(narrow, machine, "flash2", cache=Cache(dtype=kept, scales=scales))
    Engine(narrow, machine, "flash2", cache=Cache())  # in the dtype of Q


@pytest.mark.long
@pytest.mark.parametrize(
    ("sequences", "dataflow"),
    [
        ([Lengths(1, n) for n in (300, 900, 77, 2000, 1500, 640)], "split-kv"),
        ([Lengths(64, 64), Lengths(256, 700), Lengths(1, 900), Lengths(1, 1200)], "flash2"),
        ([Lengths(n, n) for n in (512, 64, 200, 130)] * 3, "flash2"),
    ],
)
def test_one_processor_a_class_agrees_with_all_processors(sequences: list[Lengths], dataflow: str) -> None:
    """`fair` is within the spread that it names of `chip`, which runs every block of the launch on every processor."""
    shape = Attention(n_q=1, d=64, heads=8, kv_heads=2, causal=True)
    fair = Engine(shape, MP31, dataflow).step(sequences)
    chip = Engine(shape, MP31, dataflow, fidelity="chip").step(sequences)
    assert fair.launch.moved == chip.launch.moved
    assert fair.seconds == pytest.approx(chip.seconds, rel=fair.launch.time.spread_pct / 100)


@given(
    classes=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, max_size=4),
    draws=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    processors=st.integers(1, 12),
)
def test_blocks_alone_on_processors(classes: list[tuple[int, float]], draws: list[int], processors: int) -> None:
    """Blocks start in order wherever a processor is free, and run at the speed that so many busy ones leave."""
    spans = [lambda busy, _, one=one, more=more: one * (1 + more * (busy - 1)) for one, more in classes]
    order = [n % len(classes) for n in draws]
    waiting, running, now, occupied = list(order), [], 0.0, 0.0  # what runs: class, part that is left
    while waiting or running:
        while waiting and len(running) < processors:
            running.append([waiting.pop(0), 1.0])
        speeds = [1 / spans[c](len(running), 1) for c, _ in running]
        step = min(left / speed for (_, left), speed in zip(running, speeds, strict=True))
        now, occupied = now + step, occupied + step * len(running)
        for block, speed in zip(running, speeds, strict=True):
            block[1] -= step * speed
        running = [block for block in running if block[1] > 1e-9]
    assert place_blocks(order, spans, processors, 1) == (
        pytest.approx(now, abs=2, rel=1e-6),
        pytest.approx(occupied, abs=2, rel=1e-6),
    )
