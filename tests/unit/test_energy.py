"""Joules: closed forms on programs of a few tiles, laws, and what is refused."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.dataflows import Dataflow, load_dataflow
from iosim.errors import InputError
from iosim.hardware import Hardware, load_hardware
from iosim.problem import Attention
from iosim.program import Builder, Program, rows
from iosim.schedule import Schedule
from iosim.study.energy import FIGURES, EnergyUse, amounts, energy
from iosim.study.run import Plan, Run, evaluate, plan_of, run

FIGURE = [name for names in FIGURES.values() for name in names]
TILE = 64 * 64 * 2  # bytes of fp16


@cache
def priced(**changed: float) -> Hardware:
    """MP31 where every figure is 1 pJ, unless changed."""
    machine = load_hardware("mp31")
    for name in FIGURE:
        if name != "tmem_pj_per_byte":
            machine = machine.with_value(f"energy.{name}", changed.get(name, 1))
    return machine if "tdp_w" not in changed else machine.with_value("energy.tdp_w", changed["tdp_w"])


def tiny(a: Attention, _: Schedule) -> Program:
    """One block: S = Q K^T, X = exp(S - max), O = X + X."""
    p = Builder("tiny")
    Q = p.tensor("Q", (64, 64), a.dtype, "in")
    K = p.tensor("K", (64, 64), a.dtype, "in")
    O = p.tensor("O", (64, 64), "fp32", "out")
    with p.kernel("block", i=1) as (i,):
        q, k = p.load("q", Q[rows(i, 64)]), p.load("k", K[rows(i, 64)])
        s = p.matmul("s", q, k.T)
        x = p.exp("x", s, p.rowmax("top", s), scale=1.0)
        p.store(O[rows(i, 64)], p.add("o", x, x))
    return p.done()


def run_of(program: Program, machine: Hardware, schedule: Schedule | None = None) -> Run:
    flow = Dataflow(program.name, "", (), lambda *_: program)
    s = schedule or Schedule(block_q=64, block_k=64)
    return evaluate(Plan(Attention(n_q=64, d=64), machine, flow, s, "", program))


def planned(a: Attention, **fields: object) -> Run:
    """flash2 on an H200 with any fields of a schedule."""
    return evaluate(plan_of(a, load_hardware("h200-sxm"), load_dataflow("flash2"), fields))


def test_every_byte_and_operation_of_a_tiny_program() -> None:
    """By hand, for MP31, whose product takes both operands from SRAM, in steps of 16, and adds up in registers."""
    done = run_of(tiny(Attention(n_q=64, d=64), Schedule(block_q=64, block_k=64)), priced())
    n = 64 * 64
    product = 2 * n * 4 * (64 // 16)  # accumulators in and out, four times
    lanes = n * (2 + 1) * 4 + n * (3 + 1) * 4 + n * (1 + 1) * 4 + n * (2 + 1) * 4  # maximum, FMA, exp, sum
    stored = 4 * n  # from registers
    assert amounts(done, done.program.kernels[0]) == Counter(
        hbm_pj_per_byte=2 * TILE + 4 * n,
        l2_pj_per_byte=2 * TILE + 4 * n,
        sram_pj_per_byte=2 * TILE + 2 * TILE,  # copies in; each operand read once, by one instruction of 64 x 64
        registers_pj_per_byte=product + lanes + stored,
        matrix_fp16_pj_per_flop=2 * 64**3,
        vector_pj_per_flop=n + 2 * n + n,  # maximum, FMA, sum
        exp_pj_per_op=n,
    )
    total = sum(amounts(done, done.program.kernels[0]).values())
    assert done.energy.joules == pytest.approx(total * 1e-12, rel=1e-12)


def test_an_instruction_of_a_warp_takes_its_operands_through_registers() -> None:
    """A100: each m16n8k16 reads 16 x 16 of A, 16 x 8 of B and its accumulators; four warps share the rows."""
    program = tiny(Attention(n_q=64, d=64), Schedule(block_q=64, block_k=64))
    a100, mp31 = (run_of(program, load_hardware(name)) for name in ("a100-sxm-80gb", "mp31"))
    warps, groups = (amounts(r, program.kernels[0]) for r in (a100, mp31))
    instructions = 4 * 8 * 4
    fragments = instructions * (16 * 16 * 2 + 16 * 8 * 2)
    loaded = TILE + 4 * TILE  # a warp loads its own rows of A, and all of B
    assert warps["registers_pj_per_byte"] - groups["registers_pj_per_byte"] == fragments + loaded
    assert warps["sram_pj_per_byte"] == 2 * TILE + loaded


def test_a_reduction_passes_the_l2_both_ways() -> None:
    """Against the plain store of the kernel before it: out to the L2 and back, and in and out of SRAM on the way."""
    p = Builder("sums")
    X, O = p.tensor("X", (64, 64), "fp32", "in"), p.tensor("O", (64, 64), "fp32", "out")
    for name, add in (("first", False), ("again", True)):
        with p.kernel(name, i=1) as (i,):
            p.store(O[rows(i, 64)], p.scale("y", p.load("x", X[rows(i, 64)]), by=2.0), add=add)
    done = run_of(p.done(), priced())
    plain, added = (amounts(done, kernel) for kernel in done.program.kernels)
    assert added["l2_pj_per_byte"] - plain["l2_pj_per_byte"] == 64 * 64 * 4
    assert added["sram_pj_per_byte"] - plain["sram_pj_per_byte"] == 2 * 64 * 64 * 4


def test_a_multicast_read_counts_once_for_its_cluster() -> None:
    a = Attention(n_q=1024, d=64)
    alone, pairs = (planned(a, block_q=128, block_k=128, multicast=m) for m in ({}, {"k": 2}))
    K = 8 * 1024 * 64 * 2  # by 8 blocks
    assert alone.device.l2_read_bytes - pairs.device.l2_read_bytes == K // 2
    counts = [amounts(r, r.program.kernels[0]) for r in (alone, pairs)]
    assert counts[0]["l2_pj_per_byte"] - counts[1]["l2_pj_per_byte"] == K // 2


def test_tensor_memory_takes_the_place_of_registers_for_accumulators() -> None:
    e = run(Attention(n_q=512, d=64), hardware="b200", check=False).energy
    assert {"tmem", "registers"} <= {p.name for p in e.parts}
    with pytest.raises(InputError, match=r"the profile b200 does not know energy.tmem_pj_per_byte"):
        energy(run(Attention(n_q=512, d=64), hardware=load_hardware("b200").with_value("energy.tmem_pj_per_byte", None),
                   check=False))  # fmt: skip


problems = st.builds(
    Attention,
    n_q=st.integers(1, 300), n_k=st.integers(1, 300), d=st.sampled_from((16, 64, 128)), heads=st.integers(1, 3),
    causal=st.booleans(), dtype=st.sampled_from(("fp16", "bf16", "fp32")),
)  # fmt: skip
flows = st.sampled_from(("standard", "flash1", "flash2", "flash-backward"))


@given(problems, flows, st.sampled_from(("mp31", "a100-sxm-80gb", "b200")))
@settings(max_examples=8, deadline=None)
def test_kernels_parts_and_ends_add_up_and_units_are_those_of_the_timeline(a: Attention, flow: str, hw: str) -> None:
    r = run(a, dataflow=flow, hardware=hw, check=False)
    e = r.energy
    for name in FIGURES:
        own = [p for parts in e.kernels.values() for p in parts if p.name == name]
        whole = [p for p in e.parts if p.name == name]
        assert sum(p.joules for p in own) == pytest.approx(sum(p.joules for p in whole), rel=1e-9)
        assert sum(p.count for p in own) == sum(p.count for p in whole)
    assert e.low <= e.joules <= e.high
    assert e.joules <= e.counted
    # SRAM is busy for as long as its bytes take, at these machines' one clock, rounded up for each share of a phase.
    assert r.timeline is not None
    busy = r.timeline.units["sram"].busy_ps / 1e12
    counted = sum(p.count for p in e.parts if p.name == "sram")
    assert busy == pytest.approx(counted / (r.hardware.sram.bandwidth or 1), rel=0.5 if counted < 1e5 else 0.02)


@given(st.sampled_from(FIGURE), st.floats(0, 50))
@settings(max_examples=15, deadline=None)
def test_energy_is_linear_in_every_figure(name: str, value: float) -> None:
    base, changed = priced(), priced()
    if name == "tmem_pj_per_byte":
        return
    changed = changed.with_value(f"energy.{name}", value)
    r = _flash2()
    part = next(p for p in (replace(r, hardware=base)).energy.parts if name in FIGURES[p.name])
    count = amounts(r, r.program.kernels[0])[name]
    assert part.count >= count
    gained = energy(replace(r, hardware=changed)).counted - energy(replace(r, hardware=base)).counted
    assert gained == pytest.approx(count * (value - 1) * 1e-12, rel=1e-9, abs=1e-18)


@cache
def _flash2() -> Run:
    return run(Attention(n_q=256, d=64), hardware=priced(), check=False)


def test_time_changes_nothing_but_the_bound() -> None:
    a = Attention(n_q=512, d=64)

    def at(bandwidth: float, tdp: float) -> EnergyUse:
        machine = priced(tdp_w=tdp).with_value("hbm.bandwidth_gb_per_s", bandwidth)
        r = run(a, hardware=machine, check=False, schedule={"block_q": 64, "block_k": 64})
        assert r.energy.bound_joules == pytest.approx(tdp * (r.seconds or 0))
        return r.energy

    fast, slow, bound = at(1600, 10**6), at(16, 10**6), at(1600, 0.5)
    assert fast.parts == slow.parts == bound.parts
    assert fast.joules == slow.joules == fast.counted
    assert not fast.bound_binds
    assert bound.bound_binds
    assert bound.joules == bound.bound_joules == bound.high
    assert bound.joules < fast.joules


def test_without_tdp_or_time_there_is_no_bound() -> None:
    a = Attention(n_q=128, d=64)
    assert run(a, hardware="mp31", check=False).energy.bound_joules is None  # no TDP
    slow = run(a, hardware="mp22", check=False).energy  # no time
    assert slow.bound_joules is None
    assert slow.joules == slow.counted > 0


def test_a_training_step_takes_what_both_passes_take() -> None:
    whole = run(Attention(n_q=256, d=64), computes="training", hardware="h200-sxm", check=False)
    parts = [p.energy for p in whole.parts]
    assert whole.energy.counted == pytest.approx(sum(e.counted for e in parts))
    assert whole.energy.bound_joules == pytest.approx(sum(e.bound_joules or 0 for e in parts))


def test_spilled_registers_go_through_every_level_up_to_theirs() -> None:
    a = Attention(n_q=1024, d=128, heads=16)
    runs = (planned(a, block_q=128, block_k=64, registers=255, spills=n) for n in (0, 8, 250))
    none, few, many = (amounts(r, r.program.kernels[0]) for r in runs)
    assert few["sram_pj_per_byte"] > none["sram_pj_per_byte"]
    assert few["l2_pj_per_byte"] == none["l2_pj_per_byte"]
    assert many["l2_pj_per_byte"] - none["l2_pj_per_byte"] == many["sram_pj_per_byte"] - none["sram_pj_per_byte"] > 0
