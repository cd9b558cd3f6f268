"""Bytes of the L2 as a GPU's counter shows them: closed forms, and an H200's kernels (iosim/data/h200_counters.csv)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean, median

import pytest

from iosim.dataflows import Dataflow, load_dataflow
from iosim.hardware import Hardware, load_hardware
from iosim.index import least
from iosim.memory.cache import dram_flows
from iosim.memory.counters import alike
from iosim.problem import Attention
from iosim.program import Builder, Program, rows
from iosim.schedule import Schedule
from iosim.study.run import Plan, Run, evaluate
from iosim.study.validate import shipped_rows, times
from iosim.study.validate.times import predicted_l2

H200 = load_hardware("h200-sxm")
STEP, SHARED = 21830 / 9037, 12410 / 9037  # reads in step, and nearly so, against reads that nobody shares


def program(blocks: int, *, shared: bool, causal: bool = False) -> Program:
    """Each block adds up the tiles of X, all or those up to its own: its own X, or one for all."""
    p = Builder("sum")
    X = p.tensor("X", (1 if shared else blocks, 8 * 64, 64), "fp16", "in")
    O = p.tensor("O", (64 * blocks, 64), "fp16", "out")
    with p.kernel("sum", i=blocks) as (i,):
        o = p.fill("o", shape=(64, 64), value=0)
        with p.loop("j", 0, least(i + 1, 8) if causal else 8) as j:
            x = p.load("x", X[0 if shared else i, rows(j, 64)])
            p.add(o, o, x)
        p.store(O[rows(i, 64)], p.cast("c", o, "fp16"))
    return p.done()


def run_of(p: Program, machine: Hardware = H200, **fields: object) -> Run:
    schedule = Schedule(block_q=64, block_k=64, **fields)  # type: ignore[arg-type]
    return evaluate(Plan(Attention(n_q=64, d=64), machine, Dataflow("sum", "", (), lambda *_: p), schedule, "", p))


TILE = 64 * 64 * 2


def test_what_nobody_shares_crosses_to_the_other_half_every_second_time() -> None:
    assert run_of(program(4, shared=False)).l2_counter_bytes == 1.5 * (4 * 8 + 4) * TILE
    one = H200.with_value("l2.partitions", 1)
    assert run_of(program(4, shared=False), one).l2_counter_bytes == (4 * 8 + 4) * TILE


def test_without_an_l2_nothing_is_counted() -> None:
    assert run_of(program(4, shared=False), replace(H200, caches=())).l2_counter_bytes == 0


def test_requests_are_merged_as_far_as_blocks_are_in_step() -> None:
    reads, writes = 8 * TILE, TILE  # of a block

    def counted(blocks: int, merged: float) -> int:
        return round(1.5 * blocks * (reads / merged + writes))

    assert run_of(program(2, shared=True)).l2_counter_bytes == counted(2, 2)  # no more than ask for it
    assert run_of(program(132, shared=True)).l2_counter_bytes == counted(132, STEP)  # one wave
    many = 132 * 32 * 2
    assert run_of(program(many, shared=True)).l2_counter_bytes == counted(many, SHARED)
    assert run_of(program(many, shared=True), persistent=True).l2_counter_bytes == counted(many, STEP)
    pairs = run_of(program(132, shared=True), multicast={"x": 2})  # half of the requests, of which fewer merge
    assert pairs.l2_counter_bytes == round(1.5 * 132 * (reads / 2 / (STEP / 2) + writes))
    fours = run_of(program(132, shared=True), multicast={"x": 4})
    assert fours.l2_counter_bytes == round(1.5 * 132 * (reads / 4 + writes))
    uneven = run_of(program(132, shared=True, causal=True))
    asked = uneven.device.l2_read_bytes
    assert uneven.l2_counter_bytes == round(1.5 * (asked / SHARED + 132 * writes))


def test_blocks_are_alike_where_their_loops_are() -> None:
    def of(name: str, a: Attention, **fields: object) -> list[bool]:
        schedule = Schedule(**{"block_q": 64, "block_k": 64, **fields})  # type: ignore[arg-type]
        return [alike(k) for k in load_dataflow(name)(a, schedule).kernels]

    assert of("flash2", Attention(n_q=1024, d=64)) == [True]
    assert of("flash2", Attention(n_q=1024, d=64, causal=True)) == [False]
    assert of("split-kv", Attention(n_q=64, n_k=1024, d=64), splits=4)[0]
    assert not of("split-kv", Attention(n_q=64, n_k=1024 - 64, d=64), splits=4)[0]
    assert of("flash1", Attention(n_q=256, d=64, causal=True)) == [True]  # a block does a whole head


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """DRAM bytes, which do not matter here, by the closed form."""

    def flows(p, counted, machine, resident, descending=(), multicast=None):  # type: ignore[no-untyped-def]
        return dram_flows(p, counted, machine.l2.capacity_bytes, resident, partitions=2, descending=descending,
                          multicast=multicast, method="closed form")  # fmt: skip

    times._call.cache_clear()
    monkeypatch.setattr(times, "behind_caches", flows)
    yield
    times._call.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_counters_of_an_h200() -> None:
    """Nothing is fitted.  What streams is right; what many read at one time depends on how far they drift apart."""
    off: dict[tuple[str, str], list[float]] = {}
    for r in (r for r in shipped_rows() if r.kernel is not None):
        error = 100 * (predicted_l2(r, H200) / r.measured["l2_bytes"] - 1)
        off.setdefault((r.implementation, r.kernel.role if r.kernel else ""), []).append(abs(error))
    whole = [e for errors in off.values() for e in errors]
    assert len(whole) == 111
    assert mean(whole) < 12
    assert median(whole) < 6
    for streams in (("standard", "softmax"), ("flash2", "copy"), ("flash2", "dot"), ("flash2", "convert dQ")):
        assert max(off[streams]) < 4.5
    assert mean(off["standard", "matmul S"]) < 6
    assert mean(off["flash2", "attention"]) < 15
    assert mean(off["cudnn", "attention"]) < 21
