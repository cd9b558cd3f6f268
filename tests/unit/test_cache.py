"""The first L2 model: what a cache leaves of a program's device traffic."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iosim.dataflows.flash2 import flash2
from iosim.dataflows.standard import standard
from iosim.interpreters.ledger import ledger
from iosim.memory.cache import DeviceTraffic, distinct_tiles, dram_flows
from iosim.problem import Attention
from iosim.program import Builder, Span, rows
from iosim.schedule import Schedule

TILES = Schedule(block_q=128, block_k=128)
MATRIX = 4096 * 128 * 2  # Q, K, V or O of one head at n = 4096, d = 128 in fp16


def flash2_behind(cache: int | None, resident: int, **problem: int) -> DeviceTraffic:
    program = flash2(Attention(n_q=4096, d=128, **problem), TILES)  # type: ignore[arg-type]
    return dram_flows(program, ledger(program), cache, {"attention": resident})


def reads(traffic: DeviceTraffic) -> dict[str, int]:
    return {f.flow.tensor: f.dram_read_bytes for f in traffic.flows if f.flow.direction == "read"}


def test_without_a_cache_dram_sees_every_request() -> None:
    traffic = flash2_behind(None, 8)
    assert reads(traffic) == {"Q": MATRIX, "K": 32 * MATRIX, "V": 32 * MATRIX}
    assert traffic.dram_write_bytes == MATRIX
    assert (traffic.l2_read_bytes, traffic.l2_write_bytes, traffic.l2_add_bytes) == (0, 0, 0)


def test_what_fits_together_crosses_once() -> None:
    traffic = flash2_behind(4 * MATRIX, 8)  # Q, K, V and O, to the byte
    assert reads(traffic) == {"Q": MATRIX, "K": MATRIX, "V": MATRIX}
    assert traffic.l2_read_bytes == 65 * MATRIX


def test_resident_blocks_share_the_tiles_that_they_all_read() -> None:
    # One byte less and the 32 blocks run in waves of 8 that walk the keys together: 4 times K and V.
    traffic = flash2_behind(4 * MATRIX - 1, 8)
    assert reads(traffic) == {"Q": MATRIX, "K": 4 * MATRIX, "V": 4 * MATRIX}
    assert traffic.dram_write_bytes == MATRIX


def test_what_is_touched_is_read_at_least_once() -> None:
    # Causal: the 32 blocks ask for 528 of 1024 tiles, half a K and V for each; together they touch all of both.
    traffic = flash2_behind(4 * MATRIX - 1, 32, causal=True)
    assert reads(traffic) == {"Q": MATRIX, "K": MATRIX, "V": MATRIX}


def test_heads_that_run_together_share_nothing() -> None:
    # 48 resident blocks are one and a half heads of 32 blocks: 2 heads in a wave, 2 / 48 of the requests.
    traffic = flash2_behind(4 * MATRIX, 48, heads=6)
    assert reads(traffic)["K"] == 6 * 32 * MATRIX * 2 // 48
    # With one key head for all six, the wave reads one tile.
    assert reads(flash2_behind(4 * MATRIX - 1, 48, heads=6, kv_heads=1))["K"] == 6 * 32 * MATRIX // 48


def test_a_cache_too_small_for_the_tiles_of_a_wave_saves_nothing() -> None:
    # Two of each tile of 32 KiB: 8 of Q, one of K, one of V.
    needed = 2 * (8 + 1 + 1) * 128 * 128 * 2
    assert reads(flash2_behind(needed, 8))["K"] == 4 * MATRIX
    assert reads(flash2_behind(needed - 1, 8))["K"] == 32 * MATRIX


def test_standard_meets_an_empty_cache_in_each_kernel() -> None:
    program = standard(Attention(n_q=1024, d=64), TILES)
    resident = {kernel.name: 16 for kernel in program.kernels}
    traffic = dram_flows(program, ledger(program), 2**30, resident)
    scores, matrix = 1024 * 1024 * 2, 1024 * 64 * 2
    # S and P are written and read once each, although they would still be in the cache.
    assert traffic.dram_read_bytes == 2 * scores + 3 * matrix
    assert traffic.dram_write_bytes == 2 * scores + matrix


def test_a_row_that_is_read_three_times_comes_once_where_it_fits() -> None:
    program = standard(Attention(n_q=64, d=8), Schedule(block_q=16, block_k=16, softmax_cols=16))
    counted = ledger(program)
    traffic = dram_flows(program, counted, 2**30, {kernel.name: 4 for kernel in program.kernels})
    passes = [f.dram_read_bytes for f in traffic.flows if f.flow.kernel == "softmax" and f.flow.tensor == "S"]
    assert passes == [64 * 64 * 2, 0, 0]


def test_a_reduction_reads_and_writes_what_it_adds_to() -> None:
    p = Builder("reduce")
    X, Y = p.tensor("X", (12, 2), "fp16", "in"), p.tensor("Y", (4, 2), "fp32", "out")
    with p.kernel("zero"):
        p.store(Y[Span(0, 4)], p.fill("z", shape=(4, 2), value=0))
    with p.kernel("sum", i=3) as (i,):
        p.store(Y[Span(0, 4)], p.load("x", X[rows(i, 4)]), add=True)
    program, resident = p.done(), {"zero": 1, "sum": 2}
    counted = ledger(program)

    def moved(cache: int | None) -> tuple[int, int]:
        traffic = dram_flows(program, counted, cache, resident)
        return traffic.flows[-1].dram_read_bytes, traffic.flows[-1].dram_write_bytes

    assert moved(None) == (96, 96)  # three blocks of 32 bytes, there and back
    assert moved(2**20) == (32, 32)
    # X (48 bytes) and Y (32) do not fit in 79; two tiles of X (16) and one of Y (32), twice, do not either.
    assert moved(79) == (96, 96)
    assert dram_flows(program, counted, 79, resident).l2_add_bytes == 96


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
