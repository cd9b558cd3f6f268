"""The last cache: what it leaves of a program's device traffic, simulated and in closed form."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim.dataflows import load_dataflow
from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.hardware import load_hardware
from iosim.interpreters.ledger import ledger
from iosim.memory.cache import USABLE, DeviceTraffic, Method, behind_caches, dram_flows
from iosim.memory.closed_form import WAYS, distinct_tiles, kept
from iosim.memory.launch import requests
from iosim.memory.lru import Cache, hashed
from iosim.problem import Attention
from iosim.program import Builder, Span, rows
from iosim.schedule import Schedule

TILES = Schedule(block_q=128, block_k=128)
MATRIX = 4096 * 128 * 2  # Q, K, V or O of one head at n = 4096, d = 128 in fp16
METHOD_NAMES: tuple[Method, ...] = ("simulated", "closed form")
METHODS = pytest.mark.parametrize("method", METHOD_NAMES)


def flash2_behind(cache: int | None, resident: int, method: Method | None = None, **problem: int) -> DeviceTraffic:
    program = flash2(Attention(n_q=4096, d=128, **problem), TILES)  # type: ignore[arg-type]
    return dram_flows(program, ledger(program), cache, {"attention": resident}, method=method)


def reads(traffic: DeviceTraffic) -> dict[str, int]:
    return {f.flow.tensor: f.dram_read_bytes for f in traffic.flows if f.flow.direction == "read"}


# ---------------------------------------------------------------- programs behind a cache


def test_without_a_cache_dram_sees_every_request() -> None:
    traffic = flash2_behind(None, 8)
    assert reads(traffic) == {"Q": MATRIX, "K": 32 * MATRIX, "V": 32 * MATRIX}
    assert traffic.dram_write_bytes == MATRIX
    assert (traffic.l2_read_bytes, traffic.l2_write_bytes, traffic.l2_add_bytes) == (0, 0, 0)
    assert traffic.method == "none"


@METHODS
def test_what_fits_together_crosses_once(method: Method) -> None:
    traffic = flash2_behind(16 * MATRIX, 8, method)
    assert reads(traffic) == {"Q": MATRIX, "K": MATRIX, "V": MATRIX}
    assert traffic.dram_write_bytes == MATRIX
    assert traffic.l2_read_bytes == 65 * MATRIX
    assert traffic.method == method


@METHODS
def test_resident_blocks_share_the_tiles_that_they_all_read(method: Method) -> None:
    # K and V are four times the cache, so that nothing of them is left for the next of the four waves of 8 blocks.
    traffic = flash2_behind(MATRIX // 2, 8, method)
    assert reads(traffic) == {"Q": MATRIX, "K": 4 * MATRIX, "V": 4 * MATRIX}
    assert traffic.dram_write_bytes == MATRIX


@METHODS
def test_query_heads_of_one_key_head_share_its_tiles(method: Method) -> None:
    # Six heads of 32 blocks in waves of 48 are four waves; each wave of a key head's own heads has two of them.
    assert reads(flash2_behind(MATRIX // 2, 48, method, heads=6, kv_heads=1))["K"] == 4 * MATRIX
    assert reads(flash2_behind(MATRIX // 2, 48, method, heads=6))["K"] == 2 * 4 * MATRIX


@METHODS
def test_a_kernel_finds_what_the_one_before_has_left(method: Method) -> None:
    program = standard(Attention(n_q=1024, d=64), TILES)
    scores, matrix = 1024 * 1024 * 2, 1024 * 64 * 2
    resident = {kernel.name: 16 for kernel in program.kernels}
    large = dram_flows(program, ledger(program), 2**26, resident, method=method)
    # S and P are written, but come from the cache: S, P and O leave it at the end.
    assert large.dram_read_bytes == 3 * matrix
    assert large.dram_write_bytes == 2 * scores + matrix
    small = dram_flows(program, ledger(program), 2**18, resident, method=method)
    assert 2 * scores + 3 * matrix <= small.dram_read_bytes < ledger(program).hbm_read_bytes
    assert small.dram_write_bytes == 2 * scores + matrix


@METHODS
def test_a_row_that_is_read_three_times_comes_once_where_it_fits(method: Method) -> None:
    program = standard(Attention(n_q=256, d=8), Schedule(block_q=16, block_k=16, softmax_cols=16))
    resident = {kernel.name: 4 for kernel in program.kernels}

    def passes(cache: int) -> list[int]:
        flows = dram_flows(program, ledger(program), cache, resident, method=method).flows
        return [f.dram_read_bytes for f in flows if f.flow.kernel == "softmax" and f.flow.tensor == "S"]

    matrix = 256 * 256 * 2
    assert passes(2**26) == [0, 0, 0]
    assert passes(0) == [matrix, matrix, matrix]
    once = passes(32 * 1024)  # a quarter of S, but 64 times the four rows of a wave
    assert matrix * 0.9 < once[0] <= matrix
    assert once[1:] == [0, 0]


@METHODS
def test_a_reduction_reads_and_writes_what_it_adds_to(method: Method) -> None:
    p = Builder("reduce")
    X, Y = p.tensor("X", (12, 2), "fp16", "in"), p.tensor("Y", (4, 2), "fp32", "out")
    with p.kernel("zero"):
        p.store(Y[Span(0, 4)], p.fill("z", shape=(4, 2), value=0))
    with p.kernel("sum", i=3) as (i,):
        p.store(Y[Span(0, 4)], p.load("x", X[rows(i, 4)]), add=True)
    program, resident = p.done(), {"zero": 1, "sum": 2}

    def moved(cache: int | None) -> list[tuple[int, int]]:
        traffic = dram_flows(program, ledger(program), cache, resident, method=method)
        return [(f.dram_read_bytes, f.dram_write_bytes) for f in traffic.flows]

    assert moved(None) == [(0, 32), (48, 0), (96, 96)]  # three blocks add 32 bytes, there and back
    # In a cache, Y is written once for all that is done to it.
    assert moved(2**20) == [(0, 32), (48, 0), (0, 0)]
    # Without room, the adds of a wave of two blocks still meet: two waves.
    assert moved(0) == [(0, 32), (48, 0), (64, 64)]


@METHODS
def test_what_both_halves_of_a_cache_read_takes_room_twice(method: Method) -> None:
    # Two blocks read all of X two times over.  It is 0.45 of the cache: one copy stays, of two nearly half is lost.
    tiles = 460  # of 4 KiB
    p = Builder("twice")
    X, Y = p.tensor("X", (tiles * 16, 128), "fp16", "in"), p.tensor("Y", (2 * 16, 128), "fp16", "out")
    with p.kernel("read", i=2) as (i,):
        for n in ("1", "2"):
            with p.loop(f"t{n}", 0, tiles) as t:
                p.load(f"x{n}", X[rows(t, 16)])
        p.store(Y[rows(i, 16)], p.fill("y", shape=(16, 128), value=0))
    program = p.done()

    def again(partitions: int) -> float:
        """Reads of X beyond the first, in parts of X."""
        traffic = dram_flows(program, ledger(program), 2**22, {"read": 2}, partitions=partitions, method=method)
        return traffic.dram_read_bytes / (tiles * 4096) - 1

    assert again(1) < 0.02
    assert again(2) == pytest.approx(1 - kept(2 * tiles * 4096, int(USABLE * 2**22)), abs=0.05)


def test_too_much_work_to_simulate_is_left_to_the_closed_form() -> None:
    program = flash2(Attention(n_q=2**20, d=128), TILES)
    traffic = dram_flows(program, ledger(program), 2**26, {"attention": 264})
    assert traffic.method == "closed form"
    assert dram_flows(program, ledger(program), None, {"attention": 264}).method == "none"


def test_a_machine_has_what_its_last_cache_holds() -> None:
    program = flash2(Attention(n_q=4096, d=128), TILES)
    counted, resident = ledger(program), {"attention": 32}

    def same(machine: str, cache: int | None, partitions: int = 1) -> bool:
        expected = dram_flows(program, counted, cache, resident, partitions=partitions)
        return behind_caches(program, counted, load_hardware(machine), resident) == expected

    assert same("h200-sxm", 60 * 2**20, 2)
    assert same("mp31", 60 * 2**20)
    assert same("mi300x", 256 * 2**20)  # the Infinity Cache that its eight L2s share
    assert same("mp22", None)  # nobody knows


# ---------------------------------------------------------------- the order of the launch


def stepwise(n: int, slots: int, partitions: int, *, down: bool) -> Iterator[tuple[int, int, int]]:
    """(step, key tile, partitions that ask) of causal attention over n x n tiles, by running it step by step."""
    waiting, running = list(range(n)), [(-1, 0)] * slots  # (block, key tiles done)
    for step in range(n * n):
        asked: dict[int, int] = {}
        for slot, (block, done) in enumerate(running):
            if (block < 0 or done > block) and waiting:
                running[slot] = block, done = waiting.pop(0), 0
            if 0 <= block >= done:
                tile = block - done if down else done
                asked[tile] = asked.get(tile, 0) | 1 << slot % partitions
                running[slot] = block, done + 1
        yield from ((step, tile, asks) for tile, asks in sorted(asked.items()))


@pytest.mark.parametrize("down", [False, True])
@pytest.mark.parametrize(("n", "slots", "partitions"), [(7, 3, 2), (9, 4, 1), (12, 5, 3), (4, 9, 2)])
def test_resident_blocks_walk_their_loops_together(n: int, slots: int, partitions: int, down: bool) -> None:
    kernel = flash2(Attention(n_q=16 * n, d=16, causal=True), Schedule(block_q=16, block_k=16)).kernels[0]
    asked, steps = requests(kernel, slots, partitions, ("j",) if down else ())
    keys = next(r for r in asked if r.node.view.tensor.name == "K")
    found = list(zip(keys.step.tolist(), (keys.starts[2] // 16).tolist(), keys.partitions.tolist(), strict=True))
    assert found == list(stepwise(n, slots, partitions, down=down))
    assert steps == found[-1][0] + 2


def test_the_iterations_of_nested_loops_follow_each_other() -> None:
    p = Builder("nested")
    X, Y = p.tensor("X", (5, 16, 16), "fp16", "in"), p.tensor("Y", (16, 16), "fp16", "out")
    with p.kernel("walk"), p.loop("a", 0, 3) as a:
        with p.loop("b", a, 3) as b:
            x = p.load("x", X[b])
        with p.loop("c", 3, 5) as c:
            z = p.load("z", X[c])
        p.store(Y[Span(0, 16)], p.fill("y", shape=(16, 16), value=0))
    del x, z
    asked, _ = requests(p.done().kernels[0], 1, 1)
    order = {r.node.phase: list(zip(r.step.tolist(), r.starts[0].tolist(), strict=True)) for r in asked}
    assert order["x"] == [(0, 0), (1, 1), (2, 2), (5, 1), (6, 2), (9, 2)]
    assert order["z"] == [(3, 3), (4, 4), (7, 3), (8, 4), (10, 3), (11, 4)]
    assert order["compute"] == [(5, 0), (9, 0), (12, 0)]  # with the step that follows


# ---------------------------------------------------------------- the cache


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 7)), max_size=300),
    st.integers(1, 3),
    st.integers(0, 60),
)
def test_the_least_recently_used_unit_of_a_set_makes_room(
    stream: list[tuple[int, int]], partitions: int, slots: int
) -> None:
    units = np.array([unit for unit, _ in stream], np.int64)
    asks = np.array([who % 2**partitions for _, who in stream], np.int64)
    cache = Cache(partitions, slots)
    outcome = cache.run(units, asks)
    held: dict[tuple[int, int], OrderedDict[int, None]] = {}

    def touch(partition: int, unit: int) -> bool:
        if not slots:
            return False
        room = held.setdefault((partition, int(hashed(np.array([unit]))[0]) % cache.sets), OrderedDict())
        there = unit in room
        room[unit] = None
        room.move_to_end(unit)
        if len(room) > cache.ways:
            room.popitem(last=False)
        return there

    for n, (unit, who) in enumerate(zip(units.tolist(), asks.tolist(), strict=True)):
        home = (int(hashed(np.array([unit]))[0]) >> 40) % partitions
        readers = [p for p in range(partitions) if who >> p & 1]
        replicas = [touch(p, unit) for p in readers if p != home]
        reaches = home in readers or not all(replicas) or not readers
        misses = reaches and not touch(home, unit)
        assert (bool(outcome.reached[n]), bool(outcome.missed[n])) == (reaches or not slots, misses or not slots)


def test_hashed_sets_make_the_edge_of_the_capacity_soft() -> None:
    # Units read again in the order in which they came, x of the capacity: a set that has more than its 16 ways keeps
    # none of them.  P_hit asks what a set has without the unit itself.
    for x, units in ((0.5, 8192), (0.8, 13107), (1.0, 16384), (1.3, 21299)):
        missed = Cache(1, 16384).run(np.tile(np.arange(units), 2), np.ones(2 * units, np.int64)).missed[units:]
        assert np.mean(~missed) == pytest.approx(kept(x, 1), abs=0.02)
    assert kept(0, 1) == 1
    assert kept(100, 1) == 0
    assert WAYS == 16


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=0, max_size=5),
    st.integers(0, 3200),
)
def test_distinct_tiles_is_what_a_list_of_the_blocks_shows(axes: list[tuple[int, bool]], blocks: int) -> None:
    grid = [(f"a{n}", extent) for n, (extent, _) in enumerate(axes)]
    total = 1
    for _, extent in grid:
        total *= extent
    wave = min(blocks, total)
    seen = set()
    for block in range(wave):
        place, rest = [], block
        for extent, named in reversed(axes):
            rest, at = divmod(rest, extent)
            if named:
                place.append(at)
        seen.add(tuple(place))
    named_axes = frozenset(f"a{n}" for n, (_, named) in enumerate(axes) if named)
    assert distinct_tiles(grid, named_axes, wave) == len(seen)


# ---------------------------------------------------------------- the closed form beside the simulation

SQUARE = Attention(n_q=2048, d=64, heads=4)
BESIDE = {
    "flash2": (SQUARE, 3),
    "flash2 with query groups": (replace(SQUARE, heads=8, kv_heads=2), 3),
    "flash2 causal": (replace(SQUARE, causal=True), 2),
    "flash2 causal, down": (replace(SQUARE, heads=16, kv_heads=16, causal=True), 2),
    "standard": (SQUARE, 32),
    "standard with a row in tiles": (SQUARE, 16),
    "standard-backward": (replace(SQUARE, heads=2, kv_heads=2), 32),
    "flash-backward": (SQUARE, 4),
    "flash-backward causal": (replace(SQUARE, causal=True), 8),
    "split-kv": (replace(SQUARE, heads=2, kv_heads=2), 2),
    "softmax-safe": (SQUARE, 4),
}


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("case", BESIDE)
def test_the_closed_form_is_near_the_simulation(case: str, partitions: int) -> None:
    problem, mib = BESIDE[case]
    columns = 512 if "tiles" in case or "softmax" in case else 2048
    s = Schedule(block_q=64, block_k=64, splits=4, softmax_rows=4, softmax_cols=columns)
    program = load_dataflow(case.split()[0])(problem, s)
    resident, down = dict.fromkeys((k.name for k in program.kernels), 40), ("j",) if "down" in case else ()
    slow, fast = (
        dram_flows(
            program, ledger(program), mib * 2**20, resident, partitions=partitions, descending=down, method=method
        )
        for method in METHOD_NAMES
    )
    assert slow.method != fast.method
    assert fast.dram_read_bytes == pytest.approx(slow.dram_read_bytes, rel=0.13)
    assert fast.dram_write_bytes == pytest.approx(slow.dram_write_bytes, rel=0.05)
