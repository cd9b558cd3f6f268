"""The order in which blocks are launched: the longest first leave a shorter tail, and nothing else changes.

A causal mask gives the query tiles of a head 1, 2, ..., n trips.  On p processors, p < n <= 2p, a grid launched in its
own order gives processor k the tiles k and p + k, and so takes 2n - p trips; the longest first, the last ones join the
shortest of the first, and it takes max(n, 2 (n - p) + 1), which is the least possible: n is one tile, and two of the
p + 1 longest, n - p or more trips each, have to share a processor.
"""

from __future__ import annotations

from itertools import product

import pytest

from iosim.dataflows.flash2 import flash2
from iosim.dataflows.flash_backward import flash_backward
from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.interpreters.ledger import ledger
from iosim.interpreters.model import Model
from iosim.interpreters.timeline import Timeline, place_blocks
from iosim.memory.cache import dram_flows
from iosim.problem import Attention
from iosim.program import Program
from iosim.schedule import Schedule
from iosim.study.run import compare
from tests.cli.test_run import document
from tests.conftest import Iosim
from tests.unit.test_timeline import books_are_exact, by_hand, run, tiles


def machine(processors: int) -> Hardware:
    """One block at a time on a processor, and memory that is no limit."""
    return by_hand(processor__count=processors, processor__max_blocks=1, hbm__bandwidth_gb_per_s=10**6,
                   l2__bandwidth_gb_per_s=10**6, hbm__latency_cycles=10)  # fmt: skip


def causal(n: int, heads: int = 1) -> Attention:
    return Attention(n_q=64 * n, d=64, heads=heads, causal=True)


def ordered(order: str) -> Schedule:
    return tiles(grid_order=order)


def iterations(program: Program, s: Schedule) -> tuple[list[int], list[int]]:
    """Of every block, in launch order, of the kernel that takes most; and the extents of its grid."""
    traffic = dram_flows(program, ledger(program), None, {})
    kernel = next(k for k in program.kernels if k.name in ("attention", "gradients"))
    model = Model(kernel, s, machine(2), tuple(f for f in traffic.flows if f.flow.kernel == kernel.name))
    lengths = [model.iterations(kind.shape) for kind in model.classes]
    return [lengths[c] for c in model.class_of_blocks().tolist()], [n for _, n in kernel.grid]


@pytest.mark.parametrize(("p", "n"), [(p, n) for p in range(1, 7) for n in range(p + 1, 2 * p + 1)])
def test_trips_of_a_causal_head(p: int, n: int) -> None:
    trip = 10**6  # what is rounded is one part in it
    spans = [lambda _busy, _each, trips=trips: float(trip * trips) for trips in range(1, n + 1)]
    total = n * (n + 1) // 2
    orders = {2 * n - p: range(n), max(n, 2 * (n - p) + 1): range(n - 1, -1, -1)}
    for trips, order in orders.items():
        assert place_blocks(order, spans, p, 1) == pytest.approx((trips * trip, total * trip), abs=2)


@pytest.mark.parametrize("fidelity", ["fair", "chip"])
@pytest.mark.parametrize(("p", "n"), [(2, 4), (3, 5), (4, 8)])
def test_the_longest_first_shorten_the_tail(fidelity: str, p: int, n: int) -> None:
    """By so many trips as above.  What a trip takes follows from a block of 8 and one of 9 trips."""
    long, short = (Attention(n_q=64, n_k=64 * trips, d=64) for trips in (9, 8))
    trip = _time(long, "natural", p, fidelity).makespan_ps - _time(short, "natural", p, fidelity).makespan_ps
    natural, longest = (_time(causal(n), order, p, fidelity) for order in ("natural", "longest-first"))
    saved = 2 * n - p - max(n, 2 * (n - p) + 1)
    assert natural.makespan_ps - longest.makespan_ps == pytest.approx(saved * trip, rel=0.02)
    # A processor waits for the last one to end: p times the makespan, less the trips.
    tails = [t.units["matrix"].stalls_ps["tail"] for t in (natural, longest)]
    assert tails[0] - tails[1] == pytest.approx(p * saved * trip, rel=0.02)
    assert books_are_exact(natural)
    assert books_are_exact(longest)
    for key in natural.units:
        assert natural.units[key].busy_ps == longest.units[key].busy_ps
    assert natural.moved == longest.moved


def _time(a: Attention, order: str, processors: int, fidelity: str) -> Timeline:
    s = ordered(order)
    return run(flash2(a, s), s, machine(processors), fidelity)


@pytest.mark.parametrize("flow", [flash2, flash_backward])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"causal": True, "window": 100}])
def test_each_run_along_the_last_axis_is_sorted_and_holds_the_same_blocks(flow, mask) -> None:  # type: ignore[no-untyped-def]
    a = Attention(n_q=300, n_k=350, d=64, heads=4, kv_heads=2, **mask)
    program = flow(a, ordered("natural"))
    (natural, extents), (longest, _) = (iterations(program, ordered(order)) for order in ("natural", "longest-first"))
    for first in range(0, len(natural), extents[-1]):
        row = slice(first, first + extents[-1])
        assert longest[row] == sorted(natural[row], reverse=True)
    if flow is flash2 and mask == {"causal": True}:
        assert natural[: extents[-1]] == sorted(natural[: extents[-1]])


@pytest.mark.parametrize("resident", [1, 2])
def test_fair_and_chip_agree_on_what_the_order_brings(resident: int) -> None:
    """Several heads, two blocks on a processor: times are within what `fair` says of itself in either order."""
    a, found = causal(9, heads=4), {}
    hardware = by_hand(processor__count=5, processor__max_blocks=resident, hbm__bandwidth_gb_per_s=1000)
    for order, fidelity in product(("natural", "longest-first"), ("fair", "chip")):
        s = ordered(order)
        found[order, fidelity] = run(flash2(a, s), s, hardware, fidelity)
    for order in ("natural", "longest-first"):
        fair, chip = found[order, "fair"], found[order, "chip"]
        assert abs(fair.makespan_ps / chip.makespan_ps - 1) <= fair.kernels[0].spread_pct / 100
    for fidelity in ("fair", "chip"):
        natural, longest = (found[order, fidelity] for order in ("natural", "longest-first"))
        assert longest.makespan_ps < natural.makespan_ps
        assert longest.units["matrix"].stalls_ps["tail"] < natural.units["matrix"].stalls_ps["tail"]


def test_bytes_and_numbers_are_the_same() -> None:
    a = Attention(n_q=500, d=64, heads=4, kv_heads=2, causal=True, lse=True)
    natural, longest = (
        compare(a, dataflows="flash2", schedule={"grid_order": order}).runs[0] for order in ("natural", "longest-first")
    )
    assert natural.program == longest.program
    assert natural.traffic.equals(longest.traffic)
    assert natural.check == longest.check


def test_the_option(iosim: Iosim) -> None:
    args = (
        "run",
        "-n",
        "4096",
        "-d",
        "128",
        "-H",
        "3",
        "--causal",
        "--dataflow",
        "flash2",
        "--no-check",
        "--grid-order",
    )
    found = {order: document(iosim, *args, order)["runs"][0] for order in ("natural", "longest-first")}
    assert found["longest-first"]["schedule"]["grid_order"] == "longest-first"
    assert found["longest-first"]["time"]["makespan_ps"] < 0.9 * found["natural"]["time"]["makespan_ps"]
    assert found["longest-first"]["traffic"] == found["natural"]["traffic"]
    answer = iosim(*args, "longest")
    assert answer.code == 2
    assert "--grid-order: 'longest' is not one of natural, longest-first (did you mean 'longest-first'?)" in answer.err
    idle = iosim("run", "-n", "64", "-d", "64", "--dataflow", "flash1", "--grid-order", "longest-first")
    assert "--grid-order: changes nothing in flash1" in idle.err
    with pytest.raises(InputError, match="grid_order: 3 is not one of"):
        tiles(grid_order=3)
