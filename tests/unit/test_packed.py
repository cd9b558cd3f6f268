"""What sequences of different lengths hold and move by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.hardware import load_hardware
from iosim.problem import Attention
from iosim.study.batch import Batch
from iosim.study.packed import TABLE, dataflows, held, packed, score_bytes, traffic
from iosim.study.ragged import Cache, Engine, Lengths

MP31 = load_hardware("mp31")
SHAPE = Attention(n_q=1, d=64, d_v=32, heads=4, kv_heads=2, causal=True)
CACHES = (None, Cache(page=16), Cache(page=16, dtype="int8"), Cache(page=16, dtype="fp8", scales="head"))
ENGINES = {(name, cache): Engine(SHAPE, MP31, name, cache=cache) for name in ("flash2", "split-kv") for cache in CACHES}


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 700)), min_size=1, max_size=4),
    st.sampled_from(list(ENGINES)),
)
def test_parts_make_the_sums_of_a_step(pairs: list[tuple[int, int]], which: tuple[str, Cache | None]) -> None:
    """Bytes by tensor come to those of the launch; what is held, without pages, to inputs, outputs and scratch."""
    engine = ENGINES[which]
    step = engine.step([Lengths(q, q + more) for q, more in pairs])
    moved = traffic(engine, step)
    assert sum(t.asked_bytes or 0 for t in moved.values()) == step.hbm_read_bytes + step.hbm_write_bytes
    assert sum(t.dram_bytes or 0 for t in moved.values()) == step.dram_bytes
    if engine.cache is None:
        assert sum(held(engine, step).values()) == engine.io_bytes(step.sequences) + step.extra_bytes


@pytest.mark.parametrize(
    ("cache", "tokens", "expected"),
    [
        (None, 150, {"K": 150 * 2 * 64 * 2, "V": 150 * 2 * 32 * 2}),
        # Pages of 16: 50 tokens take 4, 100 take 7; a prefix of 40 fills 2, which both have.
        (Cache(page=16), 176, {TABLE: 4 * 11}),
        (Cache(page=16, shared=40), 144, {TABLE: 4 * 11}),
        (Cache(page=16, dtype="int8"), 176, {"K": 176 * 2 * 64, "SK": 176 * 2 * 4, "SV": 176 * 2 * 4}),
        (Cache(page=16, dtype="int8", scales="head"), 176, {"SK": 2 * 2 * 4, "V": 176 * 2 * 32}),
    ],
)
def test_pages_and_scales_are_held(cache: Cache | None, tokens: int, expected: dict[str, int]) -> None:
    engine = Engine(SHAPE, MP31, "flash2", cache=cache)
    found = held(engine, engine.step([Lengths(1, 50), Lengths(3, 100)]))
    assert found | expected == found
    assert (found["Q"], found["O"]) == (4 * 4 * 64 * 2, 4 * 4 * 32 * 2)
    assert found["K"] == tokens * 2 * 64 * (1 if cache is not None and cache.dtype else 2)


def test_a_shared_prefix_is_taken_off_k_and_v() -> None:
    sequences = [Lengths(1, 300)] * 3
    plain, shared = (Engine(SHAPE, MP31, "flash2", cache=Cache(page=16, shared=n)) for n in (0, 200))
    before, step = traffic(plain, plain.step(sequences)), shared.step(sequences)
    after = traffic(shared, step)
    gone = {key: (before[key].dram_bytes or 0) - (t.dram_bytes or 0) for key, t in after.items()}
    assert {key for key, n in gone.items() if n} == {("K", "read"), ("V", "read")}
    assert (gone["K", "read"], gone["V", "read"]) == (2 * 200 * 2 * 64 * 2, 2 * 200 * 2 * 32 * 2)
    assert sum(gone.values()) == step.saved_bytes


def test_a_shared_prefix_is_taken_off_scales_by_token() -> None:
    sequences = [Lengths(1, 300)] * 3
    plain, shared = (Engine(SHAPE, MP31, "flash2", cache=Cache(dtype="fp8", shared=n)) for n in (0, 200))
    before, step = traffic(plain, plain.step(sequences)), shared.step(sequences)
    after = traffic(shared, step)
    gone = {key[0]: (before[key].dram_bytes or 0) - (t.dram_bytes or 0) for key, t in after.items()}
    rows = 2 * 200 * 2  # of two sequences' prefixes, for each K/V head
    assert {name: n for name, n in gone.items() if n} == {
        "K": rows * 64,
        "V": rows * 32,
        "SK": rows * 4,
        "SV": rows * 4,
    }
    assert sum(gone.values()) == step.saved_bytes


def test_padded_is_as_long_as_the_longest_queries_and_keys() -> None:
    batch = Batch(sequences=(Lengths(40, 40), Lengths(1, 300)))
    (one,) = packed(batch, {"d": 64, "heads": 4, "causal": True}, [MP31], ["flash2"])
    assert one.padded.sequences == (Lengths(40, 300),) * 2
    a = replace(one.engine.shape, n_q=1)
    assert [score_bytes(a, s.sequences) for s in one.steps.values()] == [2 * 4 * 2 * (1600 + 300), 2 * 4 * 2 * 24000]


def test_in_fp8_o_is_in_bf16_and_scales_are_held() -> None:
    """As the tensors of the programs of the sequences are, one by one."""
    engine = Engine(replace(SHAPE, dtype="fp8"), load_hardware("h200-sxm"), "flash2")
    step = engine.step([Lengths(5, 300), Lengths(40, 40), Lengths(40, 40)])
    found = held(engine, step)
    own = [engine.one(s, replace(step.schedule, grid_order="natural")).program.tensors for s in step.sequences]
    assert found == {t.name: sum(u.bytes for each in own for u in each if u.name == t.name) for t in own[0]}
    assert engine.io_bytes(step.sequences) == sum(found[name] for name in "QKVO")


def test_dataflows_that_can_are_taken() -> None:
    assert dataflows({"d": 64}) == ("flash2", "split-kv")
    assert dataflows({"d": 64, "dtype": "fp8"}) == ("flash2",)
