"""The timeline: small runs whose picoseconds are worked out by hand, orders of a loop, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from iosim.dataflows.flash1 import flash1
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.errors import InputError
from iosim.hardware import Hardware, load_hardware
from iosim.interpreters.jumps import Jumps
from iosim.interpreters.ledger import ledger
from iosim.interpreters.shapes import Repeat, Visit
from iosim.interpreters.timeline import (
    Timeline,
    deal,
    deal_after,
    folded,
    place_blocks,
    timeline,
)
from iosim.memory.cache import dram_flows
from iosim.memory.onchip import CapacityError, footprints
from iosim.problem import Attention
from iosim.program import Builder, Program, rows
from iosim.schedule import Order, Role, Schedule, Step

# One processor at 1 GHz.  A tile of 64 x 64 fp16 is 8,192 bytes: 81,920 ps of DRAM at 100 GB/s, and 8,192 ps of the
# L2, the copy engine or the SRAM at 1,000 GB/s.  A product of two such tiles is 2 * 64^3 FLOP: 524,288 ps at 1 TFLOP/s.
SLOW = {
    "processor.count": 1,
    "processor.clock_mhz": 1000,
    "hbm.bandwidth_gb_per_s": 100,
    "hbm.read_efficiency": 1,
    "hbm.mixed_efficiency": 1,
    "hbm.latency_cycles": 400,
    "l2.bandwidth_gb_per_s": 1000,
    "copy.bandwidth_bytes_per_clock": 1000,
    "sram.bandwidth_bytes_per_clock": 1000,
    "matrix.tflops.fp16": 1,
    "exp.ops_per_clock": 1000,
    "vector.lanes_per_clock": 1000,
    "launch.kernel_us": 0,
}
FILL, LOAD, LATENCY, PRODUCT, STORE = 4_096, 81_920, 400_000, 524_288, 81_920


@cache
def by_hand(**changed: float) -> Hardware:
    hardware = load_hardware("mp31")
    for name, value in {**SLOW, **{key.replace("__", "."): x for key, x in changed.items()}}.items():
        hardware = hardware.with_value(name, value)
    return hardware


def squares(trips: int, blocks: int = 1, guard: bool = False) -> Program:
    """A block adds up K K^T over the tiles of K; with `guard`, it does not load the first one."""
    p = Builder("squares")
    K = p.tensor("K", (64 * trips, 64), "fp16", "in")
    O = p.tensor("O", (64 * blocks, 64), "fp16", "out")
    with p.kernel("sum", i=blocks) as (i,):
        o = p.fill("o", shape=(64, 64), value=0)
        with p.loop("j", 0, trips) as j:
            if guard:
                with p.when(j, 1, trips):
                    k = p.load("k", K[rows(j, 64)])
            else:
                k = p.load("k", K[rows(j, 64)])
            with p.phase("product"):
                p.matmul(o, k, k.T, add=True)
        p.store(O[rows(i, 64)], o)
    return p.done()


def run(program: Program, s: Schedule, hardware: Hardware, fidelity: str = "chip", **options: bool) -> Timeline:
    resident = {n: f.resident * (hardware.processors or 1) for n, f in footprints(program, s, hardware).items()}
    cache_bytes = hardware.l2.capacity_bytes if hardware.l2 is not None else None
    device = dram_flows(program, ledger(program), cache_bytes, resident)
    return timeline(program, s, hardware, device, fidelity=fidelity, **options)  # type: ignore[arg-type]


def tiles(stages: int = 2, **fields: object) -> Schedule:
    return Schedule(**{"block_q": 64, "block_k": 64, "stages": (stages,), **fields})  # type: ignore[arg-type]


def books_are_exact(t: Timeline) -> bool:
    return all(
        u.busy_ps + sum(u.stalls_ps.values()) == u.instances * k.makespan_ps and min(u.stalls_ps.values()) >= 0
        for k in t.kernels
        for u in k.units.values()
    )


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize("fidelity", ["chip", "fair"])
def test_one_stage_exposes_every_load(fidelity: str) -> None:
    """Each of the four trips waits for its load, then multiplies; the result is written at the end."""
    t = run(squares(4), tiles(1), by_hand(), fidelity)
    assert t.makespan_ps == FILL + 4 * (LOAD + LATENCY + PRODUCT) + STORE
    matrix = t.units["matrix"]
    assert matrix.busy_ps == 4 * PRODUCT
    assert matrix.stalls_ps == {
        "data": 4 * (LOAD + LATENCY) + STORE,
        "buffer": 0,
        "matrix": 0,
        "vector": FILL,
        "barrier": 0,
        "launch": 0,
        "tail": 0,
    }


@pytest.mark.parametrize("fidelity", ["chip", "fair"])
def test_double_buffering_hides_a_load_that_is_shorter_than_the_product(fidelity: str) -> None:
    """LOAD + LATENCY < PRODUCT: only the first load is seen."""
    t = run(squares(4), tiles(2), by_hand(), fidelity)
    assert t.makespan_ps == FILL + LOAD + LATENCY + 4 * PRODUCT + STORE


def test_what_of_a_longer_load_sticks_out() -> None:
    """With 100,000 ps more of latency a load takes 581,920.  Both first ones are issued at once, one after the other in
    DRAM; that of trip 2 is issued when trip 0 ends and comes 581,920 later, while trip 1 takes 524,288; that of trip 3
    when trip 1 ends, and it comes before trip 2 has."""
    t = run(squares(4), tiles(2), by_hand(hbm__latency_cycles=500))
    load = LOAD + LATENCY + 100_000
    trip_2 = FILL + load + PRODUCT + load  # its data arrives
    assert t.makespan_ps == trip_2 + 2 * PRODUCT + STORE


def test_a_launch_stops_every_unit_of_every_kernel() -> None:
    t = run(squares(4), tiles(1), by_hand(launch__kernel_us=2))
    assert t.makespan_ps == 2_000_000 + FILL + 4 * (LOAD + LATENCY + PRODUCT) + STORE
    assert {u.stalls_ps["launch"] for u in t.units.values()} == {2_000_000}


def test_a_load_that_its_guard_leaves_out_takes_no_time() -> None:
    """Trip 0 multiplies what is in the buffer; in one stage the other trips wait for their loads."""
    t = run(squares(4, guard=True), tiles(1), by_hand())
    assert t.makespan_ps == FILL + PRODUCT + 3 * (LOAD + LATENCY + PRODUCT) + STORE
    assert t.moved["K", "read"] == 3 * 8192


def nest(outer: int, trips: int, guard: bool = False) -> Program:
    """A block adds up W K^T over `trips` tiles of K for each tile of W."""
    p = Builder("nest")
    W, K = p.tensor("W", (64 * outer, 64), "fp16", "in"), p.tensor("K", (64 * outer * trips, 64), "fp16", "in")
    O = p.tensor("O", (64, 64), "fp16", "out")
    with p.kernel("sum", i=1) as (i,):
        o = p.fill("o", shape=(64, 64), value=0)
        with p.loop("a", 0, outer) as a:
            w = p.load("w", W[rows(a, 64)])
            with p.loop("j", a if guard else 0, trips) as j:
                k = p.load("k", K[rows(a * trips + j, 64)])
                with p.phase("product"):
                    p.matmul(o, w, k.T, add=True)
        p.store(O[rows(i, 64)], o)
    return p.done()


@pytest.mark.parametrize("fidelity", ["chip", "fair"])
def test_an_inner_loop_starts_anew_in_each_iteration_around_it(fidelity: str) -> None:
    """W and the first K are asked for at the same time, so that K comes a transfer later; W has one buffer, which is
    free when the inner loop before has ended.  Two stages hide the other loads under products."""
    t = run(nest(2, 3), tiles(1), by_hand(), fidelity)
    assert t.makespan_ps == FILL + 2 * (LOAD + 3 * (LOAD + LATENCY + PRODUCT)) + STORE
    assert books_are_exact(t)
    t = run(nest(2, 3), tiles(2), by_hand(), fidelity)
    assert t.makespan_ps == FILL + 2 * (LOAD + LOAD + LATENCY + 3 * PRODUCT) + STORE
    assert t.moved == {("W", "read"): 2 * 8192, ("K", "read"): 6 * 8192, ("O", "write"): 8192}


def test_bounds_of_an_inner_loop_follow_the_outer_index() -> None:
    """3, 2, 1 and no trips: the last W is loaded for nothing, but the run ends when it has arrived."""
    t = run(nest(4, 3, guard=True), tiles(1), by_hand(), "chip")
    waits = [LOAD + n * (LOAD + LATENCY + PRODUCT) for n in (3, 2, 1)]
    assert t.makespan_ps == FILL + sum(waits) + LOAD + LATENCY
    assert t.moved["W", "read"] == 4 * 8192


def test_a_producer_of_an_inner_loop_runs_ahead_into_the_next_iteration_around_it() -> None:
    """It loads the first two K at once, and the next ones as products end, so that later W alone is waited for."""
    order = Order((Role("producer", 1, (issue("k"),)), Role("consumer", 1, (work("product"),))), {"k": 2})
    t = run(nest(2, 3), tiles(orders={"j": order}), by_hand())
    first = 2 * LOAD + LOAD + LATENCY + 3 * PRODUCT
    assert t.makespan_ps == first + LOAD + LATENCY + 3 * PRODUCT + STORE
    assert books_are_exact(t)


def test_blocks_beyond_the_processors_run_in_waves_and_the_last_one_leaves_a_tail() -> None:
    """Three blocks of one trip on two processors with one slot each: the third waits for the first.

    K is read from DRAM once, shared by the blocks: a third of 81,920 ps each, rounded up.  The L2 serves the two first
    blocks one after the other.
    """
    hardware = by_hand(processor__count=2, processor__max_blocks=1)
    t = run(squares(1, blocks=3), tiles(1), hardware)
    alone = run(squares(1, blocks=1), tiles(1), hardware)
    assert 2 * alone.makespan_ps * 0.9 < t.makespan_ps < 2 * alone.makespan_ps
    assert t.units["matrix"].stalls_ps["tail"] > alone.makespan_ps / 2
    assert books_are_exact(t)


# ---------------------------------------------------------------- orders


def issue(phase: str, ahead: int = 0) -> Step:
    return Step("issue", phase, ahead)


def wait(phase: str, ahead: int = 0) -> Step:
    return Step("wait", phase, ahead)


def work(phase: str, ahead: int = 0) -> Step:
    return Step("run", phase, ahead)


TAKE, GIVE = Step("take"), Step("give")


def flash3() -> Order:
    """FlashAttention-3: a producer; QK of the next tile and PV of this one in flight under the softmax; in turns."""
    steps = (TAKE, issue("qk", 1), issue("pv"), GIVE, wait("qk", 1), work("softmax", 1), wait("pv"), work("rescale", 1))
    producer = Role("producer", 1, (issue("k"), issue("v")))
    return Order((producer, Role("consumers", 2, steps)), {"k": 2, "v": 2, "p": 2})


def test_a_producer_that_runs_ahead_waits_for_a_free_buffer() -> None:
    order = Order((Role("producer", 1, (issue("k"),)), Role("consumer", 1, (work("product"),))), {"k": 2})
    t = run(squares(8), tiles(orders={"j": order}), by_hand())
    assert t.makespan_ps == FILL + LOAD + LATENCY + 8 * PRODUCT + STORE - FILL  # the producer starts while others fill
    assert t.units["dram"].stalls_ps["buffer"] > 4 * PRODUCT
    assert books_are_exact(t)


def test_taking_turns_is_booked_as_a_barrier() -> None:
    steps = (issue("k", 1), TAKE, work("product"), GIVE)
    order = Order((Role("groups", 2, steps),), {"k": 2})
    t = run(squares(8), tiles(orders={"j": order}), by_hand(hbm__latency_cycles=5000))
    assert t.units["vector"].stalls_ps["barrier"] > 0 or t.units["sram"].stalls_ps["barrier"] > 0
    assert books_are_exact(t)


@pytest.mark.parametrize("fidelity", ["chip", "fair"])
def test_flash2_in_the_order_of_flash3_is_faster_and_its_books_are_exact(fidelity: str) -> None:
    hardware = load_hardware("h200-sxm")
    a = Attention(n_q=128 * 4, n_k=128 * 24, d=128)
    s = Schedule(block_q=128, block_k=128, groups=2)
    default = run(flash2(a, s), s, hardware, fidelity)
    s3 = Schedule(block_q=128, block_k=128, groups=2, orders={"j": flash3()})
    t = run(flash2(a, s3), s3, hardware, fidelity)
    assert t.makespan_ps < 0.97 * default.makespan_ps
    assert books_are_exact(t)
    assert t.moved == default.moved


def test_an_order_in_which_a_phase_waits_for_itself_is_refused_not_hung() -> None:
    order = Order((Role("groups", 1, (issue("k"), wait("product"), issue("product"))),), {"k": 2})
    with pytest.raises(InputError, match=r"kernel sum: the order never ends: in block 0 .*\"wait product\""):
        run(squares(4), tiles(orders={"j": order}), by_hand())


def test_groups_that_wait_for_a_turn_that_nobody_gives_are_named() -> None:
    order = Order((Role("groups", 2, (issue("k"), TAKE, work("product"))),), {"k": 2})
    with pytest.raises(InputError, match=r"group 1 of role workers waits at \"take\" of iteration 0 of loop j"):
        run(squares(4), tiles(orders={"j": order}), by_hand(), "fair")


def test_a_copy_that_comes_after_its_use_is_refused() -> None:
    order = Order((Role("groups", 1, (work("product"), issue("k"))),), {"k": 2})
    with pytest.raises(InputError, match=r"waits at \"run product\" of iteration 0"):
        run(squares(4), tiles(orders={"j": order}), by_hand())


def test_a_script_of_another_run_is_refused() -> None:
    program, s, hardware = squares(4), tiles(), by_hand()
    device = dram_flows(program, ledger(program), None, {"sum": 1})
    other = squares(3)
    made = timeline(
        other, s, hardware, dram_flows(other, ledger(other), None, {"sum": 1}), fidelity="chip", record=True
    )
    with pytest.raises(InputError, match="the script is of another run"):
        timeline(program, s, hardware, device, fidelity="chip", script=made.script)


# ---------------------------------------------------------------- what is refused


def test_a_misspelt_fidelity_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"fidelity: 'chipp' is not one of fair, chip \(did you mean 'chip'\?\)"):
        run(squares(1), tiles(), by_hand(), "chipp")


def test_a_block_that_does_not_fit_is_refused() -> None:
    a, s = Attention(n_q=4096, d=128), Schedule(block_q=256, block_k=256)
    with pytest.raises(CapacityError, match=r"needs .* B of SRAM"):
        run(flash2(a, s), s, load_hardware("mp31"))


def test_a_machine_that_lacks_a_number_is_refused() -> None:
    with pytest.raises(InputError, match=r"mp31: no time without exp.ops_per_clock"):
        run(squares(1), tiles(), load_hardware("mp31").with_value("exp.ops_per_clock", None))


# ---------------------------------------------------------------- results


def test_the_bound_is_the_unit_that_is_busy_for_the_largest_share() -> None:
    assert run(squares(16), tiles(2), by_hand()).bound == "matrix"
    assert run(squares(16), tiles(2), by_hand(hbm__bandwidth_gb_per_s=1)).bound == "dram"
    assert run(squares(1), tiles(2), by_hand(launch__kernel_us=50)).bound == "launch"


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ({"n_q": 64 * 8, "n_k": 64 * 16, "d": 128}, 5),
        ({"n_q": 64 * 8, "n_k": 64 * 8, "d": 128}, 30),
        ({"n_q": 64 * 8, "n_k": 64 * 16, "d": 128, "causal": True}, 20),
    ],
)
def test_fair_says_how_far_chip_may_be(program: dict[str, int], expected: int) -> None:
    s = Schedule(block_q=64, block_k=64)
    a = Attention(**program)  # type: ignore[arg-type]
    assert run(flash2(a, s), s, load_hardware("mp31"), "fair").kernels[0].spread_pct == expected


def test_chip_differs_from_nothing() -> None:
    assert run(squares(4), tiles(1), by_hand(), "chip").kernels[0].spread_pct == 0


@pytest.mark.slow
def test_the_hash_seed_changes_nothing() -> None:
    code = (
        "from iosim import run, Attention\n"
        "for flow in ('flash2', 'standard'):\n"
        "    for how in ('fair', 'chip'):\n"
        "        hw = __import__('iosim').load_hardware('mp31').with_value('processor.count', 3)\n"
        "        r = run(Attention(n_q=200, n_k=333, d=64, heads=2, causal=True), dataflow=flow, hardware=hw,\n"
        "                fidelity=how, check=False)\n"
        "        print(r.timeline.makespan_ps, r.stalls.to_csv(), sorted(r.timeline.moved.items()))\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(seen) == 1
    assert len(next(iter(seen)).splitlines()) > 20


# ---------------------------------------------------------------- placing blocks


def test_blocks_are_dealt_to_processors_evenly() -> None:
    assert deal(5, 4) == ((1, 2), (3, 1))
    assert deal(8, 4) == ((4, 2),)
    assert deal(3, 4) == ((3, 1),)


def test_slots_take_blocks_as_they_get_free() -> None:
    assert deal_after(3, 4, (0, 500), 100) == ((3, 1),)  # processors 0, 1, 2 are free before a second slot is
    assert deal_after(3, 4, (0, 50), 100) == ((1, 2), (1, 1))


def test_a_block_is_placed_where_a_slot_is_free_first() -> None:
    """Times 3, 1, 1, 1 on two processors: 3 on one, three times 1 on the other."""
    spans = [lambda _busy, _each: 3.0, lambda _busy, _each: 1.0]
    assert place_blocks([0, 1, 1, 1], spans, 2, 1) == (3, 6)


def test_a_block_goes_faster_when_others_have_ended() -> None:
    """Alone on a processor a block takes 2, beside another 4; the second one is half done when the first ends at 4...

    Blocks of 4 and 8 share a processor until 4; then the second has half of its work left, which takes 2 of 4.
    """
    spans = [lambda _busy, each: 4.0 if each == 2 else 2.0, lambda _busy, each: 8.0 if each == 2 else 4.0]
    assert place_blocks([0, 1], spans, 1, 2) == (6, 6)


# ---------------------------------------------------------------- jumps over iterations


def jumps_of(monkeypatch: pytest.MonkeyPatch) -> list[Jumps]:
    """Gets the jumps of every simulation."""
    seen: list[Jumps] = []
    run = Jumps.run

    def noted(self: Jumps) -> None:
        seen.append(self)
        run(self)

    monkeypatch.setattr(Jumps, "run", noted)
    return seen


@pytest.mark.parametrize("flow", [flash2, standard, flash1])
@pytest.mark.parametrize("causal", [False, True])
def test_jumps_change_nothing_and_leave_little_to_simulate(
    flow: Callable[..., Program], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 trips, the last one ragged, of which a dozen are simulated."""
    seen = jumps_of(monkeypatch)
    hardware = load_hardware("h200-sxm")
    a = Attention(n_q=128 * 16, n_k=64 * 80 - 5, d=128, causal=causal, causal_align="top-left")
    s = Schedule(block_q=128, block_k=64, groups=2, softmax_rows=4, softmax_cols=64, stages=(1,))
    short, whole = (run(flow(a, s), s, hardware, "fair", jump=jump) for jump in (True, False))
    assert replace(short, script=None) == replace(whole, script=None)
    assert not any(kernel.extrapolated for kernel in short.kernels)
    made = [jump for jumps in seen for jump in jumps.made]
    assert made
    assert min(jump.trips for jump in made if jump.what is not None) <= 12
    assert books_are_exact(short)


def test_where_no_state_recurs_a_loop_goes_on_as_it_did_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jumps, "recurs", lambda *_: False)
    hardware = load_hardware("h200-sxm")
    a, s = Attention(n_q=128 * 16, n_k=64 * 1000, d=128), Schedule(block_q=128, block_k=64, groups=2)
    short, whole = (run(flash2(a, s), s, hardware, "fair", jump=jump) for jump in (True, False))
    assert short.kernels[0].extrapolated
    assert short.makespan_ps == pytest.approx(whole.makespan_ps, rel=0.001)
    assert short.moved == whole.moved
    assert books_are_exact(short)


def test_a_loop_that_blocks_do_not_go_through_together_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Jumps, "over_trips", lambda *_, exact: False)  # noqa: ARG005 - its name
    hardware = load_hardware("h200-sxm")
    a, s = Attention(n_q=128 * 16, n_k=64 * 3000, d=128), Schedule(block_q=128, block_k=64, groups=2)
    kernel = run(flash2(a, s), s, hardware, "fair").kernels[0]
    assert kernel.extrapolated


def test_loops_that_alternate_are_one_loop() -> None:
    a, b = (Repeat(2, (Visit(1, ((trips, ()),)),)) for trips in (3, 4))
    start = Visit(0, ((1, ()),))
    assert folded([start, a, b, a, b, a, b, a]) == (start, Repeat(3, (a, b)), a)
    assert folded([a, a, b, b]) == (Repeat(4, a.body), Repeat(4, b.body))
    assert folded([a, b]) == (a, b)


def test_a_script_is_of_the_clock_that_a_run_settles_at() -> None:
    """Under the power limit a kernel is run at several clocks: the script is the last one's, each request once."""
    hardware = load_hardware("h200-sxm").with_value("processor.count", 4).with_value("power.limit_w", 150)
    a, s = Attention(n_q=512, n_k=512, d=64), Schedule(block_q=128, block_k=64, groups=2)
    program = flash2(a, s)
    prints = {k: f.resident * 4 for k, f in footprints(program, s, hardware).items()}
    traffic = dram_flows(program, ledger(program), 10**8, prints)
    base = timeline(program, s, hardware, traffic, fidelity="chip", record=True)
    assert base.script is not None
    assert all(len(order) == len(set(order)) for order in base.script.served.values())
    again = timeline(program, s, hardware, traffic, fidelity="chip", script=base.script)
    assert again.makespan_ps == base.makespan_ps
